"""The definition of block attention: two matrix products, a mask, a softmax; and its backward.

Scores of one block, `[B, K, G*T, S]` with G = H / K, exist at a time. Computed, and returned, in
fp32 (fp64 for fp64 inputs): scores rounded to half precision would make probabilities wrong by
some percent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..lse_merge.reference import merge_lse_
from .params import BlockParams, Cotangents, PageParams


def forward(q: Tensor, k: Tensor, v: Tensor, params: BlockParams) -> tuple[Tensor, Tensor]:
    """See `block_attention`."""
    q, k, v = _widen(q), _widen(k), _widen(v)
    scores = _masked_scores(q, k, params)
    lse = torch.logsumexp(scores, dim=-1)
    # A row that sees no key: exp(-inf - 0) = 0 everywhere instead of NaN.
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return _ungroup(torch.matmul(p, v), q), _ungroup(lse.unsqueeze(-1), q).squeeze(-1)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    params: BlockParams,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `block_attention_backward`."""
    grad_out, q, k, v, out = (_widen(x) for x in (grad_out, q, k, v, out))
    num_kv_heads = k.shape[1]
    raw = torch.matmul(_group(q, num_kv_heads), k.transpose(-1, -2)) * params.softmax_scale
    capped = raw if params.softcap is None else params.softcap * torch.tanh(raw / params.softcap)
    grouped_lse = _group(lse.unsqueeze(-1), num_kv_heads)
    # A row that sees no key: exp(-inf - inf) = 0 everywhere instead of NaN.
    grouped_lse = grouped_lse.masked_fill(grouped_lse == -torch.inf, torch.inf)
    p = torch.exp(_mask(capped, q.shape[-2], params) - grouped_lse)
    grouped_grad = _group(grad_out, num_kv_heads)
    delta = _group((grad_out * out).sum(-1, keepdim=True), num_kv_heads)
    ds = p * (torch.matmul(grouped_grad, v.transpose(-1, -2)) - delta)
    if params.softcap is not None:
        ds = ds * (1 - (capped / params.softcap) ** 2)
    ds = ds * params.softmax_scale
    dq = _ungroup(torch.matmul(ds, k), q)
    dk = torch.matmul(ds.transpose(-1, -2), _group(q, num_kv_heads))
    dv = torch.matmul(p.transpose(-1, -2), grouped_grad)
    return dq, dk, dv


def forward_over_pages(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    starts: Sequence[int],
    params: PageParams,
) -> tuple[Tensor, Tensor]:
    """See `page_attention`."""
    pages = zip(keys, values, starts, strict=True)
    parts = (forward(q, k, v, params.at(start)) for k, v, start in pages)
    out, lse = next(parts)
    for part in parts:
        merge_lse_(out, lse, *part)
    return out, lse


def backward_over_pages(
    grad_out: Tensor,
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    starts: Sequence[int],
    out: Tensor,
    lse: Tensor,
    params: PageParams,
    into: Sequence[Cotangents],
) -> Tensor:
    """See `page_attention_backward`."""
    dq = torch.zeros_like(_widen(q))
    for k, v, start, buffers in zip(keys, values, starts, into, strict=True):
        part, *gradients = backward(grad_out, q, k, v, out, lse, params.at(start))
        dq += part
        if buffers is not None:
            for buffer, gradient in zip(buffers, gradients, strict=True):
                buffer.add_(gradient)
    return dq


def _masked_scores(q: Tensor, k: Tensor, params: BlockParams) -> Tensor:
    scores = torch.matmul(_group(q, k.shape[1]), k.transpose(-1, -2)) * params.softmax_scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    return _mask(scores, q.shape[-2], params)


def _mask(scores: Tensor, num_queries: int, params: BlockParams) -> Tensor:
    """`scores` `[B, K, G*T, S]` with -inf where a key must not be seen."""
    if not params.causal and not params.is_windowed:
        return scores
    num_keys = scores.shape[-1]
    q_positions = params.q_start + torch.arange(num_queries, device=scores.device) % params.q_len
    k_positions = params.k_start + torch.arange(num_keys, device=scores.device)
    distance = q_positions.unsqueeze(-1) - k_positions
    hidden = distance < 0 if params.causal else torch.zeros_like(distance, dtype=torch.bool)
    if params.window is not None:
        hidden = hidden | (distance >= params.window)
    rows = scores.view(*scores.shape[:2], -1, num_queries, num_keys)
    return rows.masked_fill(hidden, -torch.inf).view_as(scores)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _group(x: Tensor, num_kv_heads: int) -> Tensor:
    """`[B, H, T, D]` -> `[B, K, G*T, D]`: the query heads of one key head side by side."""
    batch, _, num_queries, dim = x.shape
    return x.reshape(batch, num_kv_heads, -1, num_queries, dim).flatten(2, 3)


def _ungroup(x: Tensor, q: Tensor) -> Tensor:
    """`[B, K, G*T, D]` -> `[B, H, T, D]`."""
    batch, num_heads, num_queries, _ = q.shape
    return x.reshape(batch, num_heads, num_queries, x.shape[-1])
