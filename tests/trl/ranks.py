"""Running a module as several processes that find each other, and saying which one did not end.

Knows processes and their logs; knows nothing of what they do.
"""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

_POLL_SECONDS = 0.1
_LOG_LINES = 30
_FIRST_PORT, _NUM_PORTS = 20_000, 500
_numbers = itertools.count(os.getpid())


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
        timeout: seconds until all must have ended; see `patience`.

    Raises:
        RanksError: with the number and the last lines of each rank that failed, or of those that
            still ran when the time was up. The others are ended.
    """
    logs.mkdir(parents=True, exist_ok=True)
    paths = [logs / f"rank{rank}.log" for rank in range(world_size)]
    port = free_port()
    processes = []
    for rank, path in enumerate(paths):
        with path.open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=rank_environment(rank, world_size, port),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        _wait(processes, paths, time.monotonic() + patience(timeout))
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
        f"--- rank {rank}, last lines:\n" + "\n".join(_lines(paths[rank])[-_LOG_LINES:])
        for rank in ranks
    ]
    names = ", ".join(f"rank {rank}" for rank in ranks)
    return "\n".join([f"{names} of {len(paths)} {what}", *tails])


def _lines(path: Path) -> list[str]:
    """Of a rank's log, without what Triton's bindings write at exit, which would push out all."""
    leaks = ("nanobind: ", " - leaked ", " - ... skipped ")
    return [line for line in path.read_text().splitlines() if not line.startswith(leaks)]


# -------------------------------------------------------------------- accelerate launch


def run_accelerate(
    arguments: Sequence[str], world_size: int, config: Path, logs: Path, *, timeout: float
) -> list[str]:
    """As `run_ranks`, started by `accelerate launch --config_file config *arguments`.

    Ranks are the launcher's children, and so is what ends them when one fails. A rank that still
    runs when the time is up is told to write where it is (SIGUSR1; `faulthandler.register` in the
    program makes that a traceback).

    Args:
        config: an accelerate configuration for `world_size` processes on this machine.
    """
    logs.mkdir(parents=True, exist_ok=True)
    launcher_log = logs / "launcher.log"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--main_process_port", str(free_port()), "--log_dir", str(logs), "--tee", "3"]
    environment = {**base_environment(), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    with launcher_log.open("w") as log:
        launcher = subprocess.Popen(
            [*command, *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        code = launcher.wait(patience(timeout))
    except subprocess.TimeoutExpired:
        running = _running_ranks(launcher.pid)
        for process in running.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        paths = _gather_logs(logs, world_size)
        what = "did not end in time"
        if not running:
            raise RanksError(f"the launcher {what}\n{launcher_log.read_text()}") from None
        raise RanksError(_report(what, sorted(running), paths)) from None
    finally:
        for process in [*_running_ranks(launcher.pid).values(), launcher]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.wait()
    paths = _gather_logs(logs, world_size)
    if code != 0:
        text = launcher_log.read_text()
        first = re.search(r"Root Cause.*?rank\s*: (\d+)", text, re.DOTALL)
        if first is None:
            raise RanksError(f"the launcher failed\n{text}")
        raise RanksError(_report("failed", [int(first[1])], paths))
    return [path.read_text() for path in paths]


def _running_ranks(launcher: int) -> dict[int, psutil.Process]:
    """The launcher's children that are ranks, by number."""
    ranks = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if "RANK" in process.environ():
                    ranks[int(process.environ()["RANK"])] = process
    return ranks


def _gather_logs(logs: Path, world_size: int) -> list[Path]:
    """`rank0.log`, ...: what each rank wrote, errors last."""
    paths = []
    for rank in range(world_size):
        parts = [
            path.read_text(errors="replace")
            for stream in ("stdout", "stderr")
            for path in logs.glob(f"*/attempt_0/{rank}/{stream}.log")
        ]
        paths.append(logs / f"rank{rank}.log")
        paths[-1].write_text("\n".join(parts))
    return paths


# -------------------------------------------------------------------- environment


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What `torchrun` sets for a rank on this machine."""
    return {
        **base_environment(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def base_environment() -> dict[str, str]:
    """This process's environment for a child on the CPU, on one thread and offline."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def patience(seconds: float) -> float:
    """`seconds` on idle cores, and as many times that as workers of pytest-xdist share them."""
    return seconds * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def free_port() -> int:
    """A port that nobody listens on and no other worker of pytest-xdist is given.

    Not one of the system's choice (port 0): it chooses from the same range for every connection and
    every process, and rank 0 listens seconds later. It leaves alone what is below 32768.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST_PORT + worker % 20 * _NUM_PORTS
    for number in itertools.islice(_numbers, _NUM_PORTS):
        port = first + number % _NUM_PORTS
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise RanksError(f"ports {first} to {first + _NUM_PORTS - 1} are all in use; end what has them")
