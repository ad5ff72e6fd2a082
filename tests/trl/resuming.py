"""Interrupted and uninterrupted runs, and what several processes do in `test_resume`.

`python -m tests.trl.resuming TASK MODEL FOLDER [ARGUMENT]` runs one of `TASKS`, on as many
processes as there are.
"""

import errno
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from peft import LoraConfig

from longstraw import ConfigError
from tests.trl.parity import (
    ADAMW,
    TWO_LAYERS,
    Outcome,
    Setting,
    fixed_rollout,
    prompts_dataset,
    train,
)
from trl_integration.checkpoints import CheckpointError

# Completions are sampled from the model, so a wrong random state or a wrong weight shows in all
# that follows. One generation serves 8 micro-batches. Logs come every third step, so most
# checkpoints fall between two of them.
BUFFERED = Setting(rollout=None).but(
    **ADAMW,
    per_device_train_batch_size=2,
    steps_per_generation=4,
    gradient_accumulation_steps=1,
    num_iterations=2,
    max_steps=11,
    lr_scheduler_type="linear",
    logging_steps=3,
)
# One update has a half group; one generation serves 4 updates.
ACCUMULATED = BUFFERED.but(gradient_accumulation_steps=2, max_steps=6)
LORA = replace(
    BUFFERED,
    trainer=lambda: {
        "peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    },
)
VARIANT = TWO_LAYERS
RESUMED_ON_TWO = (3, 4)
"""Steps that two processes resume from, with `ACCUMULATED`; 4 is between two generations."""

_TIMES = (
    "runtime",
    "samples_per_second",
    "steps_per_second",
    "step_time",
    "seconds/",
    "peak_bytes/",
)


@dataclass(frozen=True)
class Ended:
    """What a run ended with, to be compared bit for bit.

    Attributes:
        tensors: parameters, optimizer state and random state of torch.
        values: everything else: the scheduler, random states, logs without times.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]

    @staticmethod
    def of(outcome: Outcome) -> "Ended":
        trainer = outcome.trainer
        tensors = {
            name: getattr(parameter, "ds_tensor", parameter).detach().clone()  # of ZeRO-3
            for name, parameter in trainer.model.named_parameters()
        }
        if not trainer.is_deepspeed_enabled:  # else each rank holds its part of it elsewhere
            for index, state in trainer.optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer {index} {name}": value for name, value in state.items()}
        tensors["torch random state"] = torch.get_rng_state()
        logs = {
            f"step {log['step']} {key}": value
            for log in outcome.logs
            if "train_runtime" not in log  # about one call of `train`, by design
            for key, value in log.items()
            if not any(time in key for time in _TIMES)
        }
        values = {
            "scheduler": trainer.lr_scheduler.state_dict(),
            "random state": random.getstate(),
            "numpy random state": np.random.get_state()[1].tolist(),
            "micro-steps": trainer._step,
            **logs,
        }
        return Ended(tensors, values)

    def differences(self, other: "Ended") -> list[str]:
        """Names of what is not the same to the last bit."""
        assert self.tensors.keys() == other.tensors.keys()
        names = [n for n, t in self.tensors.items() if not torch.equal(t, other.tensors[n])]
        # As text: the same digits are the same float, and NaN equals itself.
        keys = self.values.keys() | other.values.keys()
        return names + [
            key for key in sorted(keys) if repr(self.values.get(key)) != repr(other.values.get(key))
        ]


def uninterrupted(setting: Setting, model_path: Path, out: Path) -> Ended:
    """Train to the end, with a checkpoint of every step."""
    saving = setting.but(save_strategy="steps", save_steps=1)
    return Ended.of(train(saving, model_path, out, longstraw=True))


def resumed(setting: Setting, model_path: Path, checkpoint: Path) -> Ended:
    """Train to the end from a checkpoint, in a trainer of its own."""
    out = checkpoint.parent.parent / "resumed"
    return Ended.of(
        train(setting, model_path, out, longstraw=True, resume_from_checkpoint=str(checkpoint))
    )


# ---------------------------------------------------------------- saves that do not end


@contextmanager
def interrupted_write(name: str, then: Callable[[], None], nth: int = 1) -> Iterator[None]:
    """The `nth` time that a file `name` is written, stop in the middle of it and call `then`."""
    save, count = torch.save, 0

    def save_half(obj: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        save(obj, file, *args, **kwargs)
        if Path(file).name == name:
            count += 1
            if count == nth:
                os.truncate(file, os.path.getsize(file) // 2)
                then()

    with mock.patch.object(torch, "save", save_half):
        yield


def disk_full() -> None:
    """What the system says when there is no room for the rest of a file."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def contents(run: Path) -> list[str]:
    """Names of checkpoints, and of what may be left of one."""
    return sorted(path.name for path in run.iterdir() if "README" not in path.name)


# ---------------------------------------------------------------- what several processes do


def _rank() -> int:
    return torch.distributed.get_rank()


def resume_each(setting: Setting, model_path: Path, folder: Path) -> None:
    """Train, resume from some steps, and write what differs to `FOLDER/RANK.pt`."""
    whole = uninterrupted(setting, model_path, folder / "run")
    report = {}
    for step in RESUMED_ON_TWO:
        again = resumed(setting, model_path, folder / "run" / f"checkpoint-{step}")
        # `Trainer` saves the log of rank 0 for all; from there on each rank has its own.
        earlier = tuple(f"step {logged} " for logged in range(1, step + 1))
        report[step] = [d for d in whole.differences(again) if not d.startswith(earlier)]
    torch.save(report, folder / f"{_rank()}.pt")


def fail_on_one_rank(model_path: Path, folder: Path) -> None:
    """The disk of one rank, then of the other is full at the third step; both write the error.

    The first evaluation is the best one, so `Trainer` would wait for all ranks within the save.
    """
    setting = replace(
        BUFFERED,
        rollout=fixed_rollout,
        trainer=lambda: {"eval_dataset": prompts_dataset((4,), seed=9)},
    ).but(
        save_strategy="steps",
        save_steps=1,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        metric_for_best_model="reward",
        greater_is_better=True,
    )
    for failing, name in ((0, "optimizer.pt"), (1, "rng_state_1.pth")):
        out = folder / f"rank{failing}-full"
        _train_to_error(setting, name if failing == _rank() else "", model_path, out)


def _train_to_error(setting: Setting, full_at: str, model_path: Path, out: Path) -> None:
    """Write `OUT-RANK.txt`, the error of a run whose disk is full at the third file `full_at`."""
    with interrupted_write(full_at, disk_full, nth=3):
        try:
            train(setting, model_path, out, longstraw=True)
            found = "no error"
        except CheckpointError as error:
            found = str(error)
    out.with_name(f"{out.name}-{_rank()}.txt").write_text(found)


def refuse(model_path: Path, folder: Path, checkpoint: str) -> None:
    """Resume from a checkpoint of one process; each rank writes its error."""
    try:
        resumed(BUFFERED, model_path, Path(checkpoint))
        found = "no error"
    except ConfigError as error:
        found = str(error)
    (folder / f"refused-{_rank()}.txt").write_text(found)


def end_by(name: str, signal_number: int, model_path: Path, out: Path) -> None:
    """This process gets a signal while it writes the file `name` of the third checkpoint."""
    with interrupted_write(name, lambda: os.kill(os.getpid(), signal_number), nth=3):
        uninterrupted(BUFFERED, model_path, out)


def terminated(model_path: Path, folder: Path, _: str) -> None:
    """End by SIGTERM."""
    end_by("optimizer.pt", signal.SIGTERM, model_path, folder / "run")


def several(model_path: Path, folder: Path, checkpoint: str) -> None:
    """What two processes do, in one launch: most of its time goes into imports. At the end rank 1
    is killed while it writes."""
    resume_each(ACCUMULATED, model_path, folder)
    fail_on_one_rank(model_path, folder)
    refuse(model_path, folder, checkpoint)
    (folder / f"done-{_rank()}").touch()
    name = "rng_state_1.pth" if _rank() == 1 else ""
    end_by(name, signal.SIGKILL, model_path, folder / "killed")


def zero(model_path: Path, folder: Path, _: str) -> None:
    """The same under ZeRO-2 and 3, where each rank writes partitions and waits for the others."""
    for stage in (2, 3):
        setting = ACCUMULATED.but(deepspeed=_zero_config(stage))
        resume_each(setting, model_path, folder / f"ZeRO-{stage}, full")
        lora = replace(setting, trainer=LORA.trainer)
        resume_each(lora, model_path, folder / f"ZeRO-{stage}, LoRA")
    saving = setting.but(save_strategy="steps", save_steps=1, max_steps=3)
    partition = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    _train_to_error(saving, partition if _rank() == 1 else "", model_path, folder / "rank1-full")


def _zero_config(stage: int) -> dict[str, Any]:
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        # Without it `Trainer` writes each partition twice.
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {
        **dict.fromkeys(auto, "auto"),
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


TASKS = {task.__name__: task for task in (several, terminated, zero)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    TASKS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), (*sys.argv, "")[4])
    # Gloo's threads may still hold tensors of the last collective; one that lets go of them while
    # the interpreter ends takes the process down with it. A single process has no group.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
