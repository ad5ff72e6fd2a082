"""Running a function as the forward of a module whose weights it uses."""

from collections.abc import Callable
from typing import Any

from torch import nn


def run_as(module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, run as `module`'s own forward.

    Hooks that bring the module's weights (ZeRO-3's) work in its call only; a function that takes
    them from outside would find them empty.
    """
    before = vars(module).get("forward")  # accelerate puts one on the instance
    module.forward = function
    try:
        return module(*args)
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
