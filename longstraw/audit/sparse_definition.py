"""What the definition needs beside the model's own code where attention is latent or sparse.

The stopped prompt is constant in its latents, before they are expanded. And where index scores are
equal `torch.topk` takes any of them, by the length of the row: the definition says which.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..attention import attend_with


@contextmanager
def latents_constant(model: nn.Module, num_tokens: int) -> Iterator[None]:
    """Detach latents and rotary keys of the first tokens before they are expanded."""
    with ExitStack() as stack:
        for module in model.modules() if num_tokens else ():
            if hasattr(module, "expand_kv"):
                expand = partial(_expand_stopped, module.expand_kv, num_tokens)
                _replace(stack, module, "expand_kv", expand)
        yield


def _replace(stack: ExitStack, module: nn.Module, name: str, function: Any) -> None:
    before = vars(module).get(name)  # accelerate puts a forward on the instance
    setattr(module, name, function)
    if before is None:
        stack.callback(delattr, module, name)
    else:
        stack.callback(setattr, module, name, before)


def _expand_stopped(expand: Any, num_tokens: int, *state: Tensor) -> Any:
    return expand(*(stop_tokens(x, num_tokens, -2) for x in state))


def stop_tokens(x: Tensor, num_tokens: int, dim: int) -> Tensor:
    """`x` with its first tokens detached."""
    before, after = x.split([num_tokens, x.shape[dim] - num_tokens], dim=dim)
    return torch.cat([before.detach(), after], dim=dim)


@contextmanager
def ties_decided(model: nn.Module, ties: str) -> Iterator[None]:
    """Let indexers take the first, or the last, of tokens with the same score."""
    with ExitStack() as stack:
        for module in model.modules():
            if type(module).__name__.endswith("Indexer"):
                decided = partial(_run_with, _DecidedTopK(ties), module.forward)
                _replace(stack, module, "forward", decided)
        yield


def selections(model: nn.Module, token_ids: Tensor, ties: str = "first") -> dict[str, Tensor]:
    """What each indexer selects of one sequence, in one forward over all of it.

    Args:
        token_ids: `[T]`.

    Returns:
        By the indexer's name positions `[T, K]`; -1 where fewer than K tokens are visible.
    """
    found: dict[str, Tensor] = {}
    positions = torch.arange(token_ids.numel(), device=token_ids.device).unsqueeze(-1)

    def record(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        selected = output[0].long()
        found[name] = torch.where(selected <= positions, selected, -1)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if type(module).__name__.endswith("Indexer"):
                hook = module.register_forward_hook(partial(record, name))
                stack.callback(hook.remove)
        stack.enter_context(ties_decided(model, ties))
        stack.enter_context(attend_with(model, "eager"))
        model(input_ids=token_ids[None], use_cache=False)
    return found


def _run_with(mode: TorchFunctionMode, forward: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return forward(*args, **kwargs)


class _DecidedTopK(TorchFunctionMode):
    """`Tensor.topk` as a stable sort."""

    def __init__(self, ties: str) -> None:
        super().__init__()
        self.ties = ties

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.topk:
            return func(*args, **(kwargs or {}))
        scores, k = args
        if self.ties == "first":
            found = torch.sort(scores, dim=-1, descending=True, stable=True)
            values, indices = found.values, found.indices
        else:
            found = torch.sort(scores.flip(-1), dim=-1, descending=True, stable=True)
            values, indices = found.values, scores.shape[-1] - 1 - found.indices
        return torch.return_types.topk((values[..., :k], indices[..., :k]))
