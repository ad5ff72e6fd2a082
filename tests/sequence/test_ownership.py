"""Every token of a chunk has one owner, and parts and the whole become one another without loss.

Pure functions of lengths, for all chunks of up to 40 tokens and groups of up to 9 ranks; what
travels is tried on ranks that are threads of this process.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from longstraw.distributed import (
    ChunkTravel,
    DecodeTravel,
    Layout,
    Ownership,
    SequenceGroup,
    most_owned,
)
from tests.sequence.threads import on_threads

LAYOUTS: tuple[Layout, ...] = ("block_cyclic", "zigzag")
LENGTHS, SIZES = range(1, 41), range(1, 10)
SHARES = [(1, 1), (1, 3), (2, 4), (7, 2), (8, 4), (11, 4), (13, 5)]
"""Tokens and ranks: alone, fewer tokens than ranks, shares that are equal and shares that are not,
and (11, 4), where "zigzag" gives one rank four tokens and another two."""


def every_ownership(layout: Layout) -> Iterator[Ownership]:
    return (Ownership(tokens, ranks, layout) for tokens in LENGTHS for ranks in SIZES)


def shares(ownership: Ownership) -> list[int]:
    return [len(ownership.columns(rank)) for rank in range(ownership.num_ranks)]


# ---------------------------------------------------------------- who owns what


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_has_exactly_one_owner(layout: Layout) -> None:
    for ownership in every_ownership(layout):
        owned = [c for rank in range(ownership.num_ranks) for c in ownership.columns(rank)]
        assert sorted(owned) == list(range(ownership.num_tokens)), ownership


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_are_ascending_and_not_empty(layout: Layout) -> None:
    """A page is made of each: one without tokens would be read, moved and merged for nothing."""
    for ownership in every_ownership(layout):
        for rank, runs in enumerate(ownership.runs):
            assert all(len(run) > 0 and run.step == 1 for run in runs), ownership
            columns = ownership.columns(rank)
            assert columns == sorted(columns), ownership
            assert columns == [column for run in runs for column in run]


@pytest.mark.parametrize(("layout", "most_runs"), [("block_cyclic", 1), ("zigzag", 2)])
def test_shares_differ_by_one_token_per_run_at_most(layout: Layout, most_runs: int) -> None:
    """One run in "block_cyclic", two in "zigzag": every chunk adds the same to every rank's state,
    and a chunk is cut into as few pages as can be."""
    for ownership in every_ownership(layout):
        assert all(len(runs) <= most_runs for runs in ownership.runs), ownership
        assert max(shares(ownership)) - min(shares(ownership)) <= most_runs, ownership


def test_a_zigzag_rank_has_an_early_and_a_late_run() -> None:
    """Blocks r and 2 sp - 1 - r: the earlier the one, the later the other."""
    for ownership in every_ownership("zigzag"):
        if ownership.num_tokens < 2 * ownership.num_ranks:
            continue
        early, late = zip(*ownership.runs, strict=True)
        assert [run.start for run in early] == sorted(run.start for run in early)
        assert [run.start for run in late] == sorted((run.start for run in late), reverse=True)
        assert max(run.stop for run in early) <= min(run.start for run in late)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("width", [2, 16, 256])
def test_zigzag_evens_out_the_work_inside_a_chunk(width: int, num_ranks: int) -> None:
    """Token c attends to c + 1 of the chunk's own keys. With runs of w tokens the last rank's have
    (sp - 1) w more each than the first one's, whose mean is (w + 1) / 2: 1 + 2 (sp - 1) w / (w + 1)
    times as many. Blocks r and 2 sp - 1 - r of the same length make all sums the same."""
    work = {}
    for layout in LAYOUTS:
        ownership = Ownership(width * num_ranks, num_ranks, layout)
        work[layout] = [
            sum(column + 1 for column in ownership.columns(rank)) for rank in range(num_ranks)
        ]
    assert len(set(work["zigzag"])) == 1
    ratio = max(work["block_cyclic"]) / min(work["block_cyclic"])
    assert ratio == pytest.approx(1 + 2 * (num_ranks - 1) * width / (width + 1), rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_width_is_the_largest_share(layout: Layout) -> None:
    """ceil(C / sp), and in "zigzag" up to one more, where both runs of one rank are long ones."""
    for ownership in every_ownership(layout):
        assert ownership.width == max(shares(ownership))
        rounded_up = -(-ownership.num_tokens // ownership.num_ranks)
        assert ownership.width - rounded_up in ((0,) if layout == "block_cyclic" else (0, 1))


# ---------------------------------------------------------------- what a rank owns of a prompt


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 16])
def test_most_owned_is_the_sum_over_chunks(layout: Layout, chunk_size: int) -> None:
    """The plan for memory, made without the ranks: no rank has more, and if the longest shares of
    all chunks fall on one rank, one has as much."""
    for num_tokens in range(0, 60):
        for num_ranks in SIZES:
            chunks = [
                Ownership(min(chunk_size, num_tokens - start), num_ranks, layout)
                for start in range(0, num_tokens, chunk_size)
            ]
            most = most_owned(num_tokens, chunk_size, num_ranks, layout)
            assert most == sum(chunk.width for chunk in chunks)
            owned = [sum(shares(chunk)[rank] for chunk in chunks) for rank in range(num_ranks)]
            assert sum(owned) == num_tokens and max(owned) <= most
            assert most - max(owned) <= 2  # the last chunk's longest share may be another rank's


@pytest.mark.parametrize(("layout", "per_chunk"), [("block_cyclic", 1), ("zigzag", 2)])
def test_a_rank_holds_its_part_of_the_state_to_a_token_per_run(
    layout: Layout, per_chunk: int
) -> None:
    """P / sp, less than one token more or less per run; exactly that where sp (2 sp for "zigzag")
    divides every chunk."""
    for chunk_size in (1, 3, 7, 16, 40):
        for num_tokens in range(1, 100):
            for num_ranks in SIZES:
                starts = range(0, num_tokens, chunk_size)
                lengths = [min(chunk_size, num_tokens - start) for start in starts]
                chunks = [shares(Ownership(length, num_ranks, layout)) for length in lengths]
                parts = num_ranks if layout == "block_cyclic" else 2 * num_ranks
                is_even = all(length % parts == 0 for length in lengths)
                for owned in map(sum, zip(*chunks, strict=True)):
                    off = abs(owned - num_tokens / num_ranks)
                    assert off == 0 if is_even else off < per_chunk * len(chunks)


# ---------------------------------------------------------------- travel


def travel_of(group: SequenceGroup, num_tokens: int, layout: Layout) -> ChunkTravel:
    ownership = Ownership(num_tokens, group.size, layout)
    return ChunkTravel(group, ownership, torch.device("cpu"))


def tokens_and_states(num_tokens: int) -> tuple[Tensor, Tensor]:
    """`[B, C]` and `[B, 3, C, 2]`, no value twice and none of them zero."""
    tokens = 1 + torch.arange(2 * num_tokens).view(2, num_tokens)
    states = 1.0 + torch.arange(12 * num_tokens).view(2, 3, num_tokens, 2)
    return tokens, states


every_share = pytest.mark.parametrize(
    ("num_tokens", "num_ranks", "layout"),
    [(*share, layout) for share in SHARES for layout in LAYOUTS],
    ids=str,
)


@every_share
def test_a_rank_takes_its_own_columns_and_fills_up_behind_them(
    num_tokens: int, num_ranks: int, layout: Layout
) -> None:
    tokens, _ = tokens_and_states(num_tokens)

    def take(group: SequenceGroup) -> Tensor:
        return travel_of(group, num_tokens, layout).take(tokens, -7)

    ownership = Ownership(num_tokens, num_ranks, layout)
    for rank, part in enumerate(on_threads(num_ranks, take)):
        columns = ownership.columns(rank)
        assert part.shape == (2, ownership.width)
        assert torch.equal(part[:, : len(columns)], tokens[:, columns])
        assert bool((part[:, len(columns) :] == -7).all())


@every_share
def test_pads_stand_no_later_than_the_last_token(
    num_tokens: int, num_ranks: int, layout: Layout
) -> None:
    """A model with learned positions has none after its last one: gpt2 would raise there."""
    start = 100

    def positions(group: SequenceGroup) -> Tensor:
        return travel_of(group, num_tokens, layout).positions(start)

    ownership = Ownership(num_tokens, num_ranks, layout)
    for rank, found in enumerate(on_threads(num_ranks, positions)):
        columns = ownership.columns(rank)
        assert found.shape == (ownership.width,)
        assert found[: len(columns)].tolist() == [start + column for column in columns]
        assert bool((found[len(columns) :] == start + num_tokens - 1).all())


@every_share
def test_parts_put_together_are_the_whole(num_tokens: int, num_ranks: int, layout: Layout) -> None:
    """Bit for bit, in order and on every rank; what stands at pads reaches nobody."""
    tokens, states = tokens_and_states(num_tokens)

    def there_and_back(group: SequenceGroup) -> tuple[Tensor, Tensor]:
        travel = travel_of(group, num_tokens, layout)
        part = states.new_full((2, 3, travel.ownership.width, 2), torch.nan)
        columns = travel.ownership.columns(group.rank)
        part[:, :, : len(columns)] = states[:, :, columns]
        return travel.gather(travel.take(tokens, -1), dim=1), travel.gather(part)

    for found in on_threads(num_ranks, there_and_back):
        assert torch.equal(found[0], tokens)
        assert torch.equal(found[1], states)


@every_share
def test_what_ranks_found_for_all_tokens_goes_to_their_owners(
    num_tokens: int, num_ranks: int, layout: Layout
) -> None:
    """Rank r finds r + 1 times the states. Each owner gets what every rank found for its tokens, or
    the sum of it, and zeros at its pads: they go into gradients."""
    _, states = tokens_and_states(num_tokens)

    def send_home(group: SequenceGroup) -> tuple[Tensor, Tensor]:
        travel = travel_of(group, num_tokens, layout)
        found = states * (group.rank + 1)
        return travel.parts_home(found), travel.sum_home(found)

    ownership = Ownership(num_tokens, num_ranks, layout)
    for rank, (parts, total) in enumerate(on_threads(num_ranks, send_home)):
        columns = ownership.columns(rank)
        assert parts.shape == (num_ranks, 2, 3, ownership.width, 2)
        for finder, part in enumerate(parts):
            assert torch.equal(part[:, :, : len(columns)], states[:, :, columns] * (finder + 1))
        assert not parts[..., len(columns) :, :].any()
        assert torch.equal(total, parts.sum(0))


@every_share
def test_own_keys_are_read_where_their_tokens_stand(
    num_tokens: int, num_ranks: int, layout: Layout
) -> None:
    """Each own column once, at its place in the chunk; pads are no keys."""

    def own_runs(group: SequenceGroup) -> list[tuple[slice, int]]:
        travel = travel_of(group, num_tokens, layout)
        return travel.own_runs(travel.ownership.width)

    ownership = Ownership(num_tokens, num_ranks, layout)
    for rank, runs in enumerate(on_threads(num_ranks, own_runs)):
        places = [
            place + offset
            for columns, place in runs
            for offset in range(columns.stop - columns.start)
        ]
        own = [column for columns, _ in runs for column in range(columns.start, columns.stop)]
        assert places == ownership.columns(rank)
        assert own == list(range(len(places)))


def test_in_decoding_the_first_rank_alone_reads_the_tokens_that_all_have() -> None:
    """They would count once per rank else; what each rank found is seen by all."""

    def decode(group: SequenceGroup) -> tuple[list[tuple[slice, int]], Tensor]:
        travel = DecodeTravel(group)
        return travel.own_runs(5), travel.parts_home(torch.tensor([float(group.rank)]))

    first, *others = on_threads(3, decode)
    assert first[0] == [(slice(0, 5), 0)]
    assert all(runs == [] for runs, _ in others)
    assert all(torch.equal(parts, torch.tensor([[0.0], [1.0], [2.0]])) for _, parts in others)
