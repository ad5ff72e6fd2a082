"""Running a model in float64 all the way, so that a difference is a mistake and not rounding."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class Float64Islands(TorchFunctionMode):
    """Lift what models compute in hard-coded float32 to float64.

    Norms, softmaxes and routers of transformers cast to float32. Lifted, float64 can tell a mistake
    (1e-1) from rounding (1e-14); with the casts in place the floor would be 1e-6.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def whole_precision(model: nn.Module) -> AbstractContextManager[Any]:
    """`Float64Islands` for a model in float64; nothing for others."""
    is_double = next(model.parameters()).dtype == torch.float64
    return Float64Islands() if is_double else nullcontext()
