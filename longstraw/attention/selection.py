"""Which tokens each query reads: the highest index scores over the whole history, on all ranks.

Every rank scores the keys that it owns and keeps its K best of each query. Of a query these travel
to the rank that owns it, which finds the last of the K best of all; that threshold goes back to
every rank, and each attends to what it owns down to there. The selection is the one that a single
rank would make, to the token.

What a rank receives for a chunk of C tokens, with B rows, w tokens to a rank and an item of e
bytes: (sp - 1) B w K 8 bytes of candidates, and (sp - 1) B w (H D e + 4 H + 8) of queries, weights
and thresholds.
"""

import torch
from torch import Tensor

from longstraw_kernels.availability import impl_beside
from longstraw_kernels.index_topk import RunningTopK, index_scores, thresholds

from ..state import LayerHandle, Page

BLOCK = 2048
"""Keys that are scored at a time, of as many pages as that takes."""


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
    scoring = _Scoring(best, q, weights, softmax_scale, handle)
    # In order of positions in each row: what rows share, what is a row's own, the chunk.
    scoring.add_pages(handle.history)
    for run in handle.row_runs:
        scoring.add_pages(run.pages, run.rows)
    scoring.add_own(own_keys)
    if travel.is_local:
        return best.positions
    found = travel.parts_home(best.scores), travel.parts_home(best.positions)
    score, position = thresholds(*found, handle.index_ties)
    return best.at_least(travel.gather(score, dim=1), travel.gather(position, dim=1))


class _Scoring:
    """Scores the keys that this rank has, a block at a time."""

    def __init__(
        self,
        best: RunningTopK,
        q: Tensor,
        weights: Tensor,
        softmax_scale: float,
        handle: LayerHandle,
    ) -> None:
        self.best, self.q, self.weights = best, q, weights
        self.softmax_scale, self.handle = softmax_scale, handle
        self.impl = impl_beside(handle.impl)

    def add_pages(self, pages: list[Page], rows: Tensor | None = None) -> None:
        """Keys that all queries, or those of some rows, come after."""
        block: list[Tensor] = []
        positions: list[Tensor] = []
        num_tokens = 0
        for page, *parts in self.handle.store.read(pages, self.q.device, None):
            keys = torch.cat(parts, dim=-1).squeeze(1)
            # Pages that rows share stand before those of a batch's own rows, and apart.
            if block and (num_tokens >= BLOCK or keys.shape[0] != block[0].shape[0]):
                self._add(torch.cat(block, dim=1), torch.cat(positions), rows)
                block, positions, num_tokens = [], [], 0
            block.append(keys)
            positions.append(torch.arange(page.start, page.end, device=self.q.device))
            num_tokens += page.num_tokens
        if block:
            self._add(torch.cat(block, dim=1), torch.cat(positions), rows)

    def add_own(self, keys: Tensor) -> None:
        """Keys of this rank's own tokens, to which the queries before them are blind."""
        queries = self.handle.q_start + torch.arange(self.q.shape[1], device=self.q.device)
        for columns, place in self.handle.travel.own_runs(keys.shape[1]):
            for first in range(columns.start, columns.stop, BLOCK):
                part = slice(first, min(first + BLOCK, columns.stop))
                start = self.handle.own_start + place + first - columns.start
                positions = start + torch.arange(part.stop - first, device=keys.device)
                self._add(keys[:, part], positions, None, positions > queries.unsqueeze(-1))

    def _add(
        self,
        keys: Tensor,
        positions: Tensor,
        rows: Tensor | None,
        is_hidden: Tensor | None = None,
    ) -> None:
        q, weights = (x if rows is None else x[rows] for x in (self.q, self.weights))
        scores = index_scores(q, keys, weights, self.softmax_scale, impl=self.impl)
        if is_hidden is not None:
            scores.masked_fill_(is_hidden, -torch.inf)
        self.best.add(scores, positions, rows)
