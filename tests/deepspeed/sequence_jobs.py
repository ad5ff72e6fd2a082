"""What ranks that share prompts train under DeepSpeed: `LAUNCHES[launch][job]`.

Whatever (dp, sp) is, an optimizer step sees the same two groups as a step of `jobs`: with dp = 2
each sequence group has one of them, with dp = 1 the only one has both. So all end where the same
one process ends. The jobs are not the product of all options: each value meets each stage, for a
pair of ranks and for two pairs.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from tests.deepspeed.groups import GROUP_SIZE, Group
from tests.deepspeed.jobs import (
    AGAINST_STOCK,
    AGAINST_UNION,
    RAGGED,
    STAGES,
    Cell,
    Job,
    groups_setting,
)
from tests.trl.parity import ADAMW

ROWS = 2 * GROUP_SIZE
"""Of an optimizer step, over all ranks."""


@dataclass(frozen=True)
class Geometry:
    """`dp_size` groups of `sp_size` ranks."""

    dp_size: int
    sp_size: int

    def __str__(self) -> str:
        return f"({self.dp_size}, {self.sp_size})"

    def job(self, job: Job, same_as: tuple[str, str] | None = None) -> Job:
        """`job` on these ranks, whose groups together have the rows of its two."""
        accumulation = job.setting.config.get("gradient_accumulation_steps", 1)
        rows = ROWS // (self.dp_size * accumulation)
        return replace(
            job,
            setting=job.setting.but(per_device_train_batch_size=rows),
            dp_size=self.dp_size,
            sp_size=self.sp_size,
            same_as=same_as,
        )

    def named(self, jobs: dict[str, Job]) -> dict[str, Job]:
        """The same with this geometry in their names."""
        return {f"{self}, {name}": job for name, job in jobs.items()}


ONE, PAIR, TWO_PAIRS, FOUR = Geometry(1, 1), Geometry(1, 2), Geometry(2, 2), Geometry(1, 4)

# -------------------------------------------------------------------- the grid

# Other ways to the same numbers.
_LAYOUT = {"longstraw_sp_layout": "zigzag"}
_PAGES = {"longstraw_page_device": "host"}
# Several members at a time, as many as have half the tokens of a chunk; else one.
_BATCHES = {"longstraw_replay_batch": None, "longstraw_chunk_size": 32}
_CHECKPOINTING = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


@dataclass(frozen=True)
class Way:
    """A cell of the matrix, and how it is computed.

    Attributes:
        longstraw, config: options that change nothing of what is computed.
    """

    cell: Cell
    longstraw: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def job(self, geometry: Geometry, stage: int) -> Job:
        """Under ZeRO `stage`."""
        setting = self.cell.setting().but(**self.config)
        longstraw = {**setting.longstraw, **self.longstraw}
        job = Job(replace(setting, longstraw=longstraw), stage)
        in_matrix = "AdamW" if "optim" in self.config else str(self.cell)
        return geometry.job(job, (f"stage {stage}", in_matrix))


_SGD, _BF16 = Cell("full", "exact", "fp32", 1), Cell("full", "exact", "bf16", 1)


def ways(stage: int) -> dict[str, Way]:
    """By name. Full fine-tuning accumulates as "auto" has it: partitioned from stage 2 on."""
    found = {
        "full, exact": Way(_SGD),
        "LoRA, stopped, accumulation 4": Way(
            Cell("LoRA", "stopped", "fp32", 4), {**_LAYOUT, **_PAGES, **_BATCHES}, _CHECKPOINTING
        ),
        "AdamW": Way(_SGD, {**_PAGES, **_BATCHES}, ADAMW),
        "bf16": Way(_BF16, {**_LAYOUT, **_BATCHES}, _CHECKPOINTING),
    }
    if stage >= 2:
        how = {"longstraw_accumulate": "partitioned"}
        found["LoRA, exact, partitioned"] = Way(
            Cell("LoRA", "exact", "fp32", 1), {**how, **_PAGES, **_BATCHES}
        )
    return found


def more_ways(stage: int) -> dict[str, Way]:
    """Those that are left to the cheapest geometry."""
    found = {
        "full, stopped, accumulation 4": Way(
            Cell("full", "stopped", "fp32", 4), {**_PAGES, **_BATCHES}
        ),
        "LoRA, exact, accumulation 4": Way(
            Cell("LoRA", "exact", "fp32", 4), {**_LAYOUT, **_BATCHES}, _CHECKPOINTING
        ),
    }
    if stage >= 2:
        how = {"longstraw_accumulate": "local"}
        found["full, exact, local"] = Way(_SGD, {**how, **_LAYOUT, **_BATCHES})
    return found


def _few_ways(stage: int) -> dict[str, Way]:
    """Full fine-tuning, and adapters at both ends, for the most expensive geometry."""
    names = ["full, exact", *(["LoRA, stopped, accumulation 4"] if stage in (0, 3) else [])]
    return {name: ways(stage)[name] for name in names}


def _grid(geometry: Geometry, ways_at: dict[int, dict[str, Way]]) -> dict[str, Job]:
    return geometry.named(
        {
            f"ZeRO-{stage}, {name}": way.job(geometry, stage)
            for stage, found in ways_at.items()
            for name, way in found.items()
        }
    )


GRIDS = {
    "a pair": _grid(PAIR, {stage: {**ways(stage), **more_ways(stage)} for stage in STAGES}),
    "two pairs": _grid(TWO_PAIRS, {stage: ways(stage) for stage in STAGES}),
    "four ranks": _grid(FOUR, {stage: _few_ways(stage) for stage in STAGES}),
}

# What bf16 may be off: stock TRL under the same configuration, on two ranks.
BF16_STOCK = {
    f"stock, ZeRO-{stage}": Job(
        _BF16.setting(), stage, is_ours=False, same_as=(f"stage {stage}", str(_BF16))
    )
    for stage in STAGES
}

# -------------------------------------------------------------------- unequal groups, other models

_RAGGED = [
    "ZeRO-3, full, 4 members against none",
    "ZeRO-3, full, prompts of 1 token against 30",
    "ZeRO-3, LoRA, 4 members against none",  # accumulated locally
    "ZeRO-2, full, responses of 3 chunks against 1 token",
]
UNEQUAL_PAIRS = TWO_PAIRS.named(
    {name: TWO_PAIRS.job(RAGGED[name], ("ragged", name)) for name in _RAGGED}
)
_MODELS = {
    "ZeRO-3, gemma2": "families",
    "ZeRO-3, qwen3_5": "families",
    "ZeRO-3, qwen3_moe": "experts",
}
MODELS = TWO_PAIRS.named(
    {
        name: TWO_PAIRS.job(AGAINST_UNION[launch][name], (launch, name))
        for name, launch in _MODELS.items()
    }
)
# A mean over the rows of a rank, so one group has to have them all.
AUXILIARY_LOSS = PAIR.named(
    {
        f"ZeRO-{stage}, router auxiliary loss": PAIR.job(
            AGAINST_STOCK["experts"][f"ZeRO-{stage}, router auxiliary loss"]
        )
        for stage in (2, 3)
    }
)

# -------------------------------------------------------------------- mistakes, planted

PLANTED = {
    probe: replace(Way(_SGD).job(PAIR, 0), probe=probe)
    for probe in ("cotangents_not_scaled", "keys_of_own_queries_only")
}

# -------------------------------------------------------------------- memory

# 32 tokens of the prompt are captured and 8 of a response, in chunks of 8: all of them divide.
_DIVISIBLE = Job(groups_setting((Group(33, (9, 9, 9, 9)), Group(33, (9, 9, 9, 9)))), 0)
STATE = {f"{geometry}, state": geometry.job(_DIVISIBLE) for geometry in (ONE, PAIR, FOUR)}

_ALL = (*GRIDS.values(), BF16_STOCK, UNEQUAL_PAIRS, MODELS, AUXILIARY_LOSS, STATE)


def _on(world_size: int) -> dict[str, Job]:
    every = {name: job for jobs in _ALL for name, job in jobs.items()}
    return {name: job for name, job in every.items() if job.world_size == world_size}


LAUNCHES: dict[str, dict[str, Job]] = {
    "sharing, two ranks": _on(2),
    "sharing, four ranks": _on(4),
    "sharing, planted": PLANTED,
}
