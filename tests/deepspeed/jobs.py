"""What is trained under DeepSpeed, by name: `LAUNCHES[launch][job]`.

Jobs of one launch are trained one after another in the same processes, as most of a launch's time
goes into imports. Tests and ranks look them up in `launches`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from peft import LoraConfig

from tests.deepspeed.groups import (
    FLAT,
    GROUP_SIZE,
    NUM_STEPS,
    UNEQUAL,
    Group,
    groups_dataset,
    groups_reward,
    groups_rollout,
)
from tests.trl.parity import ADAMW, Setting, prompts_dataset

WORLD_SIZE = 2
STAGES = (0, 1, 2, 3)
OFFLOAD = {"device": "cpu", "pin_memory": False}


def zero_config(stage: int, **changes: Any) -> dict[str, Any]:
    """A DeepSpeed configuration that leaves to the trainer what it knows.

    `changes` are those of `zero_optimization`. Parameters are never kept whole under stage 3: by
    default all of a tiny model's would be, and nothing gathered.
    """
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    return {
        "zero_optimization": {**zero, **changes},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_force_ds_cpu_optimizer": False,  # its own is compiled when first used
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


# So that what ranks have to do differs by members, and can be counted.
ONE_AT_A_TIME: dict[str, Any] = {"longstraw_replay_batch": 1}


def groups_setting(groups: Sequence[Group], **config: Any) -> Setting:
    """Train these groups, two per step."""
    return Setting(
        dataset=lambda: groups_dataset(groups),
        rollout=lambda: groups_rollout(groups),
        rewards=(groups_reward(groups),),
        config={"max_steps": len(groups) // 2, "shuffle_dataset": False, **config},
        longstraw=dict(ONE_AT_A_TIME),
    )


def lora() -> dict[str, Any]:
    """An adapter on every linear layer, and no part of it zero."""
    return {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}


@dataclass(frozen=True)
class Job:
    """One training on the ranks of a launch; on two with rows of their own if nothing else is said.

    Attributes:
        setting: of one group of ranks, without DeepSpeed.
        stage: of ZeRO.
        zero: changes of `zero_optimization`.
        is_ours: LongStraw, or stock TRL under the same configuration.
        from_launcher: DeepSpeed is configured by `accelerate launch` alone.
        probe: name of what is done around the training, in `probes`.
        dp_size, sp_size: groups of ranks, which have rows of their own, and ranks in each.
        same_as: launch and name of a job for which one process does the same.
    """

    setting: Setting
    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    is_ours: bool = True
    from_launcher: bool = False
    probe: str | None = None
    dp_size: int = WORLD_SIZE
    sp_size: int = 1
    same_as: tuple[str, str] | None = None

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.dp_size * self.sp_size

    def on_a_rank(self) -> Setting:
        """The setting as each rank trains it."""
        setting = self.setting
        if self.sp_size > 1:
            shared = {**setting.longstraw, "longstraw_sp_size": self.sp_size}
            setting = replace(setting, longstraw=shared)
        if self.from_launcher:
            return setting
        return setting.but(deepspeed=zero_config(self.stage, **self.zero))


def union(setting: Setting, num_ranks: int = WORLD_SIZE) -> Setting:
    """One process that sees in each optimizer step what two ranks (or `num_ranks`) see.

    Twice the batch, and no accumulation: with `micro * accumulation` rows per rank, both have
    `2 * micro * accumulation` rows per step. The losses used divide by what does not depend on who
    has which row: "dapo" by the response tokens of all processes and all micro-batches, and
    "dr_grpo" by rows times the longest completion, where rows are equally many everywhere. The mean
    over ranks of the sum over micro-batches is then the one loss over all rows. ("bnpo" divides by
    the tokens of a micro-batch and has no union.)
    """
    config = setting.config
    micro = config.get("per_device_train_batch_size", GROUP_SIZE)
    rows = num_ranks * micro * config.get("gradient_accumulation_steps", 1)
    doubled = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    if "per_device_eval_batch_size" in config:
        doubled["per_device_eval_batch_size"] = num_ranks * config["per_device_eval_batch_size"]
    return setting.but(**doubled)


# -------------------------------------------------------------------- the matrix

TUNED = ("full", "LoRA")
GRADIENTS = ("exact", "stopped")
DTYPES = ("fp32", "bf16")
ACCUMULATION = (1, 4)
# TRL's default, and one whose normalizer does not depend on tokens; one for each accumulation.
LOSS_TYPES = {1: "dapo", 4: "dr_grpo"}


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix."""

    tuned: str
    gradient: str
    dtype: str
    accumulation: int

    def __str__(self) -> str:
        return f"{self.tuned}, {self.gradient}, {self.dtype}, accumulation {self.accumulation}"

    def setting(self) -> Setting:
        """On one rank. With accumulation 4 a group comes one member at a time."""
        setting = groups_setting(
            UNEQUAL,
            gradient_accumulation_steps=self.accumulation,
            per_device_train_batch_size=GROUP_SIZE // self.accumulation,
            loss_type=LOSS_TYPES[self.accumulation],
            bf16=self.dtype == "bf16",
        )
        longstraw = {**ONE_AT_A_TIME, "longstraw_prompt_gradient": self.gradient}
        if self.tuned == "LoRA":
            # As "auto" has it for adapters that are small beside their model, unlike these.
            longstraw["longstraw_accumulate"] = "local"
        trainer = lora if self.tuned == "LoRA" else dict
        return replace(setting, longstraw=longstraw, trainer=trainer)


