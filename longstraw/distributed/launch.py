"""Connecting the processes that a launcher started, and noticing when they are not connected."""

import atexit
import os
import sys
from datetime import timedelta

import torch.distributed as dist

from ..errors import ConfigError


def connect_cpu_ranks(timeout_seconds: float) -> None:
    """Form the process group of CPU processes, which launchers leave to the script.

    On CPU accelerate would otherwise take each process for the only one. One process needs no
    group, and on GPUs whoever comes next makes it (accelerate, DeepSpeed). What is made here is
    taken down when the process ends.
    """
    if launched_ranks() > 1 and dist.is_available() and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
        atexit.register(_disconnect)


def _disconnect() -> None:
    """Take the group down while the interpreter still runs.

    A thread of gloo that frees a tensor while the interpreter ends aborts the process, whose work
    is done ("terminate called without an active exception"). After an error the group may be in
    use, and is left alone.
    """
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def launched_ranks() -> int:
    """How many processes the launcher says there are; 1 without a launcher."""
    if "RANK" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_ranks(world_size: int) -> None:
    """Raise if the framework counts other processes than the launcher started.

    Each would train alone on the same data, take itself for the main one and overwrite the
    others' checkpoints, without a sign.
    """
    launched = launched_ranks()
    if launched in (1, world_size):
        return
    raise ConfigError(
        f"the launcher started {launched} processes, and accelerate counts {world_size}: they are "
        "not connected, and each would train alone on the same data. Make no PartialState or "
        "Accelerator before the config (LongStrawGRPOConfig connects them), or give it the backend "
        'itself: PartialState(backend="gloo") on CPU, "nccl" on GPUs.'
    )
