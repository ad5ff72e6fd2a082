"""What happens when one of the ranks that share a prompt is short of room, fails or dies.

They stand in collectives in every layer of every pass: an error that one has alone cannot be told
there, and must not leave the others waiting either.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from longstraw import ConfigError, Engine, EngineConfig
from tests.distributed.processes import Ended, run_until_end
from tests.models import tiny_model
from tests.sequence.conftest import Together

NOTHING = {"bytes": 0, "pages": 0, "states": 0, "gradients": 0}
PATIENCE_SECONDS = 30
"""Far below the timeout of 30 minutes that a user has. The word comes within a second; the rest is
Python that prints a traceback and ends."""


def run(fault: str, tmp_path: Path) -> list[Ended]:
    arguments = ["-m", "tests.sequence.fault_program", fault]
    return run_until_end(arguments, 2, tmp_path / "logs", until=(0, 1), timeout=150)


def seconds_after_fault(survivor: Ended, faulty: Ended) -> float:
    found = re.search(r"FAULT at ([\d.]+)", faulty.log)
    assert found, faulty.log
    return survivor.at - float(found[1])


def assert_names_the_lost(survivor: Ended, faulty: Ended, phase: str) -> None:
    """In time, with the rank and where it was."""
    assert survivor.code not in (0, None), survivor.log
    assert seconds_after_fault(survivor, faulty) < PATIENCE_SECONDS
    assert "RankLostError: rank 0 was" in survivor.log
    gone = (
        rf"rank 1: process \d+ on \S+ is gone; last seen [\d.]+ s ago in {phase}, call \d+, step 2"
    )
    assert re.search(gone, survivor.log), survivor.log


@pytest.mark.parametrize(
    ("fault", "phase"),
    [("killed in capture", "capture"), ("killed in the merge of a backward", "replay")],
)
def test_the_survivor_of_a_killed_rank_ends_and_names_it(
    fault: str, phase: str, tmp_path: Path
) -> None:
    """kill -9 between two chunks of a capture, and inside an attention's backward, where the other
    waits for dQ in a collective that autograd called."""
    survivor, killed = run(fault, tmp_path)
    assert killed.code == -9
    assert_names_the_lost(survivor, killed, phase)


def test_a_rank_that_fails_alone_in_a_pass_ends_at_once_and_is_named(tmp_path: Path) -> None:
    """A page that finds no room on this rank only, as an error of its device would be: it waits for
    nobody, and the other learns it from the end of its process."""
    survivor, faulty = run("raises in a backward", tmp_path)
    assert faulty.code == 1
    assert "PageRoomError: planted in a pass" in faulty.log
    assert seconds_after_fault(faulty, faulty) < PATIENCE_SECONDS
    assert_names_the_lost(survivor, faulty, "prompt_backward")


# ---------------------------------------------------------------- room


@pytest.mark.parametrize("where", ["capture", "update"])
def test_what_does_not_fit_on_one_rank_is_refused_on_all(where: str, together: Together) -> None:
    """Rank 1 has a budget that rank 0 has not: for the prompt's state, or only not for what a
    backward adds. Both say so, nothing is left, and a shorter prompt goes on with the same bits as
    in engines that never failed."""
    records = [record[where] for record in together(2, "budget")]
    assert len({record["error"] for record in records}) == 1
    for record in records:
        assert record["error"].startswith("MemoryPlanError: "), record["error"]
        assert "on rank 1 of the sequence group the budget is" in record["error"]
        what = "the state of 112 tokens" if where == "capture" else "an update (cotangents of 96"
        assert what in record["error"]
        assert record["left"] == NOTHING
        assert record["works"]


@pytest.mark.slow
def test_what_does_not_fit_in_one_group_ends_the_update_of_the_other(together: Together) -> None:
    """Two groups of two. Both ranks of the first raise their own error, those of the second that
    they were told of it; then an update with less works on all."""
    records: list[dict[str, Any]] = together(4, "abort")
    for record in records[:2]:
        assert "MemoryPlanError: " in record["error"]
        assert "on rank 1 of the sequence group the budget is" in record["error"]
    for record in records[2:]:
        told = "RanksAbortedError: rank 0 (and ranks [1]) failed in capture and scoring"
        assert record["error"].startswith(told), record["error"]
        assert "Rank 0 said: MemoryPlanError: " in record["error"]
    for record in records:
        assert record["left"] == NOTHING and record["works"]
        assert record["seconds"] < PATIENCE_SECONDS


# ---------------------------------------------------------------- input that differs


@pytest.mark.parametrize("what", ["prompt", "response", "score", "context"])
def test_ranks_that_were_given_different_input_say_so(what: str, together: Together) -> None:
    """On every rank, and before a pass: they would wait for each other for ever."""
    for record in together(2, "other input"):
        assert record[what].startswith("DataError: ranks [1] of a sequence group were given other")
        assert "engine.axes.dp_rank" in record[what]


def test_what_ranks_send_are_values_whatever_their_layout(together: Together) -> None:
    """A transposed tensor on one rank and a contiguous one on the other."""
    for record in together(2, "other input"):
        assert record["sent"] == [[0, 3], [1, 4], [2, 5]]
        assert record["sum"] == [[0, 6], [2, 8], [4, 10]]


# ---------------------------------------------------------------- groups that cannot be made


@pytest.mark.parametrize(
    ("num_ranks", "asked", "possible"), [(2, 4, "1, 2"), (3, 2, "1, 3")], ids=str
)
def test_ranks_that_cannot_be_divided_are_told_how_they_could(
    num_ranks: int, asked: int, possible: str, together: Together
) -> None:
    """On every rank: none makes a group that others wait for."""
    for message in together(num_ranks, "refused"):
        assert f"sp_size={asked} (longstraw_sp_size in the trainer)" in message
        assert f"with {num_ranks} processes" in message
        assert message.endswith(f"or set it to one of {possible}.")


def test_chunks_with_fewer_tokens_than_ranks_are_refused() -> None:
    """Some rank would never have a token, while all wait for each other at every layer."""
    with pytest.raises(ConfigError, match="sp_size=4 with chunk_size=3: .* multiple of it"):
        EngineConfig(sp_size=4, chunk_size=3)


def test_without_a_launcher_the_error_says_how_to_start() -> None:
    with pytest.raises(ConfigError, match="with 1 processes") as caught:
        Engine(tiny_model("llama"), EngineConfig(sp_size=2))
    assert "accelerate launch --num_processes 2" in str(caught.value)
