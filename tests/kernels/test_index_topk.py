"""Index scores, and the selection: a function of scores and positions, whatever the blocks."""

import pytest
import torch
from torch import Tensor

from longstraw_kernels.availability import is_triton_installed
from longstraw_kernels.index_topk import (
    RunningTopK,
    index_scores,
    reference,
    thresholds,
)
from longstraw_kernels.index_topk import (
    running as running_module,
)

NUM_KEYS, K = 120, 11
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not is_triton_installed(), reason="Triton is not installed")


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


@pytest.fixture(params=[False, True], ids=["by sorting", "by keys"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the best are found: the second way is the GPU's."""
    monkeypatch.setattr(running_module, "_goes_by_key", lambda _: request.param)


every_way = pytest.mark.usefixtures("way")


@every_way
@every_rule
@every_tie
@pytest.mark.parametrize("size", [1, 7, 16, NUM_KEYS])
def test_blocks_of_any_size_select_the_same_in_the_same_order(
    size: int, ties: str, rule: str
) -> None:
    """Set and order are those of sorting all keys at once by (score, position)."""
    scores = scores_with(ties)
    assert as_lists(running(scores, rule, cut(size)).positions) == truth(scores, rule)


@every_way
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


@every_way
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


@every_rule
def test_keys_are_ordered_as_scores_and_positions_are(rule: str) -> None:
    """All pairs of the scores that are special in fp32, and of the positions at both ends."""
    least, largest = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
    values = [-torch.inf, -largest, -1.5, -least, -least / 2, 0.0, least / 2, least, 1.5, largest]
    pairs = [(score, place) for score in (*values, torch.inf) for place in (0, 1, 2**31 - 1)]
    pairs.insert(0, (-torch.inf, -1))
    scores = torch.tensor([score for score, _ in pairs])
    keys = running_module._keys(
        scores, torch.tensor([place for _, place in pairs], dtype=torch.int32), rule
    )
    sign = 1 if rule == "first" else -1
    expected = sorted(range(len(pairs)), key=lambda i: (-pairs[i][0], sign * pairs[i][1]))
    assert keys.argsort(descending=True).tolist() == expected
    assert keys.unique().numel() == len(pairs)


@every_rule
def test_both_ways_keep_the_same_bits(rule: str) -> None:
    """Scores too, and where fewer than K were seen; -0.0, infinities and NaN, which is none."""
    scores = scores_with("zeros")
    scores[0, :, ::9], scores[1, 2:, 5], scores[1, 3, 7] = torch.nan, torch.inf, -torch.inf
    kept = []
    for by_key in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running_module, "_goes_by_key", lambda _, by_key=by_key: by_key)
            kept.append(running(scores, rule, cut(7)))
    assert torch.equal(kept[0].positions, kept[1].positions)
    assert torch.equal(kept[0].scores.view(torch.int32), kept[1].scores.view(torch.int32))


@pytest.mark.gpu
@every_rule
def test_on_a_gpu_nothing_waits_for_the_device(rule: str) -> None:
    """A block is added without a copy to the host, and selects what the CPU selects."""
    scores = scores_with("few values")
    best = RunningTopK(2, 5, K, rule, scores.dtype, torch.device(DEVICE))
    parts = [(scores[..., p].to(DEVICE), torch.arange(NUM_KEYS)[p].to(DEVICE)) for p in cut(16)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for part in parts:
            best.add(*part)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert as_lists(best.positions) == truth(scores, rule)


# (batch, rows of keys, queries, keys, heads, head dim): tiles are 16 x 16 in the interpreter.
SHAPES = {
    "one of everything": (1, 1, 1, 1, 1, 1),
    "whole tiles": (1, 1, 16, 32, 2, 16),
    "padded": (1, 1, 19, 37, 3, 24),
    "a batch": (2, 2, 5, 17, 3, 8),
    "keys that rows share": (3, 1, 17, 5, 2, 40),
}


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, key_rows, queries, keys, heads, dim = shape
    generator = torch.Generator().manual_seed(3)
    q, k, weights = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)
        for size in ((batch, queries, heads, dim), (key_rows, keys, dim), (batch, queries, heads))
    )
    return q, k, weights


