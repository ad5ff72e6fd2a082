"""What is trained with experts divided over ranks, and what each rank runs to train it.

`accelerate launch ... -m tests.deepspeed.expert_parallel LAUNCH FOLDER` trains the jobs of one
launch, one after another, and leaves what this rank ended with in `FOLDER/NUMBER-RANK.pt`.
"""

import faulthandler
import gc
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig

from longstraw import DeepSpeedBackend
from longstraw.backends import Finalized
from tests.deepspeed.groups import GROUP_SIZE, UNEQUAL
from tests.deepspeed.jobs import STAGES, Job, groups_setting
from tests.deepspeed.launch import write_accelerate_config
from tests.trl.parity import BASE, ModelPath, Setting, make_trainer
from tests.trl.ranks import run_accelerate

# Three steps. In the second one rank has nothing to replay.
_GROUPS = (*UNEQUAL[:4], *UNEQUAL[6:])
_CHECKPOINTING = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


@dataclass(frozen=True)
class ExpertJob(Job):
    """A training whose experts AutoEP divides.

    Attributes:
        ep_size: ranks that they are divided over.
        fault: a mistake in `FAULTS` that is planted.
        saves: whether the model is written to `FOLDER/saved` when it is trained.
    """

    ep_size: int = 2
    fault: str | None = None
    saves: bool = False

    def on_a_rank(self) -> Setting:
        setting = super().on_a_rank()
        # Where DeepSpeed asks for it; else AutoEP finds its parameters in the trainer's own.
        own = {"type": "SGD", "params": {"lr": BASE["learning_rate"]}}
        optimizer = {"optimizer": own} if self.stage in (1, 2) else {}
        config = {
            **setting.config["deepspeed"],
            **optimizer,
            "expert_parallel": {"enabled": True, "autoep_size": self.ep_size},
        }
        return setting.but(deepspeed=config)

    def shared(self) -> "ExpertJob":
        """The same rows on the same ranks, of which two share each prompt."""
        dp_size = self.dp_size // 2
        rows = 2 * GROUP_SIZE // dp_size
        setting = self.setting.but(per_device_train_batch_size=rows)
        return replace(self, setting=setting, dp_size=dp_size, sp_size=2)


