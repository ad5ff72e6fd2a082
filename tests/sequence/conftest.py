"""What several modules share: the records of ranks that run their parts in one launch."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.trl.ranks import run_ranks

Together = Callable[[int, str], list[Any]]


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    """`together(num_ranks, part)`: what each rank recorded of it; see `together.py`."""

    @functools.cache
    def launch(num_ranks: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"together{num_ranks}_")
        arguments = ["-m", "tests.sequence.together", str(num_ranks), str(folder)]
        run_ranks(arguments, num_ranks, folder / "logs", timeout=300)
        return [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]

    return lambda num_ranks, part: [record[part] for record in launch(num_ranks)]
