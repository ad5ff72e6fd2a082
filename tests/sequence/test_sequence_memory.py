"""What a rank of a group holds and receives: its share of the state, about its share of a chunk's
tensors, and per chunk and layer what `distributed/travel.py` says, whatever stands before it.

The numbers: `pytest tests/sequence/test_sequence_memory.py --log-cli-level=INFO`.
"""

import logging
from typing import Any

import pytest

from longstraw import Engine
from longstraw.distributed import Layout, Ownership
from tests.marks import slow_but
from tests.models import tiny_model
from tests.sequence import memory_program
from tests.sequence.conftest import Together
from tests.sequence.memory_program import (
    EVEN,
    HISTORY_CHUNKS,
    LAYOUTS,
    NUM_DECODED,
    NUM_DECODING,
    PEAK_CHUNKS,
    RECEIVING,
    RESPONSE,
    UNEVEN,
    receiving,
    wide_llama,
)

logger = logging.getLogger("tests.sequence")
SIZES = (2, 4)
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 4, 4, 16
"""L, H and D of the tiny llama; it has fewer key heads than query heads, and they count nowhere."""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return memory_program.run(1)


# ---------------------------------------------------------------- state


def chunks_of(prompt_len: int, chunk_size: int) -> list[int]:
    return [min(chunk_size, prompt_len - start) for start in range(0, prompt_len, chunk_size)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", slow_but([2], SIZES))
def test_every_rank_holds_its_part_of_the_state(
    num_ranks: int, layout: str, together: Together, alone: dict[str, Any]
) -> None:
    """256 tokens in chunks of 64: one process's bytes divided by the ranks, to the byte, after a
    capture and at the peak of an update, where all cotangents stand."""
    one = alone["state"][layout, EVEN]
    decoder = Engine(tiny_model("llama")).decoder
    assert one["captured"] == decoder.state_bytes(EVEN[0], with_cotangents=False)
    assert one["peak"] == decoder.state_bytes(EVEN[0], with_cotangents=True)
    for record in together(num_ranks, "memory"):
        found = record["state"][layout, EVEN]
        assert found == {name: num_bytes / num_ranks for name, num_bytes in one.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", slow_but([2], SIZES))
def test_uneven_shares_differ_by_a_token_per_run(
    num_ranks: int, layout: Layout, together: Together, alone: dict[str, Any]
) -> None:
    """131 tokens in chunks of 27: what the rank owns, to the byte, which is P / sp within one token
    per chunk ("zigzag": two). Nothing is lost and nothing is held twice."""
    prompt_len, chunk_size = UNEVEN
    chunks = chunks_of(prompt_len, chunk_size)
    records = together(num_ranks, "memory")
    per_token = {name: n // prompt_len for name, n in alone["state"][layout, UNEVEN].items()}
    owned = [
        sum(len(Ownership(chunk, num_ranks, layout).columns(rank)) for chunk in chunks)
        for rank in range(num_ranks)
    ]
    assert sum(owned) == prompt_len
    for record, num_owned in zip(records, owned, strict=True):
        found = record["state"][layout, UNEVEN]
        assert found == {name: num_bytes * num_owned for name, num_bytes in per_token.items()}
        most = len(chunks) * (1 if layout == "block_cyclic" else 2)
        assert abs(num_owned - prompt_len / num_ranks) < most


def test_recurrent_state_is_divided_by_heads(together: Together, alone: dict[str, Any]) -> None:
    """A hybrid, 256 tokens in chunks of 64: half of one process's bytes, snapshots included, after
    a capture and at the peak of an update.

    For the capture a rank receives, in each of two recurrent layers, half of what C / 2 tokens
    give to convolution and recurrence (2 * 2 * 8 + 4 * 6 features, and 4 for each of two gates)
    and half of what comes out (4 * 6); in the one attention layer that is not the last what
    `travel.py` says.
    """
    one = alone["hybrid"]
    tokens = EVEN[0] // 2
    recurrent = 2 * tokens * (56 + 8 + 24) // 2 * 4
    attention = NUM_HEADS * tokens * (HEAD_DIM * 4 + 4 * (HEAD_DIM + 1))
    for record in together(2, "memory"):
        found = record["hybrid"]
        assert found["captured"] == one["captured"] / 2
        assert found["peak"] == one["peak"] / 2
        assert found["received for the capture"] == recurrent + attention


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("chunk_size", PEAK_CHUNKS)
@pytest.mark.parametrize("num_ranks", slow_but([2], SIZES))
def test_a_chunks_tensors_are_divided_but_for_one_layers_queries(
    num_ranks: int, chunk_size: int, together: Together, alone: dict[str, Any]
) -> None:
    """The peak of an update without its state, A(sp), against A(1) / sp. Beside tensors of own
    tokens there are at any time at most

    * in one attention's backward, where all tokens' queries, outputs and their gradients have come
      (C tokens of H heads of D, 4 bytes): these three twice while they are put in order, and what
      was sent of them (w tokens); fewer while keys are visited and dQ goes home (the three, dQ, and
      two copies of that by owner). A few numbers per head and token for the log-sum-exp.
    * the gradient of one weight before it is added, as in one process.
    """
    width = Ownership(chunk_size, num_ranks).width
    travelling = 4 * NUM_HEADS * (HEAD_DIM * (6 * chunk_size + 3 * width) + 4 * chunk_size)
    a_weight = max(parameter.nbytes for parameter in wide_llama().parameters())
    one = alone["peaks"][chunk_size]
    share = (one["tensors"] - one["state"]) / num_ranks
    for rank, record in enumerate(together(num_ranks, "memory")):
        found = record["peaks"][chunk_size]
        assert found["state"] == one["state"] / num_ranks
        activations = found["tensors"] - found["state"]
        logger.info(
            f"chunk {chunk_size}, sp {num_ranks}, rank {rank}: {activations:,} bytes, {share:,.0f} "
            f"are A(1) / sp, bound {share + travelling + a_weight:,.0f}"
        )
        assert activations <= share + travelling + a_weight


# ---------------------------------------------------------------- from other ranks

EXPECTED = ("capture", "score", "score and replay", "prompt backward", "capture of a history")


def expected_bytes(name: str, num_ranks: int) -> dict[str, int]:
    """What `travel.py` says, by phase.

    Captures and the prompt's backward end with the last layer's keys and values: their queries
    travel in L - 1 layers. Scoring and replays need the last layer too; scores are gathered, two
    sums per token. Flags and random states are not counted, they do not grow with tokens.
    """
    what = RECEIVING[name]
    item, total = what.dtype.itemsize, 8 if what.dtype.itemsize == 8 else 4
    others, dim = num_ranks - 1, HEAD_DIM
    forward = others * NUM_HEADS * (dim * item + total * (dim + 1))
    backward = others * NUM_HEADS * (3 * dim * item + total + total * dim)
    prompt_len, chunk_size = UNEVEN

    def width(num_tokens: int) -> int:
        return Ownership(num_tokens, num_ranks, what.layout).width  # type: ignore[arg-type]

    prompt = sum(width(chunk) for chunk in chunks_of(prompt_len, chunk_size))
    responses = 2 * width(RESPONSE)  # one by one, each a chunk: the last prompt token and R - 1
    score = responses * (NUM_LAYERS * forward + others * 2 * total)
    return {
        "capture": prompt * (NUM_LAYERS - 1) * forward,
        "score": score,
        "score and replay": score + responses * NUM_LAYERS * (forward + backward),
        "prompt backward": prompt * (NUM_LAYERS - 1) * (forward + backward),
        "capture of a history": HISTORY_CHUNKS * width(chunk_size) * (NUM_LAYERS - 1) * forward,
    }


every_receiving = pytest.mark.parametrize(
    ("num_ranks", "name"),
    slow_but(
        [(2, name) for name in receiving(2)],
        [(size, name) for size in SIZES for name in receiving(size)],
    ),
)


@pytest.mark.parametrize("phase", EXPECTED)
@every_receiving
def test_a_rank_receives_what_the_formula_says(
    num_ranks: int, name: str, phase: str, together: Together
) -> None:
    """To the byte, over five chunks of which the last is shorter; 27 tokens for two or four ranks,
    so pads travel as well. Under checkpointing a recompute receives nothing again."""
    for record in together(num_ranks, "memory"):
        assert record["received"][name][phase] == expected_bytes(name, num_ranks)[phase]


@every_receiving
def test_what_a_rank_receives_does_not_depend_on_the_history(
    num_ranks: int, name: str, together: Together
) -> None:
    """The same tokens behind nothing and behind 108 others: keys and values stay where they are."""
    for record in together(num_ranks, "memory"):
        found = record["received"][name]
        assert found["capture behind it"] == found["capture"] > 0


@every_receiving
def test_a_decoded_token_receives_one_result_per_head_and_layer(
    num_ranks: int, name: str, together: Together
) -> None:
    """Every rank has the queries: only `out` and the log-sum-exp travel, (sp - 1) B H (Dv + 1) sums
    per layer. The leader's scores, B V, are not counted."""
    total = 8 if RECEIVING[name].dtype.itemsize == 8 else 4
    rows = NUM_DECODING * NUM_DECODED * NUM_LAYERS
    expected = (num_ranks - 1) * rows * NUM_HEADS * (HEAD_DIM + 1) * total
    for record in together(num_ranks, "memory"):
        assert record["received"][name]["decoding"] == expected


def test_one_process_receives_nothing(alone: dict[str, Any]) -> None:
    for found in alone["received"].values():
        assert set(found.values()) == {0}
