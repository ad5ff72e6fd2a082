"""Which tokens each query reads: the highest index scores over the whole history, on all ranks.

Every rank scores the keys that it owns and keeps its K best of each query. Of a query these travel
to the rank that owns it, which finds the last of the K best of all; that threshold goes back to
every rank, and each attends to what it owns down to there. The selection is the one that a single
rank would make, to the token.

What a rank receives for a chunk of C tokens, with B rows and w tokens to a rank: (sp - 1) B w K 8
bytes of candidates, (sp - 1) B w (H D + H + 3) 4 of queries and thresholds.
"""

import torch
from torch import Tensor

from longstraw_kernels.index_topk import RunningTopK, index_scores, thresholds

from ..state import LayerHandle


def select_tokens(
    q: Tensor, weights: Tensor, own_keys: Tensor, handle: LayerHandle, softmax_scale: float, k: int
) -> Tensor:
    """The tokens that this rank owns of each query's K highest scores.

    Args:
        q: `[B, T, H, D]`, index queries of this rank's tokens.
        weights: `[B, T, H]`, of the heads.
        own_keys: `[B, T', D]`, index keys of this rank's own tokens.
        handle: the history of index keys.
        softmax_scale: factor on the products.
        k: K.

    Returns:
        Positions `[B, C, K]` int32 for the queries of all ranks, best first; -1 for none.
    """
    travel = handle.travel
    num_heads = q.shape[2]
    q = travel.gather(q.flatten(2), dim=1).unflatten(-1, (num_heads, -1))
    weights = travel.gather(weights, dim=1)
    dtype = q[:0].float().dtype  # that of scores
    best = RunningTopK(q.shape[0], q.shape[1], k, handle.index_ties, dtype, q.device)
    # In order of positions in each row: what rows share, what is a row's own, the chunk.
    _add_history(best, q, weights, handle, softmax_scale)
    q_positions = handle.q_start + torch.arange(q.shape[1], device=q.device)
    for columns, place in travel.own_runs(own_keys.shape[1]):
        start = handle.own_start + place
        size = handle.store.page_size
        for first in range(columns.start, columns.stop, size):
            keys = own_keys[:, first : min(first + size, columns.stop)]
            begin = start + first - columns.start
            k_positions = begin + torch.arange(keys.shape[1], device=q.device)
            scores = index_scores(q, keys, weights, softmax_scale)
            is_later = k_positions > q_positions.unsqueeze(-1)
            best.add(scores.masked_fill_(is_later, -torch.inf), begin)
    if travel.is_local:
        return best.positions
    found = travel.parts_home(best.scores), travel.parts_home(best.positions)
    score, position = thresholds(*found, handle.index_ties)
    return best.at_least(travel.gather(score, dim=1), travel.gather(position, dim=1))


def _add_history(
    best: RunningTopK, q: Tensor, weights: Tensor, handle: LayerHandle, softmax_scale: float
) -> None:
    for page, *parts in handle.store.read(handle.history, q.device, None):
        keys = torch.cat(parts, dim=-1).squeeze(1)
        best.add(index_scores(q, keys, weights, softmax_scale), page.start)
    for run in handle.row_runs:
        queries, heads = q[run.rows], weights[run.rows]
        for page, *parts in handle.store.read(run.pages, q.device, None):
            keys = torch.cat(parts, dim=-1).squeeze(1)
            best.add(index_scores(queries, keys, heads, softmax_scale), page.start, run.rows)