CELLS = [Cell(*values) for values in product(TUNED, GRADIENTS, DTYPES, ACCUMULATION)]
# From bf16 gradients to fp32 masters on the host there are other ways than on the device.
OFFLOADED = [Cell(tuned, "exact", "bf16", 1) for tuned in TUNED]
_SGD = Cell("full", "exact", "fp32", 1).setting()
_SGD_LORA = Cell("LoRA", "exact", "fp32", 1).setting()
# Several buckets, some smaller than a parameter, and reductions beside the backward.
_BUCKETS = {"reduce_bucket_size": 3000, "overlap_comm": True, "allgather_bucket_size": 3000}


def _accumulating(setting: Setting, how: str) -> Setting:
    return replace(setting, longstraw={**ONE_AT_A_TIME, "longstraw_accumulate": how})


def beside_the_matrix(stage: int) -> dict[str, Job]:
    """Other settings that end where the union of full, exact, fp32 does."""
    jobs = {
        "configured by accelerate": Job(_SGD, stage, from_launcher=True),
        "LoRA, configured by accelerate": Job(_SGD_LORA, stage, from_launcher=True),
        "AdamW": Job(_SGD.but(**ADAMW), stage),
    }
    if stage >= 1:
        jobs["small buckets"] = Job(_SGD, stage, _BUCKETS)
    if stage >= 2:
        jobs["full, local"] = Job(_accumulating(_SGD, "local"), stage)
        jobs["LoRA, partitioned"] = Job(_accumulating(_SGD_LORA, "partitioned"), stage)
    if stage == 3:
        jobs["small parameters kept whole"] = Job(
            _SGD, stage, {"stage3_param_persistence_threshold": 100}
        )
        jobs["no prefetch"] = Job(
            _SGD, stage, {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0}
        )
    return jobs


def _stage(stage: int) -> dict[str, Job]:
    jobs = beside_the_matrix(stage)
    for cell in CELLS:
        jobs[str(cell)] = Job(cell.setting(), stage)
        if cell.dtype == "bf16" and cell.gradient == "exact":
            jobs[f"stock, {cell}"] = Job(cell.setting(), stage, is_ours=False)
    if stage >= 1:
        for cell in OFFLOADED:
            setting = _accumulating(cell.setting(), "auto")
            zero = {"offload_optimizer": OFFLOAD}
            jobs[f"{cell}, optimizer in host memory"] = Job(setting, stage, zero)
    return jobs


# -------------------------------------------------------------------- mistakes, planted

