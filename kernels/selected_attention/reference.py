"""The definition of attention over selected rows: gather, two matrix products, a softmax.

As many queries at a time as have `TILE` numbers in their gathered rows; on other devices than the
CPU 16 times as many.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

TILE = 2**22


def forward(
    q: Tensor, rows: Tensor, index: Tensor, softmax_scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """See `selected_attention`."""
    dtype = _sum_dtype(q)
    out = torch.empty(*q.shape[:2], value_dim, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=dtype, device=q.device)
    for part in _tiles(index, rows):
        keys, scores = _scores(q[part].to(dtype), rows, index[part], softmax_scale)
        lse[part] = torch.logsumexp(scores, dim=-1)
        p = torch.exp(scores - _finite(lse[part]).unsqueeze(-1))
        out[part] = torch.matmul(p, keys[..., :value_dim])
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    rows: Tensor,
    index: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """See `selected_attention_backward`."""
    dtype, value_dim = _sum_dtype(q), out.shape[-1]
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    drows = torch.zeros(rows.shape, dtype=dtype, device=q.device)
    for part in _tiles(index, rows):
        queries, grads = q[part].to(dtype), grad_out[part].to(dtype)
        keys, scores = _scores(queries, rows, index[part], softmax_scale)
        p = torch.exp(scores - _finite(lse[part].to(dtype)).unsqueeze(-1))
        delta = (grads * out[part].to(dtype)).sum(-1, keepdim=True)
        dp = torch.matmul(grads, keys[..., :value_dim].transpose(-1, -2))
        ds = p * (dp - delta) * softmax_scale
        dq[part] = torch.matmul(ds, keys)
        dkeys = torch.matmul(ds.transpose(-1, -2), queries)
        dkeys[..., :value_dim] += torch.matmul(p.transpose(-1, -2), grads)
        _add_rows(drows, index[part].clamp(min=0).flatten().long(), dkeys.flatten(0, 1))
    return dq, drows


def _add_rows(total: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add rows at their places, in the same order each time. Those of no token are zeros."""
    if total.is_cuda:  # where index_add_ adds in any order; on the CPU index_put_ does
        total.index_put_((places,), rows, accumulate=True)
    else:
        total.index_add_(0, places, rows)


def _finite(lse: Tensor) -> Tensor:
    """Of a query without rows: exp(-inf - 0) = 0 everywhere instead of NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _scores(q: Tensor, rows: Tensor, index: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """The gathered rows `[N, K, D]`, and the scores `[N, H, K]`."""
    places = index.clamp(min=0).flatten().long()
    keys = rows.index_select(0, places).to(q.dtype).view(*index.shape, rows.shape[1])
    scores = torch.matmul(q, keys.transpose(-1, -2)) * softmax_scale
    return keys, scores.masked_fill((index < 0).unsqueeze(1), -torch.inf)


def _tiles(index: Tensor, rows: Tensor) -> Iterator[slice]:
    tile = TILE if rows.device.type == "cpu" else 16 * TILE
    size = max(1, tile // max(1, index.shape[1] * rows.shape[1]))
    for first in range(0, index.shape[0], size):
        yield slice(first, first + size)


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
