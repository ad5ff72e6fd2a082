"""The one-process run that ranks are compared with, and the comparison."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from tests.deepspeed.jobs import Job, union
from tests.trl.parity import TOLERANCE, Outcome, Setting, Worst, log_row, worst_parameter

Record = dict[str, Any]
"""What one rank left of one job; see `worker.run`."""


def reference_of(job: Job) -> Setting:
    """What one process trains to see what the ranks see, in fp32 and without DeepSpeed.

    Where the ranks compute in bf16 it starts from the same, rounded weights.
    """
    setting = job.setting
    is_rounded = bool(setting.config.get("bf16"))
    longstraw = {k: v for k, v in setting.longstraw.items() if k != "longstraw_accumulate"}
    prepare = round_weights if is_rounded else setting.prepare
    return replace(
        union(setting, job.dp_size).but(bf16=False), longstraw=longstraw, prepare=prepare
    )


def is_stopped(job: Job) -> bool:
    """Whether the gradient is the stopped one, which stock TRL does not have."""
    return job.setting.longstraw.get("longstraw_prompt_gradient") == "stopped"


def round_weights(trainer: GRPOTrainer) -> None:
    """What DeepSpeed does to weights before it makes fp32 masters of them."""
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.copy_(parameter.bfloat16())


# ---------------------------------------------------------------- comparison


def assert_same(name: str, record: Record, right: Outcome, *keys: str) -> None:
    """In fp32: parameters, gradient norms and losses, and other logged numbers by name."""
    worst = worst_parameter(record["after"], right)
    log_row(name, worst, (0.0, ""))
    assert worst[0] <= TOLERANCE, worst
    for key in ("grad_norm", "loss", "reward", *keys):
        right_values = right.logged(key)
        assert right_values, f"{key} was not logged"
        # Losses are differences of larger terms; see `tests.trl.parity.worst_metric`.
        assert logged(record, key) == pytest.approx(right_values, rel=TOLERANCE, abs=1e-5), key


def error_of(record: Record, right: Outcome) -> tuple[float, Worst]:
    """As a share of the movement: of all parameters as one vector, and of the worst one."""
    after = record["after"]
    assert after.keys() == right.after.keys(), after.keys() ^ right.after.keys()
    moved = _distance(right.after, right.before)
    return _distance(after, right.after) / moved, worst_parameter(after, right)


def logged(record: Record, key: str) -> list[float]:
    """The values of `key`, in order."""
    return [log[key] for log in record["logs"] if key in log]


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(torch.stack([(a[name] - b[name]).norm() for name in a]).norm())
