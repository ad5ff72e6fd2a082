"""The definition of index scores: a matrix product, a relu, a weighted sum over heads.

As many queries at a time as have `TILE` products.
"""

import torch
from torch import Tensor

TILE = 2**24


def scores(q: Tensor, k: Tensor, weights: Tensor, softmax_scale: float) -> Tensor:
    """See `index_scores`."""
    q, k, weights = q.float(), k.float(), weights.float()
    num_rows, num_queries, num_heads, _ = q.shape
    size = max(1, TILE // max(1, num_rows * num_heads * k.shape[1]))
    keys = k.transpose(-1, -2)
    parts = []
    for first in range(0, num_queries, size):
        part = slice(first, first + size)
        # One product for a row's queries: broadcast over queries, keys would be copied for each.
        queries = q[:, part]
        products = torch.matmul(queries.flatten(1, 2), keys).mul_(softmax_scale).relu_()
        products = products.unflatten(1, queries.shape[1:3])
        parts.append(torch.matmul(weights[:, part].unsqueeze(-2), products).squeeze(-2))
    return torch.cat(parts, dim=1)
