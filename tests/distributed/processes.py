"""Ranks of which some are meant to die: how and when each ended, and what it wrote."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.trl.ranks import free_port, patience, rank_environment

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Ended:
    """One rank.

    Attributes:
        code: exit status, negative for a signal; None if it had to be ended after the timeout.
        at: when it ended, in seconds since the epoch.
    """

    code: int | None
    at: float
    log: str


def run_until_end(
    arguments: Sequence[str],
    world_size: int,
    logs: Path,
    until: Sequence[int],
    *,
    timeout: float,
) -> list[Ended]:
    """Run `python *arguments` once per rank without a launcher that would end the others.

    Args:
        until: ranks to wait for; the others are ended then.
    """
    logs.mkdir(parents=True, exist_ok=True)
    port, processes = free_port(), []
    for rank in range(world_size):
        with (logs / f"rank{rank}.log").open("w") as log:
            environment = rank_environment(rank, world_size, port)
            command = [sys.executable, *arguments]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
    ended: dict[int, tuple[int | None, float]] = {}
    deadline = time.monotonic() + patience(timeout)
    while not ended.keys() >= set(until) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = (process.returncode, time.time())
        time.sleep(_POLL_SECONDS)
    for rank, process in enumerate(processes):
        process.send_signal(signal.SIGKILL)
        process.wait()
        ended.setdefault(rank, (None, time.time()))
    return [
        Ended(*ended[rank], (logs / f"rank{rank}.log").read_text()) for rank in range(world_size)
    ]
