"""Attention of each query over rows that were selected for it, as in DeepSeek Sparse Attention.

Keys and values are one table of latents: a row is a key, and its first columns are the value. All
heads read the same rows (multi-head latent attention in its absorbed form), so that the cost is
that of the selected rows, whatever the length of the table.
"""

import torch
from torch import Tensor

from ..availability import choose
from . import reference

IMPLEMENTATIONS = ("auto", "reference", "triton")

__all__ = ["IMPLEMENTATIONS", "selected_attention", "selected_attention_backward"]


def selected_attention(
    q: Tensor,
    rows: Tensor,
    index: Tensor,
    softmax_scale: float,
    value_dim: int,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend to the selected rows.

        scores = softmax_scale * q rows[index]^T
        lse    = logsumexp(scores)            out = exp(scores - lse) rows[index][:, :value_dim]

    Args:
        q: `[N, H, D]`; half precision is accumulated in fp32.
        rows: `[M, D]`, same dtype, M > 0.
        index: `[N, K]` integer, rows of each query; negative ones are none. All are below M, which
            is not checked on a GPU, as it would wait for the device.
        softmax_scale: factor on the scores before the softmax.
        value_dim: columns of a row that are its value.
        impl: one of `IMPLEMENTATIONS`. "triton" gathers rows where it reads them; the reference
            writes them first.

    Returns:
        `out` `[N, H, value_dim]` and `lse` `[N, H]` (natural log) in fp32 (fp64 for fp64). A query
        without a row has `out = 0` and `lse = -inf`.

    Raises:
        ValueError: operands that do not fit together, or a requested implementation that cannot
            run.
    """
    _check(q, rows, index, value_dim)
    if choose(impl, IMPLEMENTATIONS, q, rows, index) == "triton":
        from . import triton

        return triton.forward(q, rows, index, softmax_scale, value_dim)
    return reference.forward(q, rows, index, softmax_scale, value_dim)


def selected_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    rows: Tensor,
    index: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gradients, given the output merged over all tables that a query reads.

    Args:
        grad_out, out: `[N, H, value_dim]` in q's dtype; lse: `[N, H]`; of the merged result.
        q, rows, index, softmax_scale, impl: as in `selected_attention`.

    Returns:
        `dq` `[N, H, D]` and `drows` `[M, D]`, in fp32 (fp64 for fp64); the same bits each time.

    Raises:
        ValueError: as in `selected_attention`.

    Source:
        FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691 (backward from lse).
    """
    _check(q, rows, index, out.shape[-1])
    if grad_out.shape != out.shape or out.shape[:2] != q.shape[:2] or lse.shape != q.shape[:2]:
        raise ValueError(
            f"grad_out {tuple(grad_out.shape)}, out {tuple(out.shape)} and lse {tuple(lse.shape)} "
            f"do not fit together with q {tuple(q.shape)}; needed are [N, H, value_dim], the same, "
            "and [N, H]."
        )
    if choose(impl, IMPLEMENTATIONS, grad_out, q, rows, index, out, lse) == "triton":
        from . import triton

        return triton.backward(grad_out, q, rows, index, out, lse, softmax_scale)
    return reference.backward(grad_out, q, rows, index, out, lse, softmax_scale)


def _check(q: Tensor, rows: Tensor, index: Tensor, value_dim: int) -> None:
    fits = (
        q.dim() == 3
        and rows.dim() == 2
        and index.dim() == 2
        and q.shape[0] == index.shape[0]
        and q.shape[2] == rows.shape[1] >= value_dim
        and rows.shape[0] > 0
    )
    if not fits or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"q {tuple(q.shape)}, rows {tuple(rows.shape)}, index {tuple(index.shape)} of "
            f"{index.dtype} and value_dim={value_dim} do not fit together; needed are [N, H, D], "
            "[M, D] with M > 0, [N, K] of integers, and value_dim <= D."
        )
    if rows.dtype != q.dtype:
        raise ValueError(f"q is in {q.dtype} and rows in {rows.dtype}: convert one of them.")
