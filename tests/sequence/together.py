"""What ranks run for several test modules: `python -m tests.sequence.together NUM_RANKS FOLDER`.

Most of a launch's time goes into imports, so what ranks survive is run by the same ones. Writes
each part's record to `FOLDER/RANK.pt`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.sequence import (
    fault_program,
    memory_program,
    needle_program,
    rollout_program,
    selection_program,
)

PARTS: dict[int, dict[str, Callable[[int], Any]]] = {
    2: {
        "rollout": rollout_program.run,
        "memory": memory_program.run,
        "selection": selection_program.run,
        "budget": fault_program.run_budget,
        "other input": fault_program.run_other_input,
        "refused": fault_program.run_refused,
    },
    3: {
        "rollout": rollout_program.run,
        "needle": needle_program.run,
        "refused": fault_program.run_refused,
    },
    4: {"memory": memory_program.run, "abort": fault_program.run_abort},
}
"""Per number of ranks the parts of a launch, each given that number."""


def main(num_ranks: int, folder: Path) -> None:
    """Every part of a launch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    records = {name: run(num_ranks) for name, run in PARTS[num_ranks].items()}
    torch.save(records, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
