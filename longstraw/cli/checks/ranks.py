"""Whether processes of this machine can form a group, and add up what they are given.

Two ranks are started with gloo on the CPU, and with NCCL where there are two GPUs. None of them
outlives the check.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from . import Finding

PROGRAM = Path(__file__).with_name("rank.py")
WORLD_SIZE = 2
EXPECTED = f"sum {1 + 2} {2 * 999 + 1 + 2}"
"""The first and the last number of what two ranks add up; see `rank.py`."""

_POLL_SECONDS = 0.05
_HINTS = {
    "gloo": "If an interface or a firewall is in the way, name one that works: "
    "GLOO_SOCKET_IFNAME=lo (one machine), or that of the network (ip -brief address).",
    "nccl": "NCCL_DEBUG=INFO says where it stops; NCCL_P2P_DISABLE=1 tells a broken link between "
    "GPUs from other causes. In a container give it --ipc=host.",
}


def check_ranks(seconds: float) -> Iterator[Finding]:
    """Both backends, each within `seconds`."""
    yield _check_backend("gloo", seconds)
    num_gpus = torch.cuda.device_count()
    if num_gpus >= WORLD_SIZE:
        yield _check_backend("nccl", seconds)
    else:
        yield Finding("-", f"nccl: not run, it needs {WORLD_SIZE} GPUs and there are {num_gpus}")


def _check_backend(backend: str, seconds: float) -> Finding:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = _run(backend, folder, seconds)
        logs = [(folder / f"rank{rank}.log").read_text().splitlines() for rank in range(WORLD_SIZE)]
        errors = [(folder / f"rank{rank}.err").read_text() for rank in range(WORLD_SIZE)]
    took = time.monotonic() - begin
    if all(code == 0 and log[-1:] == [EXPECTED] for code, log in zip(codes, logs, strict=True)):
        return Finding("ok", f"{backend}: {WORLD_SIZE} ranks joined and added up, in {took:.1f} s")
    wrong = []
    for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
        if code is None:
            wrong.append(f"rank {rank} is stuck {_stage(log)}")
        elif code != 0:
            lines = errors[rank].strip().splitlines() or [f"exit code {code}"]
            wrong.append(f"rank {rank} failed {_stage(log)} ({lines[-1]:.160})")
        elif log[-1:] != [EXPECTED]:
            wrong.append(f"rank {rank} got {log[-1]!r}, and {EXPECTED!r} is right")
    return Finding("fail", f"{backend}: {'; '.join(wrong)} after {took:.1f} s", _HINTS[backend])


def _run(backend: str, folder: Path, seconds: float) -> list[int | None]:
    """Exit codes; None of a rank that had to be ended."""
    processes = []
    try:
        for rank in range(WORLD_SIZE):
            # -P: the program's own folder, whose files have short names, is not on the path.
            command = [sys.executable, "-P", str(PROGRAM), backend, str(rank), str(WORLD_SIZE)]
            with (
                (folder / f"rank{rank}.log").open("w") as log,
                (folder / f"rank{rank}.err").open("w") as err,
            ):
                # Ranks give up later than this process does, which then sees who has come how far.
                command += [str(folder / "meeting"), str(2 * seconds + 60)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=err))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):
                break
            time.sleep(_POLL_SECONDS)
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _stage(log: list[str]) -> str:
    return f"while {log[-1]}" if log else "before its first line: Python does not start"
