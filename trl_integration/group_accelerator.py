"""`GroupAccelerator`: accelerate's `Accelerator` as it is where a sequence group is one process.

Its ranks hold the same rows. Counted as one process, TRL's sums over processes, its place in the
data and its slices of what was gathered are right, and no sample counts twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import operations, recursively_apply
from torch import Tensor

from longstraw import RankAxes

from .seams import replaced


class GroupAccelerator(Accelerator):
    """Counts groups, and gathers and reduces over ranks with the same place in each group.

    Everything else is about ranks: devices, which one is the main one, waiting, DeepSpeed. So
    `process_index` 0 is a group; one rank of all is asked for by `is_main_process`.

    Attributes:
        axes: this rank's place.
    """

    axes: RankAxes
    _counts_ranks = False

    @staticmethod
    def adopt(accelerator: Accelerator, axes: RankAxes) -> None:
        """Make `accelerator`, which others may hold already, one of these."""
        accelerator.__class__ = GroupAccelerator
        accelerator.axes = axes  # type: ignore[attr-defined]

    @property
    def num_processes(self) -> int:
        return self.state.num_processes if self._counts_ranks else self.axes.dp_size

    @property
    def process_index(self) -> int:
        return self.state.process_index if self._counts_ranks else self.axes.dp_rank

    @property
    def is_last_process(self) -> bool:
        return self.state.is_last_process

    # ---------------------------------------------------------------- collectives

    def gather(self, tensor: Any) -> Any:
        """As accelerate's: the groups' tensors, joined along the first dimension."""

        def gathered(x: Tensor) -> Tensor:
            x = x[None] if x.ndim == 0 else x.contiguous()
            parts = [x.new_empty(x.shape) for _ in range(self.axes.dp_size)]
            dist.all_gather(parts, x, group=self.axes.data_group)
            return torch.cat(parts)

        return recursively_apply(gathered, tensor, error_on_other_type=True)

    def gather_object(self, values: list[Any]) -> list[Any]:
        """As `accelerate.utils.gather_object`: the groups' lists, joined."""
        parts: list[Any] = [None] * self.axes.dp_size
        dist.all_gather_object(parts, values, group=self.axes.data_group)
        return [value for part in parts for value in part]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As accelerate's, over groups."""

        def reduced(x: Tensor) -> Tensor:
            x = x.clone()
            operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
            dist.all_reduce(x, operation, group=self.axes.data_group)
            return x / self.axes.dp_size if reduction == "mean" else x

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def pad_across_processes(self, *args: Any, **kwargs: Any) -> Any:
        with replaced(operations, gather=self.gather):  # which it asks for all shapes
            return super().pad_across_processes(*args, **kwargs)

    # ---------------------------------------------------------------- preparing

    def _prepare_deepspeed(self, *args: Any) -> Any:
        with self._counting(ranks=True):  # each is a data-parallel process to DeepSpeed
            return super()._prepare_deepspeed(*args)

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        with self._counting(ranks=False):  # also when DeepSpeed's preparation comes here
            return super().prepare_data_loader(*args, **kwargs)

    @contextmanager
    def _counting(self, *, ranks: bool) -> Iterator[None]:
        before, self._counts_ranks = self._counts_ranks, ranks
        try:
            yield
        finally:
            self._counts_ranks = before
