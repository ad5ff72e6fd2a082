"""Which experts tokens are routed to, noted as it happens."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..state import Choices, fingerprint


@contextmanager
def noting_experts(decoder: nn.Module, choices_now: Callable[[], Choices | None]) -> Iterator[None]:
    """Let the routers of `decoder` note their choices inside.

    Args:
        choices_now: where to; None for nowhere.
    """
    with ExitStack() as stack:
        for name, module in decoder.named_modules():
            if type(module).__name__.endswith("Router"):
                hook = module.register_forward_hook(partial(_note, name, choices_now))
                stack.callback(hook.remove)
        yield


@torch.no_grad()
def _note(
    name: str,
    choices_now: Callable[[], Choices | None],
    module: nn.Module,
    args: Any,
    output: Any,
) -> None:
    """Hook of a router, which returns `[tokens, K]` chosen experts among other tensors."""
    choices = choices_now()
    if choices is None or not isinstance(output, tuple):
        return
    for chosen in output:
        if isinstance(chosen, Tensor) and not chosen.is_floating_point() and chosen.dim() == 2:
            rows = torch.arange(chosen.shape[0], device=chosen.device)
            choices.note(name, fingerprint(chosen, rows))
            return
