"""A function run by several processes of this machine, started for it and ended with it.

`run_ranks` starts `python -m MODULE FOLDER` on every rank; the module's last lines are

    if __name__ == "__main__":
        be_rank(Path(sys.argv[1]), function)
"""

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .errors import RanksAbortedError

_TAIL_CHARS = 3000
"""Of what a failed launch wrote, shown in the error."""


def run_ranks(
    module: str, arguments: tuple[Any, ...], num_ranks: int, *, on_gpus: bool = False
) -> list[Any]:
    """`function(*arguments)` on each rank, in the order of ranks; see `be_rank`.

    Raises:
        RanksAbortedError: a process failed; with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(arguments, folder / "request.pt")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_ranks), "-m", module, name]
        environment = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // num_ranks))}
        if not on_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True
        )
        if done.returncode != 0:
            errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
            raise RanksAbortedError(
                f"{num_ranks} ranks were started and failed ({' '.join(command)}):\n"
                + (errors or [done.stderr])[0][-_TAIL_CHARS:]
            )
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def be_rank(folder: Path, function: Callable[..., Any]) -> None:
    """One rank: call `function` with the request's arguments, and leave what it returns."""
    arguments = torch.load(folder / "request.pt", weights_only=False)
    rank = int(os.environ["RANK"])
    try:
        torch.save(function(*arguments), folder / f"{rank}.pt")
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
