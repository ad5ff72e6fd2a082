"""Plain torch: gradients accumulate in `.grad`; data-parallel ranks are averaged once per update.

A model wrapped by DistributedDataParallel is served as well: the engine runs the module inside the
wrapper, whose hooks stay asleep without a wrapped forward, and averages here instead. The wrapper
would reduce at every replay, and ranks may replay different numbers of members.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class TorchBackend:
    """Drives `torch.autograd.backward` and the mean over data-parallel ranks.

    Args:
        group: the data-parallel process group; None for the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def backward(self, roots: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
        """Backpropagate `cotangents` from `roots` into parameters and pages."""
        torch.autograd.backward(list(roots), list(cotangents))

    def finalize(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the accumulated gradients over the ranks. A collective: every rank calls it.

        A parameter that no replay reached gets a zero gradient, not None: ranks must reduce the
        same tensors, and an optimizer with momentum moves on a zero gradient, as it does in TRL.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not dist.is_available() or not dist.is_initialized():
            return
        world_size = dist.get_world_size(self.group)
        for parameter in parameters if world_size > 1 else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= world_size
