"""Paged attention as an attention implementation of transformers.

One registered function serves every architecture whose layers pass through
`cache.update(..., kwargs=kwargs)`. No mask function is registered with it: transformers then builds
no mask at all, which is what a causal, right-padded engine wants.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import PromptStateError
from ..state import CACHE_KWARG, LayerHandle
from .operands import AttentionOptions
from .paged import paged_attention

ATTENTION_NAME = "longstraw"


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; returns `[B, T, H, Dv]`."""
    handle = required_handle(module, kwargs, dropout)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scale, sliding_window, softcap)
    out = paged_attention(query, key, value, s_aux, handle, options)
    return out.transpose(1, 2), None


def required_handle(module: nn.Module, kwargs: Mapping[str, Any], dropout: float) -> LayerHandle:
    """The handle that the cache has left for `module`'s attention.

    Raises:
        PromptStateError: there is none, or attention has dropout.
    """
    handle: LayerHandle | None = kwargs.get(CACHE_KWARG)
    if handle is None:
        # Without a mask, attention without its cache would score responses as if there were no
        # prompt, and nothing would look wrong.
        raise PromptStateError(
            f"{type(module).__name__} ran without LongStraw's cache, so it cannot see the prompt. "
            "The layer dropped the cache (re-entrant gradient checkpointing does): use "
            'gradient_checkpointing_kwargs={"use_reentrant": False}, or '
            "gradient_checkpointing=False."
        )
    if dropout:
        raise PromptStateError(
            f"{type(module).__name__} applies attention dropout {dropout}; a replay would draw "
            "another mask than the capture. Set attention_dropout=0 in the model's config."
        )
    return handle


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention_function)


@contextmanager
def attend_with(model: nn.Module, name: str = ATTENTION_NAME) -> Iterator[None]:
    """Let `model`'s layers use the attention registered as `name` inside, and as before after."""
    configs: dict[int, Any] = {
        id(m.config): m.config
        for m in model.modules()
        if hasattr(getattr(m, "config", None), "_attn_implementation")
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
