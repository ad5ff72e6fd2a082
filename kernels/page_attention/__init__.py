"""Attention of a block of queries over keys, with the log-sum-exp that merges what is found.

The forward returns `(out, lse)` of the keys it is given; `longstraw_kernels.lse_merge` combines
several such results. The backward takes the *merged* `out` and `lse`, which makes dQ, dK and dV of
some keys exact on their own: they never need to see the others.

`block_attention` reads one block of keys, `page_attention` a list of pages without joining them.

Implementations: `reference` (plain torch, any device and feature), `triton` (a GPU, up to fp32;
one launch for all pages), and for blocks only `flash_attn` (that package's, on a GPU, half
precision) and `torch_flash` (torch's fused CPU kernel). `impl="auto"` takes Triton on a GPU, and on
a CPU looks at what the block needs; a requested implementation runs or raises.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..availability import TRITON_DTYPES, choose, is_triton_installed
from . import flash_attn, reference, torch_flash
from .params import BlockParams, Cotangents, PageParams, check_cotangents, check_pages

__all__ = [
    "IMPLEMENTATIONS",
    "PAGE_IMPLEMENTATIONS",
    "BlockParams",
    "Cotangents",
    "PageParams",
    "available_impl",
    "block_attention",
    "block_attention_backward",
    "page_attention",
    "page_attention_backward",
]

IMPLEMENTATIONS = ("auto", "reference", "triton", "flash_attn", "torch_flash")
PAGE_IMPLEMENTATIONS = ("auto", "reference", "triton")
_FUSED = {"torch_flash": torch_flash, "flash_attn": flash_attn}


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, params: BlockParams, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys.

        scores = softmax_scale * q k^T  (softcapped, masked)
        lse    = logsumexp(scores)            out = exp(scores - lse) v

    Grouped-query attention: query head h reads key head `h // (H / K)`.

    Args:
        q: `[B, H, T, D]`; half precision is accumulated in fp32.
        k, v: `[B, K, S, D]` and `[B, K, S, Dv]`, q's dtype; H is a multiple of K.
        params: positions, scale and mask.
        impl: one of `IMPLEMENTATIONS`.

    Returns:
        `out` `[B, H, T, Dv]` in q's dtype or wider, and `lse` `[B, H, T]` (natural log) in fp32
        (fp64 for fp64). A row that sees no key has `out = 0` and `lse = -inf`.

    Raises:
        ValueError: tensors that do not fit together, or a requested implementation that cannot
            compute this block, with the reason.
    """
    check_pages(q, [k], [v], [params.k_start])
    chosen = _choose(q, k, v, params, impl)
    if chosen in _FUSED:
        return _FUSED[chosen].forward(q, k, v, params)
    if chosen == "triton":
        from . import triton

        return triton.forward(q, [k], [v], [params.k_start], PageParams.of_block(params))
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
        fp64, gives the full dQ. A row that sees no key has zeros.

    Raises:
        ValueError: as in `block_attention`.

    Source:
        FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691 (backward from lse).
    """
    check_pages(q, [k], [v], [params.k_start])
    chosen = _choose(q, k, v, params, impl)
    if chosen in _FUSED:
        return _FUSED[chosen].backward(grad_out, q, k, v, out, lse, params)
    if chosen == "triton":
        from . import triton

        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        pages = [k], [v], [params.k_start]
        over = PageParams.of_block(params)
        dq = triton.backward(grad_out, q, *pages, out, lse, over, into=[(dk, dv)])
        return dq, dk, dv
    return reference.backward(grad_out, q, k, v, out, lse, params)


def page_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    starts: Sequence[int],
    params: PageParams,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend to all pages, which are read where they lie: as `block_attention` over their keys.

    Args:
        q: `[B, H, T, D]`.
        keys, values: per page `[B, K, S, D]` and `[B, K, S, Dv]` in q's dtype; S, and the strides,
            may differ from page to page.
        starts: per page, the absolute position of its first key.
        params: positions of the queries, scale and mask.
        impl: one of `PAGE_IMPLEMENTATIONS`.

    Returns:
        `out` `[B, H, T, Dv]` and `lse` `[B, H, T]` (natural log), fp32 (fp64 for fp64). A row that
        sees no key has `out = 0` and `lse = -inf`.

    Raises:
        ValueError: pages that do not fit together, or a requested implementation that cannot run.
    """
    check_pages(q, keys, values, starts)
    if choose(impl, PAGE_IMPLEMENTATIONS, q, *keys, *values) == "triton":
        from . import triton

        return triton.forward(q, keys, values, starts, params)
    return reference.forward_over_pages(q, keys, values, starts, params)


def page_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    starts: Sequence[int],
    out: Tensor,
    lse: Tensor,
    params: PageParams,
    *,
    into: Sequence[Cotangents],
    impl: str = "auto",
) -> Tensor:
    """dQ over all pages; adds dK and dV of those that want them into `into`.

    Args:
        grad_out, out: `[B, H, T, Dv]` in q's dtype; lse: `[B, H, T]`; of the result merged over
            all keys, these pages' and any others.
        q, keys, values, starts, params, impl: as in `page_attention`.
        into: per page the sums `(dK, dV)` in the shapes of its keys and values, fp32 (fp64 for
            fp64) with a last stride of 1, written to; or None, which costs nothing. No two may
            share memory.

    Returns:
        `dq` `[B, H, T, D]` of these pages, fp32 (fp64 for fp64).

    Raises:
        ValueError: as in `page_attention`, or sums of another shape, dtype or device.
    """
    check_pages(q, keys, values, starts)
    check_cotangents(into, keys, values)
    if choose(impl, PAGE_IMPLEMENTATIONS, q, *keys, *values) == "triton":
        from . import triton

        return triton.backward(grad_out, q, keys, values, starts, out, lse, params, into)
    return reference.backward_over_pages(grad_out, q, keys, values, starts, out, lse, params, into)


def _choose(q: Tensor, k: Tensor, v: Tensor, params: BlockParams, impl: str) -> str:
    if impl == "auto" and q.device.type == "cpu":
        return "torch_flash" if torch_flash.why_not(q, k, v, params) is None else "reference"
    if impl not in _FUSED:
        return choose(impl, IMPLEMENTATIONS, q, k, v)
    reason = _FUSED[impl].why_not(q, k, v, params)
    if reason is not None:
        raise ValueError(
            f"impl={impl!r} cannot compute this block: {reason}. Use impl='auto' (takes the best "
            "that can) or impl='reference'."
        )
    return impl


def available_impl(device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """The implementation that "auto" prefers for blocks on `device`, for reports."""
    if device.type == "cpu":
        return "torch_flash"
    has_triton = device.type == "cuda" and is_triton_installed() and dtype in TRITON_DTYPES
    return "triton" if has_triton else "reference"
