"""Every ZeRO stage ends where one process ends, as in `test_zero` and `test_sequence_parallel`,
which have all combinations."""

import pytest
import torch

from tests.deepspeed.compare import assert_same
from tests.deepspeed.conftest import Launched, Truth
from tests.deepspeed.jobs import WORLD_SIZE
from tests.deepspeed.stage_jobs import APART, LAUNCH, LAUNCHES


@pytest.mark.parametrize("name", LAUNCHES[LAUNCH])
def test_ranks_end_where_one_process_ends(name: str, launched: Launched, truth: Truth) -> None:
    """Each parameter within 1e-4 of its movement, and the logged gradient norms and losses."""
    record = launched(LAUNCH)[name][0]
    assert record["stage"] == LAUNCHES[LAUNCH][name].stage
    assert_same(name, record, truth(LAUNCH, name))


def test_ranks_end_with_the_same_weights_to_the_last_bit(launched: Launched) -> None:
    """Any difference would grow from step to step. Under stage 3 there is one copy, in pieces."""
    for name, (first, second) in launched(LAUNCH).items():
        for parameter, value in first["after"].items():
            assert torch.equal(value, second["after"][parameter]), (name, parameter)


@pytest.mark.parametrize("name", APART)
def test_ranks_replay_different_numbers_of_members(name: str, launched: Launched) -> None:
    """Else it would not show that ranks need no equal numbers of passes; the numbers are those of
    `test_zero`."""
    ranks = launched(LAUNCH)[name]
    assert [rank["calls"]["replay"] for rank in ranks] == [7, 8]
    num_idle = [rank["num_idle"] for rank in ranks]
    is_partitioned = APART[name].stage >= 2
    assert all(num_idle) if is_partitioned else num_idle == [0] * WORLD_SIZE
    assert ranks[0]["accumulate"] == ("partitioned" if is_partitioned else "local")
