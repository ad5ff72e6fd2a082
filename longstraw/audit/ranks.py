"""The same update by several processes: what each runs, and how they are started.

`python -m longstraw.audit.ranks FOLDER` is one rank; `steps_of_ranks` starts them.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ..config import EngineConfig
from ..ranks import be_rank, run_ranks
from .case import AuditCase
from .levels import Finding
from .policy import PolicySource
from .steps import Step, engine_step

LAUNCHES = ("one prompt shared", "members divided")
"""Sequence parallel: all ranks share the prompt. Data parallel: each has members of its own."""


def steps_of_ranks(
    case: AuditCase,
    policy: PolicySource,
    config: EngineConfig,
    num_ranks: int,
    announce: Callable[[str], None] = lambda what: None,
) -> list[tuple[str, Step, Finding]]:
    """The exact gradient as `num_ranks` processes make it, by launch.

    They run on as many GPUs where the model is on one and there are as many, else on CPUs.

    Returns:
        For each of `LAUNCHES` its name, rank 0's step, and whether the others have the same bits.

    Raises:
        RanksAbortedError: a process failed; with the end of what it wrote.
    """
    announce(f"{num_ranks} ranks")
    on_gpus = policy.device.startswith("cuda") and torch.cuda.device_count() >= num_ranks
    policy = replace(policy, device="cuda" if on_gpus else "cpu")
    records = run_ranks(__name__, (case.to("cpu"), policy, config), num_ranks, on_gpus=on_gpus)
    results = []
    for label in LAUNCHES:
        digests = [record[label][0] for record in records]
        others = sum(digest != digests[0] for digest in digests)
        what = f"{label}: ranks with other bits"
        results.append((label, records[0][label][1], Finding(what, float(others), 0.0)))
    return results


def run_rank(
    case: AuditCase, policy: PolicySource, config: EngineConfig
) -> dict[str, tuple[str, Step | None]]:
    """One rank: of every launch the gradients' digest and, on rank 0, the gradients."""
    on_gpu = policy.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = case.to(policy.device)
    model = policy.load()
    record: dict[str, tuple[str, Step | None]] = {}
    for label, sp_size in zip(LAUNCHES, (num_ranks, 1), strict=True):
        shares = sp_size == num_ranks
        group, loss = (case.group, case.loss) if shares else case.share(rank, num_ranks)
        step = engine_step(
            model, group, loss, replace(config, prompt_gradient="exact", sp_size=sp_size)
        )
        gradients = {name: grad.cpu() for name, grad in step.gradients.items()}
        record[label] = (step.sha256, Step(gradients, []) if rank == 0 else None)
    return record


if __name__ == "__main__":
    be_rank(Path(sys.argv[1]), run_rank)
