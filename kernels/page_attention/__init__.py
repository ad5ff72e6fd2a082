"""Attention of a block of queries over one block of keys, with the log-sum-exp that merges blocks.

The forward returns `(out, lse)` of this block alone; `longstraw_kernels.lse_merge` combines blocks.
The backward takes the *merged* `out` and `lse`, which makes the block's dQ, dK and dV exact on
their own: a block never needs to see another block's keys.

Implementations: `reference` (plain torch, any device and feature) and `torch_flash` (torch's fused
CPU kernel). `impl="auto"` looks at the device and at what the block needs; a requested
implementation runs or raises.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference, torch_flash

IMPLEMENTATIONS = ("auto", "reference", "torch_flash")


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


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, params: BlockParams, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys.

        scores = softmax_scale * q k^T  (softcapped, masked)
        lse    = logsumexp(scores)            out = exp(scores - lse) v

    Grouped-query attention: query head h reads key head `h // (H / K)`.

    Args:
        q: `[B, H, T, D]`; half precision is accumulated in fp32.
        k, v: `[B, K, S, D]` and `[B, K, S, Dv]`, same dtype; H is a multiple of K.
        params: positions, scale and mask.
        impl: "auto", "reference" or "torch_flash".

    Returns:
        `out` `[B, H, T, Dv]` in q's dtype or wider, and `lse` `[B, H, T]` (natural log) in fp32
        (fp64 for fp64). A row that sees no key has `out = 0` and `lse = -inf`.

    Raises:
        ValueError: if a requested implementation cannot compute this block, with the reason.
    """
    if _choose(q, k, v, params, impl) == "torch_flash":
        return torch_flash.forward(q, k, v, params)
    return reference.forward(q, k, v, params)


def block_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    params: BlockParams,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block, given the output merged over *all* blocks.

        p  = exp(scores - lse)            delta = rowsum(grad_out * out)
        ds = p * (grad_out v^T - delta)   (times the softcap's derivative)
        dq = scale * ds k     dk = scale * ds^T q     dv = p^T grad_out

    Args:
        grad_out, out: `[B, H, T, Dv]` in q's dtype; lse: `[B, H, T]`; of the merged result.
        q, k, v, params, impl: as in `block_attention`.

    Returns:
        `dq`, `dk`, `dv` of this block, in q's dtype or wider. Summing `dq` over blocks, in fp32 or
        fp64, gives the full dQ.

    Source:
        FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691 (backward from lse).
    """
    if _choose(q, k, v, params, impl) == "torch_flash":
        return torch_flash.backward(grad_out, q, k, v, out, lse, params)
    return reference.backward(grad_out, q, k, v, out, lse, params)


def _choose(q: Tensor, k: Tensor, v: Tensor, params: BlockParams, impl: str) -> str:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}.")
    if impl == "reference":
        return impl
    reason = torch_flash.why_not(q, k, v, params)
    if impl == "torch_flash" and reason is not None:
        raise ValueError(
            f"impl='torch_flash' cannot compute this attention: {reason}. "
            "Use impl='auto' (takes it where it can) or impl='reference'."
        )
    return "torch_flash" if reason is None else "reference"


def available_impl(device: torch.device) -> str:
    """The implementation that "auto" prefers on `device`, for reports."""
    return "torch_flash" if device.type == "cpu" else "reference"