PLANTED = {
    "ZeRO-3, backwards not counted": Job(_SGD, 3, probe="uncounted_backwards"),
    "ZeRO-2, each backward at the boundary": Job(_SGD, 2, probe="boundary_at_each_backward"),
}
# Ranks alike: those that have less to do would already wait in vain.
_ALIKE = groups_setting((Group(17), Group(17)))
WITHOUT_ANCHOR = {
    f"ZeRO-3, no anchor, {how}": Job(_accumulating(_ALIKE, how), 3, probe="no_anchor")
    for how in ("partitioned", "local")
}

# -------------------------------------------------------------------- ragged ranks

_LONGEST = 20
RAGGED_GROUPS = {
    "4 members against none": (Group(12), Group(12, rewards=FLAT)),
    # Members that are cut off are masked out of the loss: they have an advantage and no gradient.
    "1 member against 3": (
        Group(9, (9, 9, 9, 5), is_cut=(True, True, True, False)),
        Group(9, (9, 5, 6, 7), is_cut=(True, False, False, False)),
    ),
    "prompts of 1 token against 30": (Group(1), Group(30)),
    "responses of 3 chunks against 1 token": (Group(5, (20, 17, 3, 8)), Group(5, (1, 2, 1, 3))),
}


def _ragged(groups: tuple[Group, Group], stage: int, tuned: str) -> Job:
    # The second step has the roles exchanged.
    setting = groups_setting(
        (*groups, groups[1], groups[0]),
        max_completion_length=_LONGEST,
        mask_truncated_completions=True,
        per_device_train_batch_size=GROUP_SIZE,
    )
    if tuned == "LoRA":
        setting = _accumulating(replace(setting, trainer=lora), "local")
    return Job(setting, stage)


RAGGED = {
    f"ZeRO-{stage}, {tuned}, {name}": _ragged(groups, stage, tuned)
    for stage in STAGES
    for tuned in TUNED
    for name, groups in RAGGED_GROUPS.items()
}

# -------------------------------------------------------------------- options

_OFFLOADS = {
    "optimizer": {"offload_optimizer": OFFLOAD},
    "optimizer and parameters": {"offload_optimizer": OFFLOAD, "offload_param": OFFLOAD},
    "parameters": {"offload_param": OFFLOAD},
}
_CHECKPOINTING = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
_GREEDY = {"generation_kwargs": {"do_sample": False}}


def _family(family: str, setting: Setting = _SGD) -> Setting:
    return replace(setting, family=family)


def _evaluated(setting: Setting) -> Setting:
    """Evaluated between updates, on prompts that no group of training has."""
    return replace(setting, trainer=lambda: {"eval_dataset": prompts_dataset((4, 19), seed=9)}).but(
        eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=GROUP_SIZE
    )


def _generating(setting: Setting) -> Setting:
    return replace(setting, rollout=None).but(**_GREEDY)