def exact(q: Tensor, k: Tensor, weights: Tensor, scale: float) -> Tensor:
    """The definition in fp64."""
    products = torch.einsum("bthd,bsd->bths", q.double(), k.double().expand(q.shape[0], -1, -1))
    return (weights.double().unsqueeze(-1) * (products * scale).relu()).sum(2)


def check(found: Tensor, plain: Tensor, expected: Tensor) -> None:
    """error <= 2 * (error of the definition in the same dtype + one rounding of the largest)."""
    assert found.dtype == torch.float32 and found.shape == expected.shape
    rounding = torch.finfo(torch.float32).eps * expected.abs().max()
    budget = 2 * ((plain - expected).abs().max() + rounding)
    assert (found - expected).abs().max() <= budget


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_error_is_that_of_the_definition_in_the_same_dtype(shape, scale: float, dtype) -> None:
    """Products of half precision are exact in fp32: what is left is the rounding of sums. A scale
    below zero keeps the other half of the products."""
    given = operands(shape, dtype)
    plain = index_scores(*given, scale, impl="reference")
    check(index_scores(*given, scale, impl="triton"), plain, exact(*given, scale))


@needs_triton
@pytest.mark.parametrize("dtypes", [(16, 32, 32), (32, 16, 16), (16, 16, 32)], ids=str)
def test_operands_of_different_dtypes_are_multiplied_in_the_wider_one(dtypes) -> None:
    names = {16: torch.bfloat16, 32: torch.float32}
    given = operands(SHAPES["padded"], torch.float32)
    given = tuple(x.to(names[bits]) for x, bits in zip(given, dtypes, strict=True))
    plain = index_scores(*given, 0.3, impl="reference")
    check(index_scores(*given, 0.3, impl="triton"), plain, exact(*given, 0.3))


@needs_triton
def test_scores_are_all_written_the_same_each_time_from_any_layout(monkeypatch) -> None:
    q, k, weights = operands(SHAPES["a batch"], torch.float32)
    first = index_scores(q, k, weights, 0.3, impl="triton")
    plain_new_empty = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty", lambda *args, **kw: plain_new_empty(*args, **kw).fill_(torch.nan)
    )
    lying = [x.transpose(1, -1).contiguous().transpose(1, -1) for x in (q, k, weights)]
    assert not any(x.is_contiguous() for x in lying)
    assert torch.equal(index_scores(*lying, 0.3, impl="triton"), first)
    assert torch.equal(index_scores(q[:, :0], k, weights[:, :0], 0.3, impl="triton"), first[:, :0])


@needs_triton
def test_what_is_no_number_stays_none() -> None:
    q, k, weights = operands(SHAPES["padded"], torch.float32)
    k[0, 3, 5] = torch.nan
    for impl in ("reference", "triton"):
        found = index_scores(q, k, weights, 0.3, impl=impl).isnan()
        assert found[..., 3].all() and found.sum() == q.shape[1], impl


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
    with pytest.raises(ValueError, match="do not fit together"):
        index_scores(q, k.expand(2, -1, -1), weights, 1.0)
    with pytest.raises(ValueError, match="ties='lowest' is unknown"):
        RunningTopK(1, 1, 1, "lowest", torch.float32, torch.device("cpu"))


def test_implementations_that_cannot_run_are_refused() -> None:
    given = operands(SHAPES["padded"], torch.float64)
    with pytest.raises(ValueError, match="choose one of auto, reference, triton"):
        index_scores(*given, 0.3, impl="flash")
    with pytest.raises(ValueError, match="impl='triton' cannot run here"):
        index_scores(*given, 0.3, impl="triton")
