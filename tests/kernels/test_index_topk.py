"""Index scores, and the selection: a function of scores and positions, whatever the blocks."""

import pytest
import torch
from torch import Tensor

from longstraw_kernels.index_topk import RunningTopK, index_scores, reference, thresholds

NUM_KEYS, K = 120, 11


def scores_with(ties: str, seed: int = 0) -> Tensor:
    """`[2, 5, NUM_KEYS]`, with none, many or only equal scores, and keys that are not visible."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 5, NUM_KEYS, generator=generator)
    if ties == "zeros":  # relu gives such: some are -0.0
        scores = scores.clamp(min=0) * torch.randn(scores.shape, generator=generator).sign()
        scores = torch.where(scores > 0.8, scores, scores * 0)
    elif ties == "few values":
        scores = (scores * 2).round() / 2
    elif ties == "all equal":
        scores = torch.zeros_like(scores)
    hidden = torch.arange(NUM_KEYS) > torch.tensor([3, 30, 60, 119, 119])[:, None]
    return scores.masked_fill(hidden, -torch.inf)


def truth(scores: Tensor, rule: str) -> list[list[list[int]]]:
    """Positions in the order of the rule, by Python's sort."""
    sign = 1 if rule == "first" else -1
    return [
        [
            sorted(
                (p for p, s in enumerate(row) if s > -torch.inf), key=lambda p: (-row[p], sign * p)
            )[:K]
            for row in rows
        ]
        for rows in scores.tolist()
    ]


def cut(size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, NUM_KEYS, size)]


def running(scores: Tensor, rule: str, parts: list[slice]) -> RunningTopK:
    best = RunningTopK(2, 5, K, rule, scores.dtype, scores.device)
    for part in parts:
        best.add(scores[..., part], torch.arange(NUM_KEYS)[part])
    return best


def as_lists(positions: Tensor) -> list[list[list[int]]]:
    return [[[p for p in row if p >= 0] for row in rows] for rows in positions.tolist()]


every_tie = pytest.mark.parametrize("ties", ["none", "zeros", "few values", "all equal"])
every_rule = pytest.mark.parametrize("rule", ["first", "last"])


@every_rule
@every_tie
@pytest.mark.parametrize("size", [1, 7, 16, NUM_KEYS])
def test_blocks_of_any_size_select_the_same_in_the_same_order(
    size: int, ties: str, rule: str
) -> None:
    """Set and order are those of sorting all keys at once by (score, position)."""
    scores = scores_with(ties)
    assert as_lists(running(scores, rule, cut(size)).positions) == truth(scores, rule)


@every_rule
@every_tie
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_with_parts_of_the_keys_select_what_one_would(
    num_ranks: int, ties: str, rule: str
) -> None:
    """Blocks of 5 dealt out to ranks. Each keeps of its own what comes before the threshold; put
    together that is the selection of one rank, to the token."""
    scores = scores_with(ties)
    ranks = [running(scores, rule, cut(5)[rank::num_ranks]) for rank in range(num_ranks)]
    score, position = thresholds(
        torch.stack([rank.scores for rank in ranks]),
        torch.stack([rank.positions for rank in ranks]),
        rule,
    )
    kept = [as_lists(rank.at_least(score, position)) for rank in ranks]
    together = [
        [sorted(p for rank in kept for p in rank[row][query]) for query in range(5)]
        for row in range(2)
    ]
    assert together == [[sorted(query) for query in row] for row in truth(scores, rule)]


def test_local_selections_would_choose_other_tokens() -> None:
    """Why the threshold is global: all of the best keys lie with one rank of two, and the best K/2
    of each, as of a selection within shards, are others."""
    scores = torch.arange(NUM_KEYS, 0, -1.0).expand(2, 5, -1)  # the first half holds the best
    halves = [running(scores, "first", [part]) for part in cut(NUM_KEYS // 2)]
    local = {p for half in halves for p in half.positions[0, 0, : K // 2].tolist()}
    score, position = thresholds(
        torch.stack([half.scores for half in halves]),
        torch.stack([half.positions for half in halves]),
        "first",
    )
    kept = [as_lists(half.at_least(score, position))[0][0] for half in halves]
    assert kept == [list(range(K)), []] and local != set(range(K))


@every_rule
def test_rows_may_have_keys_of_their_own(rule: str) -> None:
    """Blocks that only some rows read, between blocks that all do."""
    scores = scores_with("few values")
    best = running(scores, rule, [slice(0, 40)])
    best.add(scores[1:, :, 40:80], torch.arange(40, 80), torch.tensor([1]))
    best.add(scores[..., 80:], torch.arange(80, NUM_KEYS))
    without = scores.clone()
    without[0, :, 40:80] = -torch.inf
    assert as_lists(best.positions) == truth(without, rule)


@pytest.mark.parametrize("tile", [1, 2**24], ids=["one query at a time", "all at once"])
def test_scores_are_the_weighted_sum_of_the_heads(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, from bf16 operands too, and with keys that rows share."""
    monkeypatch.setattr(reference, "TILE", tile)
    generator = torch.Generator().manual_seed(0)
    q, k, weights = (
        torch.randn(size, generator=generator).bfloat16()
        for size in ((2, 7, 3, 4), (1, 9, 4), (2, 7, 3))
    )
    expected = torch.zeros(2, 7, 9, dtype=torch.float64)
    for head in range(3):
        products = q[:, :, head].double() @ k.double().transpose(-1, -2) * 0.3
        expected += weights[..., head].double().unsqueeze(-1) * products.clamp(min=0)
    found = index_scores(q, k, weights, 0.3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_shapes_and_rules_that_do_not_fit_are_refused() -> None:
    q, k, weights = torch.zeros(1, 2, 3, 4), torch.zeros(1, 5, 4), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="do not fit together"):
        index_scores(q, k[..., :2], weights, 1.0)
    with pytest.raises(ValueError, match="do not fit together"):
        index_scores(q, k, weights[:, :1], 1.0)
    with pytest.raises(ValueError, match="ties='lowest' is unknown"):
        RunningTopK(1, 1, 1, "lowest", torch.float32, torch.device("cpu"))
