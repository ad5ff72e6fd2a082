"""Plain torch: gradients accumulate in `.grad`; ranks are averaged once per update.

A model wrapped by DistributedDataParallel is served as well: the engine runs the module inside the
wrapper, whose hooks stay asleep without a wrapped forward, and averages here instead. The wrapper
would reduce at every replay, and ranks may replay different numbers of members.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .base import Backend, Finalized


class TorchBackend(Backend):
    """Drives `torch.autograd.backward` and the mean over ranks.

    Gradients of half-precision parameters accumulate in fp32 (from torch 2.10 on): a prompt of a
    million tokens adds five hundred chunks, and bf16 loses what is 256 times smaller than the sum.
    """

    def begin_update(self, parameters: Sequence[nn.Parameter]) -> None:
        accumulate_in_fp32(parameters)

    def backward(self, roots: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
        torch.autograd.backward(list(roots), list(cotangents))

    def finalize(self, parameters: Sequence[nn.Parameter]) -> Finalized:
        """Average over all ranks, and take a gradient that is not finite away.

        A parameter that no replay reached gets a zero gradient, not None: ranks must reduce the
        same tensors, and an optimizer with momentum moves on a zero gradient, as it does in TRL.
        Without any gradient at all no optimizer of torch's moves anything.
        """
        fill_with_zeros(parameters)
        world_size = 1
        if dist.is_available() and dist.is_initialized():
            world_size = dist.get_world_size()
        for parameter in parameters if world_size > 1 else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        is_finite = bool(torch.isfinite(gradient_norm(parameters)))
        if not is_finite:
            self.discard(parameters)
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                gradient, parameter.grad = parameter.grad, None
                parameter.grad_dtype = parameter.dtype
                parameter.grad = gradient.to(parameter.dtype)
        return Finalized(is_finite)

    def discard(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def describe(self, parameters: Sequence[nn.Parameter]) -> str:
        return f"gradients accumulate in {grad_dtypes(parameters)}"


def accumulate_in_fp32(parameters: Sequence[nn.Parameter]) -> None:
    """Let `.grad` of half-precision parameters be fp32, where torch can (2.10 and newer)."""
    for parameter in parameters:
        half = parameter.dtype in (torch.bfloat16, torch.float16)
        if not half or getattr(parameter, "grad_dtype", None) in (None, torch.float32):
            continue
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = torch.float32
        parameter.grad = None if gradient is None else gradient.float()


def fill_with_zeros(parameters: Sequence[nn.Parameter]) -> None:
    """Give parameters without a gradient one of zeros."""
    for parameter in parameters:
        if parameter.grad is None:
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            parameter.grad = torch.zeros_like(parameter, dtype=dtype)


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The L2 norm of all gradients together, not finite if any element is not."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())


def grad_dtypes(parameters: Sequence[nn.Parameter]) -> str:
    """What gradients accumulate in, in words."""
    has_grad_dtype = hasattr(torch.Tensor, "grad_dtype")
    names = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16"}
    half = (torch.bfloat16, torch.float16)
    dtypes = {torch.float32 if p.dtype in half and has_grad_dtype else p.dtype for p in parameters}
    return ", ".join(sorted(names.get(dtype, str(dtype)) for dtype in dtypes))
