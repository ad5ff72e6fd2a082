"""What attention over keys depends on beside its tensors, and the checks of those tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Cotangents = tuple[Tensor, Tensor] | None
"""Where dK and dV of a page are added, or None for a page that needs none."""


@dataclass(frozen=True)
class BlockParams:
    """What one block's attention depends on beside its tensors.

    Attributes:
        softmax_scale: factor on the scores before the softmax.
        q_start: absolute position of the first query.
        q_len: queries per sequence. Row i of q stands at position `q_start + i % q_len`, so the
            queries of several sequences can be laid side by side in T.
        k_start: absolute position of the first key; keys are consecutive.
        causal: whether a key may lie after a query (then it is masked). False promises that every
            key comes before every query.
        window: a key is visible if `q_position - k_position < window`; None sees all.
        softcap: scores become `softcap * tanh(scores / softcap)`; None leaves them.
    """

    softmax_scale: float
    q_start: int
    q_len: int
    k_start: int
    causal: bool = False
    window: int | None = None
    softcap: float | None = None

    @property
    def is_windowed(self) -> bool:
        """Whether the window hides some key of this block from some query."""
        last = self.q_start + self.q_len - 1
        return self.window is not None and last - self.k_start >= self.window


@dataclass(frozen=True)
class PageParams:
    """What attention over several pages depends on beside its tensors.

    A `BlockParams` without `k_start`: each page brings its own. The attributes mean the same.
    """

    softmax_scale: float
    q_start: int
    q_len: int
    causal: bool = False
    window: int | None = None
    softcap: float | None = None

    def at(self, k_start: int) -> BlockParams:
        """The params of the one page whose keys begin at `k_start`."""
        return BlockParams(
            softmax_scale=self.softmax_scale,
            q_start=self.q_start,
            q_len=self.q_len,
            k_start=k_start,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
        )

    @classmethod
    def of_block(cls, params: BlockParams) -> "PageParams":
        """All but `k_start`."""
        return cls(
            softmax_scale=params.softmax_scale,
            q_start=params.q_start,
            q_len=params.q_len,
            causal=params.causal,
            window=params.window,
            softcap=params.softcap,
        )


def check_pages(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], starts: Sequence[int]
) -> None:
    """Raise a ValueError if these are no pages that `q` can attend to; see `page_attention`."""
    if not keys or not len(keys) == len(values) == len(starts):
        raise ValueError(
            f"Attention needs one key tensor, value tensor and start per page, and at least one "
            f"page; got {len(keys)} keys, {len(values)} values and {len(starts)} starts."
        )
    num_kv_heads, value_dim = keys[0].shape[1], values[0].shape[-1]
    if num_kv_heads == 0 or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"Query heads must be a multiple of key heads; got {q.shape[1]} and {num_kv_heads}."
        )
    for index, (k, v) in enumerate(zip(keys, values, strict=True)):
        head = (q.shape[0], num_kv_heads, k.shape[2])
        if k.shape != (*head, q.shape[3]) or v.shape != (*head, value_dim):
            raise ValueError(
                f"Page {index} has keys {list(k.shape)} and values {list(v.shape)}; queries "
                f"{list(q.shape)} need {[*head, q.shape[3]]} and {[*head, value_dim]}."
            )
        for name, x in (("keys", k), ("values", v)):
            if x.dtype != q.dtype or x.device != q.device:
                raise ValueError(
                    f"Page {index} has {name} in {x.dtype} on {x.device}; queries are in "
                    f"{q.dtype} on {q.device}. Convert one of them."
                )


def check_cotangents(
    into: Sequence[Cotangents], keys: Sequence[Tensor], values: Sequence[Tensor]
) -> None:
    """Raise a ValueError if the gradients of these pages cannot be added into `into`."""
    if len(into) != len(keys):
        raise ValueError(f"`into` needs one entry per page; got {len(into)} for {len(keys)} pages.")
    for index, pair in enumerate(into):
        if pair is None:
            continue
        sums = torch.float64 if keys[index].dtype == torch.float64 else torch.float32
        for name, buffer, x in zip(("dK", "dV"), pair, (keys[index], values[index]), strict=True):
            fits = buffer.shape == x.shape and buffer.dtype == sums and buffer.device == x.device
            if not fits or (buffer.stride(-1) != 1 and buffer.shape[-1] > 1):
                raise ValueError(
                    f"{name} of page {index} is added into {list(buffer.shape)} in "
                    f"{buffer.dtype} on {buffer.device}, strides {buffer.stride()}; it needs "
                    f"{list(x.shape)} in {sums} on {x.device}, last stride 1."
                )
