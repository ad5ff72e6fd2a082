"""What captured state would exceed, and what else would help there, in words for an error."""

import os

import torch

from .free_memory import RESERVED_PART, ranks_on_node


def of_budget(budget_bytes: int) -> str:
    """The user's budget."""
    return (
        f"the budget is {budget_bytes:,}. Raise state_budget_bytes "
        "(longstraw_state_budget_gib in the trainer), put pages on the host "
        "(page_device='host') or the rest in files (spill_dir)"
    )


def of_memory(device: torch.device, left_bytes: int) -> str:
    """The free memory of the pages' home."""
    if device.type != "cpu":
        return (
            f"{device} has {left_bytes:,} left, a {RESERVED_PART}th of its free memory kept in "
            "reserve. Put pages on the host (page_device='host')"
        )
    return (
        f"the host has {left_bytes:,} left for this process, one of {ranks_on_node()} on the node, "
        f"a {RESERVED_PART}th of the available memory kept in reserve. Run fewer ranks per node, "
        "give the job more memory, or put the rest in files (spill_dir)"
    )


def of_memory_and_files(memory_bytes: int, file_bytes: int, folder: str | os.PathLike[str]) -> str:
    """Host memory and the disk together."""
    return (
        f"host memory can hold {memory_bytes:,} of them and files in {folder} "
        f"{file_bytes:,}. Raise state_budget_bytes and spill_budget_bytes "
        "(longstraw_state_budget_gib and longstraw_spill_budget_gib in the trainer) if the "
        "machine has more, name a larger disk with spill_dir (longstraw_spill_dir)"
    )
