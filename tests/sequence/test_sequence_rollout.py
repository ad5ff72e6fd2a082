"""Ranks that share a prompt decode, each attending to its own pages, what one process decodes."""

from typing import Any

import pytest
import torch

from tests.sequence import rollout_program
from tests.sequence.conftest import Together
from tests.sequence.rollout_program import FAMILIES, families

SIZES = (2, 3)
KINDS = tuple(f"{what}{how}" for what in ("", "rows, ", "turns, ") for how in ("greedy", "sampled"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process, seeded as the leaders are."""
    before = torch.get_rng_state()
    record = rollout_program.run(1)
    torch.set_rng_state(before)
    return record


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_ranks", "family"), [(size, family) for size in SIZES for family in families(size)]
)
def test_all_ranks_decode_what_one_process_decodes(
    num_ranks: int, family: str, kind: str, together: Together, alone: dict[str, Any]
) -> None:
    """45 prompt tokens, contexts of 1 to 61 tokens and turns that continue them, in chunks of 16 of
    which each rank owns a part: beyond every window, and some of them without a token on some rank.
    Sampling draws what the leader would draw alone, whatever the others' seeds."""
    for record in together(num_ranks, "rollout"):
        assert record[family][kind] == alone[family][kind]


@pytest.mark.parametrize("num_ranks", SIZES)
def test_ranks_go_on_with_the_leaders_random_state(
    num_ranks: int, together: Together, alone: dict[str, Any]
) -> None:
    for record in together(num_ranks, "rollout"):
        for family in families(num_ranks):
            assert record[family]["drawn next"] == alone[family]["drawn next"]


@pytest.mark.parametrize("num_ranks", SIZES)
def test_turns_continue_what_is_held(
    num_ranks: int, together: Together, alone: dict[str, Any]
) -> None:
    """As many captures, of as many tokens, as in one process."""
    for record in together(num_ranks, "rollout"):
        for family in families(num_ranks):
            for what in ("num_captures", "tokens"):
                assert record[family][what] == alone[family][what]


def test_the_test_would_tell_seeds_apart(alone: dict[str, Any]) -> None:
    """Members of one prompt differ when sampled, and from the greedy one."""
    for family in FAMILIES:
        sampled = alone[family]["sampled"]
        assert sampled[0] != sampled[1] and alone[family]["greedy"][0] not in sampled


@pytest.mark.parametrize("num_ranks", SIZES)
def test_a_users_logits_processor_works(
    num_ranks: int, together: Together, alone: dict[str, Any]
) -> None:
    for record in together(num_ranks, "rollout"):
        rows = record["processors"]["odd tokens"]
        assert rows == alone["processors"]["odd tokens"]
        assert all(token % 2 == 1 for row in rows for token in row if token)  # 0 is the padding


@pytest.mark.parametrize("num_ranks", SIZES)
def test_scores_that_differ_between_ranks_do_not_set_them_apart(
    num_ranks: int, together: Together, alone: dict[str, Any]
) -> None:
    """Planted: each rank's scores are turned by its own number of tokens. The leader's count."""
    for record in together(num_ranks, "rollout"):
        assert record["processors"]["own scores"] == alone["processors"]["own scores"]


@pytest.mark.parametrize("num_ranks", SIZES)
def test_a_time_limit_is_refused_where_ranks_share_a_prompt(
    num_ranks: int, together: Together, alone: dict[str, Any]
) -> None:
    """Each rank's clock would end it at another token, and the others would wait for it."""
    assert alone["refused"] == ["nothing", "nothing"]
    for record in together(num_ranks, "rollout"):
        for said in record["refused"]:
            assert said.startswith("ConfigError: max_time ends generation by each rank's own clock")
            assert "max_new_tokens" in said