_BETA, _BETA_LORA = _SGD.but(beta=0.2), _SGD_LORA.but(beta=0.2)
_TWICE = _SGD.but(num_iterations=2, max_steps=NUM_STEPS)
OPTIONS = {
    **{f"ZeRO-{stage}, reference model": Job(_BETA, stage) for stage in STAGES},
    **{f"ZeRO-{stage}, reference without adapters": Job(_BETA_LORA, stage) for stage in STAGES},
    **{
        f"ZeRO-{stage}, {what} in host memory": Job(_SGD, stage, zero)
        for what, zero in _OFFLOADS.items()
        for stage in STAGES[1:]
        if stage == 3 or what == "optimizer"
    },
    "ZeRO-1, LoRA, optimizer in host memory": Job(
        _accumulating(_SGD_LORA, "local"), 1, _OFFLOADS["optimizer"]
    ),
    "ZeRO-3, LoRA, parameters in host memory": Job(
        _accumulating(_SGD_LORA, "local"), 3, _OFFLOADS["parameters"]
    ),
    **{f"ZeRO-{stage}, checkpointing": Job(_SGD.but(**_CHECKPOINTING), stage) for stage in STAGES},
    "ZeRO-3, LoRA, checkpointing": Job(_SGD_LORA.but(**_CHECKPOINTING), 3),
    **{f"ZeRO-{stage}, completions used twice": Job(_TWICE, stage) for stage in STAGES},
    **{f"ZeRO-{stage}, evaluation": Job(_evaluated(_SGD), stage) for stage in STAGES},
    # A greedy group has one response and advantages that sum to zero: the reference's part is left.
    **{
        f"ZeRO-{stage}, LoRA, greedy generation, reference": Job(_generating(_BETA_LORA), stage)
        for stage in (0, 3)
    },
}
FAMILIES = {
    "ZeRO-2, tied embeddings": Job(_family("smollm2"), 2),
    "ZeRO-3, tied embeddings": Job(_family("smollm2"), 3),
    "ZeRO-3, tied embeddings, reference": Job(_family("smollm2", _BETA), 3),
    "ZeRO-3, gemma2": Job(_family("gemma2"), 3),
    "ZeRO-2, qwen3_5": Job(_family("qwen3_5"), 2),
    "ZeRO-3, qwen3_5": Job(_family("qwen3_5"), 3),
}
_EXPERTS = _SGD.but(router_aux_loss_coef=0.0)
EXPERTS = {
    "ZeRO-2, qwen3_moe": Job(_family("qwen3_moe", _EXPERTS), 2),
    "ZeRO-3, qwen3_moe": Job(_family("qwen3_moe", _EXPERTS), 3),
}
LOW_STAGES = "options at stages 0 and 1"
AGAINST_UNION = {
    "options": {name: job for name, job in OPTIONS.items() if job.stage >= 2},
    LOW_STAGES: {name: job for name, job in OPTIONS.items() if job.stage < 2},
    "families": FAMILIES,
    "experts": EXPERTS,
}

# An auxiliary loss and an entropy bonus are means over a rank's rows, and which rows meet in a step
# depends on how many ranks shuffle them: these are compared with stock TRL on the same two ranks.
_AUX = _family("qwen3_moe", _SGD.but(router_aux_loss_coef=0.5))
_LATER = _SGD.but(steps_per_generation=2, num_iterations=2)
AGAINST_STOCK = {
    "options": {
        "ZeRO-2, two steps per generation, twice": Job(_LATER, 2),
        "ZeRO-3, two steps per generation, twice": Job(_LATER, 3),
        "ZeRO-3, greedy generation, entropy bonus": Job(_generating(_SGD.but(entropy_coef=0.5)), 3),
    },
    "experts": {
        "ZeRO-2, router auxiliary loss": Job(_AUX, 2),
        "ZeRO-3, router auxiliary loss": Job(_AUX, 3),
    },
}


def _with_stock(jobs: dict[str, Job]) -> dict[str, Job]:
    stock = {f"stock, {name}": replace(job, is_ours=False) for name, job in jobs.items()}
    return {**jobs, **stock}


# -------------------------------------------------------------------- memory

# Smaller than most parameters.
BUCKET = 3000
# Weights of one module at a time; what may be fetched ahead would be the whole tiny model.
NOT_AHEAD = {
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
MEMORY = {
    "ZeRO-3, full": Job(_SGD, 3, {"reduce_bucket_size": BUCKET, **NOT_AHEAD}, probe="memory"),
    "ZeRO-2, full": Job(_SGD, 2, {"reduce_bucket_size": BUCKET}, probe="memory"),
    **{
        f"ZeRO-{stage}, LoRA, bf16": Job(
            _accumulating(_SGD_LORA, "local").but(bf16=True), stage, probe="memory"
        )
        for stage in STAGES
    },
}

LAUNCHES: dict[str, dict[str, Job]] = {
    **{
        launch: {**jobs, **_with_stock(AGAINST_STOCK.get(launch, {}))}
        for launch, jobs in AGAINST_UNION.items()
    },
    "memory": MEMORY,
    **{f"stage {stage}": _stage(stage) for stage in STAGES},
    "planted": PLANTED,
    **{name: {name: job} for name, job in WITHOUT_ANCHOR.items()},
    "ragged": RAGGED,
}
