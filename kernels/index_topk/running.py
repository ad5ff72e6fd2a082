"""The K best of scores that arrive block by block, under one rule for equal scores."""

import torch
from torch import Tensor

TIES = ("first", "last")
"""Of equal scores the token at the lower position is selected, or the one at the higher."""


class RunningTopK:
    """The K highest scores so far of each query, and where they stand.

    Attributes:
        scores: `[B, T, K]`, highest first, equal ones in the order of the rule; -inf for none.
        positions: `[B, T, K]` int32; -1 for none.

    Args:
        num_rows, num_queries: B and T.
        k: K.
        ties: "first" or "last".
        dtype, device: of the scores.
    """

    def __init__(
        self,
        num_rows: int,
        num_queries: int,
        k: int,
        ties: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if ties not in TIES:
            raise ValueError(f"ties={ties!r} is unknown; choose one of {', '.join(TIES)}.")
        shape = (num_rows, num_queries, k)
        self.ties = ties
        self.scores = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        self.positions = torch.full(shape, -1, dtype=torch.int32, device=device)

    def add(self, scores: Tensor, positions: Tensor, rows: Tensor | None = None) -> None:
        """Add the scores of keys that stand behind all that were added.

        Args:
            scores: `[B, T, S]`; -inf where a key is not visible.
            positions: `[S]`, of the keys, ascending.
            rows: indices of the rows that these are of; None for all.
        """
        best = self.scores if rows is None else self.scores[rows]
        by_key = _goes_by_key(scores)
        if by_key:  # NaN is no candidate there either
            new = torch.where(scores > -torch.inf, scores, -torch.inf)
            where = positions.expand_as(scores)
        else:
            found = _entrants(scores, best[..., -1:], self.ties)
            if found is None:
                return
            new, where = found[0], positions[found[1]]
        new = new + 0.0  # -0.0 equals 0.0, but some sorts put it behind
        where = torch.where(new > -torch.inf, where, -1).to(torch.int32)
        before = self.positions if rows is None else self.positions[rows]
        choose = _best_by_key if by_key else _best_first
        kept = choose([best, new], [before, where], self.ties, best.shape[-1])
        if rows is None:
            self.scores, self.positions = kept
        else:
            self.scores[rows], self.positions[rows] = kept

    def at_least(self, score: Tensor, position: Tensor) -> Tensor:
        """Positions `[B, T, K]` of those that come before a threshold or meet it; -1 for others.

        Args:
            score, position: `[B, T]`, as `thresholds` gives them.
        """
        score, position = score.unsqueeze(-1), position.unsqueeze(-1)
        if self.ties == "first":
            is_before = self.positions <= position
        else:
            is_before = self.positions >= position
        meets = (self.scores > score) | ((self.scores == score) & is_before)
        return torch.where(meets, self.positions, -1)


def thresholds(scores: Tensor, positions: Tensor, ties: str) -> tuple[Tensor, Tensor]:
    """The last of the K best, of candidates that several ranks have found.

    Args:
        scores, positions: `[ranks, B, T, K]`, each as in `RunningTopK`.
        ties: "first" or "last".

    Returns:
        Score and position, `[B, T]`; -inf where there are fewer than K candidates.
    """
    k = scores.shape[-1]
    scores, positions = (x.movedim(0, -2).flatten(-2) for x in (scores, positions))
    order = torch.argsort(positions, dim=-1, descending=ties == "last")
    scores, positions = scores.gather(-1, order), positions.gather(-1, order)
    best, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    return best[..., k - 1], positions.gather(-1, order[..., k - 1 : k]).squeeze(-1)


def _goes_by_key(scores: Tensor) -> bool:
    """Whether the best are found by `_best_by_key`; both ways give the same.

    On a GPU, where to count entrants would wait for the device at each block. On the CPU it is the
    other way that is faster.
    """
    return scores.is_cuda and scores.dtype == torch.float32


def _best_by_key(
    scores: list[Tensor], positions: list[Tensor], ties: str, k: int
) -> tuple[Tensor, Tensor]:
    """As `_best_first`, without a stable sort: of keys that differ any `topk` finds the same."""
    joined, where = torch.cat(scores, dim=-1), torch.cat(positions, dim=-1)
    order = _keys(joined, where, ties).topk(k, dim=-1).indices
    return joined.gather(-1, order), where.gather(-1, order)


def _keys(scores: Tensor, positions: Tensor, ties: str) -> Tensor:
    """Integers in the order of (score, position), higher ones first in the order of the rule.

    Args:
        scores: fp32 without -0.0.
        positions: int32, -1 for none: of those equal keys mean equal candidates.
        ties: "first" or "last".

    Returns:
        int64: 32 bits that are ordered as the score is, and 32 of the position.
    """
    bits = scores.view(torch.int32)
    # Negative numbers have a sign and a magnitude, which grows as they fall.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = 2**31 - 1 - positions.long() if ties == "first" else positions.long() + 1
    return (ordered.long() << 32) + rank


def _entrants(scores: Tensor, lowest: Tensor, ties: str) -> tuple[Tensor, Tensor] | None:
    """Scores that may be among the best, with their columns, both in order of columns.

    Of a long history few of a block's keys are: sorting all of them would take most of the time.
    """
    may_enter = scores > lowest if ties == "first" else (scores >= lowest) & (scores > -torch.inf)
    most = int(may_enter.sum(-1).max()) if may_enter.numel() else 0
    if most == 0:
        return None
    scores = scores.masked_fill(~may_enter, -torch.inf)
    if most == scores.shape[-1]:
        columns = torch.arange(most, device=scores.device).expand_as(scores)
        return scores, columns
    # No tie is decided here: `most` is enough for all that may enter, in any row.
    columns = scores.topk(most, dim=-1, sorted=False).indices.sort(dim=-1).values
    return scores.gather(-1, columns), columns


def _best_first(
    scores: list[Tensor], positions: list[Tensor], ties: str, k: int
) -> tuple[Tensor, Tensor]:
    """The K best of [best so far, a later block in order], as `RunningTopK` keeps them."""
    if ties == "last":  # a stable sort keeps what stands in front of its equals there
        scores = [scores[1].flip(-1), scores[0]]
        positions = [positions[1].flip(-1), positions[0]]
    joined, order = torch.sort(torch.cat(scores, dim=-1), dim=-1, descending=True, stable=True)
    return joined[..., :k], torch.cat(positions, dim=-1).gather(-1, order[..., :k])
