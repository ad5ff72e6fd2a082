"""A sequence group of threads: what ranks do with tensors, in one process and without a network."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from longstraw.distributed import SequenceGroup

Result = TypeVar("Result")
TIMEOUT_SECONDS = 60


class ThreadGroup(SequenceGroup):
    """One rank of a group whose ranks are threads of this process; see `on_threads`."""

    def __init__(self, rank: int, table: list[Any], barrier: Barrier) -> None:
        super().__init__(rank, len(table))
        self._table, self._barrier = table, barrier

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._meet(x))

    def exchange(self, parts: Tensor) -> Tensor:
        return torch.stack([theirs[self.rank] for theirs in self._meet(parts)])

    def sum_home(self, parts: Tensor) -> Tensor:
        return self.exchange(parts).sum(0)

    def _meet(self, mine: Tensor) -> list[Tensor]:
        """What each rank brings; nobody leaves before all have it."""
        self._table[self.rank] = mine
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found


def on_threads(num_ranks: int, work: Callable[[SequenceGroup], Result]) -> list[Result]:
    """What each of `num_ranks` ranks returns from `work(group)`, by rank."""
    table: list[Any] = [None] * num_ranks
    barrier = Barrier(num_ranks, timeout=TIMEOUT_SECONDS)

    def run(rank: int) -> Result:
        try:
            return work(ThreadGroup(rank, table, barrier))
        except BaseException:
            barrier.abort()  # the others would wait for this rank
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
