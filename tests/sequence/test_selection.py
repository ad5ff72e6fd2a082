"""Sparse attention selects among the tokens of all ranks, and not within each rank's."""

from typing import Any

import pytest
import torch

from longstraw.audit import full_sequence_step, selections
from tests.engine.compare import Gradients, RandomLoss, gradients, worst_error
from tests.models import Float64Islands
from tests.sequence.conftest import Together
from tests.sequence.selection_program import NUM_RANKS, PROMPT_LEN, group, model


@pytest.fixture(scope="module")
def records(together: Together) -> list[dict[str, Any]]:
    return together(NUM_RANKS, "selection")


@pytest.fixture(scope="module")
def truth() -> Gradients:
    tiny = model()
    with Float64Islands():
        full_sequence_step(tiny, [group()], RandomLoss([group()]))
    return gradients(tiny)


def test_all_that_the_query_selects_lies_with_the_first_rank(records: list[dict[str, Any]]) -> None:
    """And the other rank has as many visible tokens, of which a local selection would take some."""
    with Float64Islands(), torch.no_grad():
        found = selections(model(), group().prompt_ids)
    selected = found["model.layers.0.self_attn.indexer"][PROMPT_LEN - 1].tolist()
    first, second = (set(record["owned"]) for record in records)
    assert len(set(selected)) == 12 and set(selected) <= first
    assert len(second) >= 12 and first | second == set(range(PROMPT_LEN - 1))


def test_the_gradient_is_that_of_the_global_selection(
    records: list[dict[str, Any]], truth: Gradients
) -> None:
    for record in records:
        error, name = worst_error(record["right"], truth)
        assert error <= 1e-9, name


def test_local_selections_would_be_seen(records: list[dict[str, Any]], truth: Gradients) -> None:
    assert worst_error(records[0]["local"], truth)[0] > 1e-2