def attention_lora() -> dict[str, Any]:
    """Adapters on attention, no part of them zero. AutoEP takes no adapters on experts."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return {"peft_config": LoraConfig(r=4, target_modules=targets, init_lora_weights=False)}


def _family(family: str, **config: Any) -> Setting:
    setting = groups_setting(_GROUPS, **config)
    variant = {} if family == "glm_moe_dsa" else setting.variant
    return replace(setting, family=family, variant=variant)


_QWEN = _family("qwen3_moe", router_aux_loss_coef=0.0)
_LORA = replace(_QWEN, trainer=attention_lora)
_GENERATING = replace(_LORA, rollout=None).but(generation_kwargs={"do_sample": False}, beta=0.2)

FEW: dict[str, ExpertJob] = {
    "ZeRO-0": ExpertJob(_QWEN, 0),
    "ZeRO-2, undivided": ExpertJob(_QWEN, 2, ep_size=1),
    "ZeRO-3, LoRA, generation, sp 2": ExpertJob(_GENERATING, 3).shared(),
    "ZeRO-2, sp 2": ExpertJob(_QWEN, 2, saves=True).shared(),
    "ZeRO-2, glm_moe_dsa, sp 2": ExpertJob(_family("glm_moe_dsa"), 2).shared(),
    "ZeRO-1, experts halved": ExpertJob(_QWEN, 1, fault="halved_experts"),
}
MANY: dict[str, ExpertJob] = {
    "ZeRO-3": ExpertJob(_QWEN, 3),
    "ZeRO-0, clipped by each rank's norm": ExpertJob(_QWEN, 0, fault="own_norms"),
    **{f"ZeRO-{stage}": ExpertJob(_QWEN, stage) for stage in (1, 2)},
    **{f"ZeRO-{stage}, sp 2": ExpertJob(_QWEN, stage).shared() for stage in (0, 1, 3)},
    "ZeRO-2, local": ExpertJob(
        replace(_QWEN, longstraw={**_QWEN.longstraw, "longstraw_accumulate": "local"}), 2
    ),
    "ZeRO-2, checkpointing": ExpertJob(_QWEN.but(**_CHECKPOINTING), 2),
    "ZeRO-3, checkpointing, sp 2": ExpertJob(_QWEN.but(**_CHECKPOINTING), 3).shared(),
    **{f"ZeRO-{stage}, LoRA": ExpertJob(_LORA, stage) for stage in (0, 3)},
    **{f"ZeRO-{stage}, reference model": ExpertJob(_QWEN.but(beta=0.2), stage) for stage in (2, 3)},
    **{f"ZeRO-{stage}, LoRA, generation": ExpertJob(_GENERATING, stage) for stage in (0, 3)},
    "ZeRO-0, LoRA, generation, sp 2": ExpertJob(_GENERATING, 0).shared(),
    "ZeRO-2, qwen3_5_moe, sp 2": ExpertJob(
        _family("qwen3_5_moe", router_aux_loss_coef=0.0), 2
    ).shared(),
    "ZeRO-2, router auxiliary loss, sp 2": ExpertJob(
        _family("qwen3_moe", router_aux_loss_coef=0.5), 2
    ).shared(),
    "ZeRO-3, deepseek_v3": ExpertJob(_family("deepseek_v3"), 3),
    "ZeRO-3, glm_moe_dsa": ExpertJob(_family("glm_moe_dsa"), 3),
}


def _on_four(stage: int) -> ExpertJob:
    # Two pairs of ranks, each of which has all experts and one group's rows of a step.
    return ExpertJob(_QWEN, stage, dp_size=4).shared()


FOUR = {f"ZeRO-{stage}, sp 2, four ranks": _on_four(stage) for stage in STAGES}

LAUNCHES = {"few": FEW, "many": MANY, "four ranks": FOUR}

# -------------------------------------------------------------------- mistakes, planted


@contextmanager
def halved_experts() -> Iterator[None]:
    """Gradients of experts are divided by the ranks that hold them, as a mean over those would."""
    finalize = DeepSpeedBackend.finalize

    def halved(self: DeepSpeedBackend, parameters: Any) -> Finalized:
        for parameter in parameters:
            if not getattr(parameter, "allreduce", True) and parameter.grad is not None:
                parameter.grad /= self.ep_size
        return finalize(self, parameters)

    with patch.object(DeepSpeedBackend, "finalize", halved):
        yield


def own_norms() -> AbstractContextManager[Any]:
    """What DeepSpeed clips by at stage 0, the mean of the norms of what each rank holds."""
    return patch("longstraw.backends.deepspeed.clip_gradients", lambda *_: None)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "halved_experts": halved_experts,
    "own_norms": own_norms,
}

# -------------------------------------------------------------------- launching


def run_launch(name: str, model_path: ModelPath, folder: Path, *, timeout: float) -> Any:
    """Train the jobs of a launch; what each rank left, by job."""
    jobs = LAUNCHES[name]
    settings = {job: jobs[job].setting for job in jobs}
    paths = {job: str(model_path(s.family, **s.variant)) for job, s in settings.items()}
    (folder / "models.json").write_text(json.dumps(paths))
    (world_size,) = {job.world_size for job in jobs.values()}
    arguments = ["-m", "tests.deepspeed.expert_parallel", name, str(folder)]
    config = write_accelerate_config(folder, 0, world_size)  # each job brings its own stage
    run_accelerate(arguments, world_size, config, folder / "logs", timeout=timeout)
    return {
        job: [torch.load(folder / f"{number}-{rank}.pt") for rank in range(world_size)]
        for number, job in enumerate(jobs)
    }


# -------------------------------------------------------------------- on a rank


def run(job: ExpertJob, model_path: Path, folder: Path) -> dict[str, Any]:
    """Train, and return what is compared."""
    trainer = make_trainer(job.on_a_rank(), model_path, folder / "out", longstraw=True)
    with FAULTS[job.fault]() if job.fault else nullcontext():
        trainer.train()
    if job.saves:
        trainer.save_model(str(folder / "saved"))
    model = trainer.accelerator.unwrap_model(trainer.model)
    experts = [p for p in model.parameters() if not getattr(p, "allreduce", True)]
    return {
        "after": trainer.engine.backend.whole_state_dict(on_every_rank=True),
        "logs": trainer.state.log_history,
        "num_idle": trainer.engine.lockstep.num_idle,
        "experts_held": sum(p.shape[0] if p.numel() else p.ds_shape[0] for p in experts),
    }


def main(launch: str, folder: Path) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    gc.freeze()  # each training collects garbage, and the modules imported are none
    paths = json.loads((folder / "models.json").read_text())
    for number, (name, path) in enumerate(paths.items()):
        sys.stdout.write(f"=== {name}\n")  # a rank that hangs is reported with its last lines
        record = run(LAUNCHES[launch][name], Path(path), folder)
        torch.save(record, folder / f"{number}-{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
