"""A token that one rank owns decides what a query of another one finds, and gets its gradient.

In random models every key counts a little and the loss of some is a small error. Here one key
counts: what is lost on the way between ranks turns the answer into another one.
"""

from typing import Any

import pytest

from longstraw.audit import full_sequence_step
from tests.engine.compare import Gradients, gradients, worst_error
from tests.models import Float64Islands
from tests.sequence.conftest import Together
from tests.sequence.needle_program import (
    ANSWERS,
    NEEDLES,
    NUM_ANSWERS,
    NUM_RANKS,
    PAIRS,
    OneToken,
    asked_by,
    group_of,
    needle_model,
)

TOLERANCE = 1e-9
EMBEDDING = "model.embed_tokens.weight"
RETRIEVAL = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv"]
every_pair = pytest.mark.parametrize(("owner", "token"), PAIRS)


@pytest.fixture(scope="module")
def truths() -> dict[tuple[int, int], Gradients]:
    """The definition's gradients, by owner of the needle and token of the answer."""
    model, found = needle_model(), {}
    for owner, token in PAIRS:
        with Float64Islands():
            full_sequence_step(model, [group_of(owner)], OneToken(token))
        found[owner, token] = gradients(model)
    return found


@pytest.fixture(scope="module")
def records(together: Together) -> list[dict[str, Any]]:
    return together(NUM_RANKS, "needle")


def needle_row(found: Gradients) -> Gradients:
    """The gradient of the needle's embedding, which reaches it through its keys and values only."""
    return {"needle": found[EMBEDDING][NEEDLES[1]]}


def test_the_needle_lies_where_the_test_says(records: list[dict[str, Any]]) -> None:
    """One rank's pages hold it, and each rank has a turn; another one asks."""
    for owner in range(NUM_RANKS):
        assert [record["owned"][owner] for record in records] == [
            rank == owner for rank in range(NUM_RANKS)
        ]
    assert {owner for owner, _ in PAIRS} == {asked_by(token) for _, token in PAIRS}
    assert all(asked_by(token) != owner for owner, token in PAIRS)


@pytest.mark.parametrize("needle", [1, 4])
@pytest.mark.parametrize("owner", range(NUM_RANKS))
def test_every_rank_decodes_what_the_needle_says(
    owner: int, needle: int, records: list[dict[str, Any]]
) -> None:
    """Another needle, another answer: nothing else in the prompt says it."""
    for record in records:
        assert record["right"]["decoded"][owner, needle] == [ANSWERS[needle]] * NUM_ANSWERS


@every_pair
def test_the_needle_gets_its_gradient(
    owner: int, token: int, records: list[dict[str, Any]], truths: dict[tuple[int, int], Gradients]
) -> None:
    """The row of its embedding, the projections of keys and values that it is found with, and every
    other parameter: that of the full-sequence step in one process, in fp64. The row is among the
    largest of the embedding, so it cannot hide behind others."""
    truth = truths[owner, token]
    row = needle_row(truth)["needle"]
    assert row.abs().max() > 0.1 * truth[EMBEDDING].abs().max() > 0
    assert all(truth[name].abs().max() > 1e-3 for name in RETRIEVAL)
    for record in records:
        ours = record["right"]["gradients"][owner, token]
        error, name = worst_error({**ours, **needle_row(ours)}, {**truth, **needle_row(truth)})
        assert error <= TOLERANCE, name


# ---------------------------------------------------------------- planted mistakes


def test_a_lost_part_in_decoding_would_change_the_answer(records: list[dict[str, Any]]) -> None:
    """The first rank's scores count, and it lacks the needle then unless it owns it."""
    for record in records:
        decoded = record["decoding drops other ranks' keys"]["decoded"]
        for owner, needle in decoded:
            is_right = decoded[owner, needle] == [ANSWERS[needle]] * NUM_ANSWERS
            assert is_right == (owner == 0)


@every_pair
def test_a_lost_part_in_a_chunk_would_change_the_needles_gradient(
    owner: int, token: int, records: list[dict[str, Any]], truths: dict[tuple[int, int], Gradients]
) -> None:
    """The query has not found it, and the backward takes another softmax for its."""
    truth = needle_row(truths[owner, token])
    for record in records:
        wrong = record["a chunk drops other ranks' keys"]["gradients"][owner, token]
        assert worst_error(needle_row(wrong), truth)[0] > 0.1


@every_pair
def test_a_lost_part_of_dq_would_change_the_querys_gradient(
    owner: int, token: int, records: list[dict[str, Any]], truths: dict[tuple[int, int], Gradients]
) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    for record in records:
        wrong = record["a query drops other ranks' gradients"]["gradients"][owner, token]
        assert worst_error({name: wrong[name]}, {name: truths[owner, token][name]})[0] > 0.1
