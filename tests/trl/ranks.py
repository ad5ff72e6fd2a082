"""Running a module as several processes that find each other, and saying which one did not end.

Knows processes and their logs; knows nothing of what they do.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_POLL_SECONDS = 0.1
_LOG_LINES = 30


class RanksError(AssertionError):
    """A rank failed, or did not end in time."""


def run_ranks(
    arguments: Sequence[str], world_size: int, logs: Path, *, timeout: float
) -> list[str]:
    """Run `python *arguments` once per rank and return what each wrote.

    The environment is that of `torchrun` (RANK, WORLD_SIZE, MASTER_ADDR, ...), on this machine
    and its CPUs.

    Args:
        logs: a folder for `rank0.log`, `rank1.log`, ...
        timeout: seconds until all must have ended.

    Raises:
        RanksError: with the number and the last lines of each rank that failed, or of those that
            still ran when the time was up. The others are ended.
    """
    logs.mkdir(parents=True, exist_ok=True)
    paths = [logs / f"rank{rank}.log" for rank in range(world_size)]
    port = _free_port()
    processes = []
    for rank, path in enumerate(paths):
        with path.open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=_environment(rank, world_size, port),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        _wait(processes, paths, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [path.read_text() for path in paths]


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], paths: Sequence[Path], deadline: float
) -> None:
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            raise RanksError(_report("failed", failed, paths))
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running:
            return
        if time.monotonic() > deadline:
            raise RanksError(_report("did not end in time", running, paths))
        time.sleep(_POLL_SECONDS)


def _report(what: str, ranks: Sequence[int], paths: Sequence[Path]) -> str:
    tails = [
        f"--- rank {rank}, last lines:\n"
        + "\n".join(paths[rank].read_text().splitlines()[-_LOG_LINES:])
        for rank in ranks
    ]
    names = ", ".join(f"rank {rank}" for rank in ranks)
    return "\n".join([f"{names} of {len(paths)} {what}", *tails])


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
