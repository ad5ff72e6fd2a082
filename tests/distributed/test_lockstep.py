"""Ranks that need different passes make the same ones, and fail together.

Each rank's pass is itself a collective that compares kinds, so a wrong order fails at once (or
hangs, and is named after the timeout).
"""

import json
from typing import Any

import pytest

from tests.distributed.lockstep_program import PLANS
from tests.trl.ranks import run_ranks

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of two ranks reports of each case; all in one launch."""
    folder = tmp_path_factory.mktemp("lockstep")
    logs = run_ranks(["-m", "tests.distributed.lockstep_program"], 2, folder, timeout=120)
    lines = [line for log in logs for line in log.splitlines() if line.startswith("RESULT ")]
    ranks = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


@pytest.mark.parametrize("name", PLANS)
def test_ranks_make_the_same_passes_and_each_its_own_once(name: str, results: Results) -> None:
    first, second = results[f"plan:{name}"]
    assert first["made"] == second["made"]
    for rank, plan in zip((first, second), PLANS[name], strict=True):
        assert rank["real"] == [kind.name for kind in plan]
        assert rank["idle"] == len(rank["made"]) - len(plan)


def test_no_pass_is_made_that_nobody_wants(results: Results) -> None:
    """Passes that both want are made at once: with equal plans nobody idles."""
    for rank in results["plan:equal"]:
        assert rank["idle"] == 0


def test_a_rank_that_fails_between_passes_fails_all_with_its_reason(results: Results) -> None:
    """And the group can be used again: the next update is an ordinary one."""
    first, second = results["failing"]
    assert second["error"] == "MemoryError: no room for pass 1"
    assert "RanksAbortedError: rank 1 failed in the update" in first["error"]
    assert "MemoryError: no room for pass 1" in first["error"]
    assert first["real"] == second["real"] == ["CAPTURE", "BACKWARD"]


def test_passes_without_collectives_need_no_turn(results: Results) -> None:
    first, second = results["unturned"]
    assert first["made"] == second["made"] == ["BACKWARD"]
    assert second["real"] == ["CAPTURE"] * 3 + ["BACKWARD"]


def test_an_agreed_error_is_raised_everywhere_and_forgotten(results: Results) -> None:
    """Each failing rank raises its own."""
    first, second = results["agree"]
    assert first["seen"] == ["ValueError: rank 0", "fine"]
    assert second["seen"] == ["ValueError: rank 1", "fine"]


def test_a_slow_rank_is_waited_for_as_long_as_it_gets_on(results: Results) -> None:
    """Six seconds under a timeout of two: a long prompt on one rank must not end the run."""
    first, second = results["slow"]
    assert (len(first["real"]), len(second["real"])) == (0, 12)


def test_a_silent_rank_is_given_up_and_named_with_its_place(results: Results) -> None:
    error = results["silent"][0]["error"]
    assert "no sign of life for 2 s" in error
    assert "rank 1: on" in error
    assert "in a long nap" in error


def test_workers_that_a_rank_forks_and_ends_are_no_ranks(results: Results) -> None:
    """They inherit the signal handler and the connection to the store; in a child both would have
    to be left alone. (It told the store of the child's end in the parent's name: both ranks died.)
    """
    first, second = results["pools"]
    assert second["codes"] == [-15] * 4
    assert first["real"] == second["real"] == ["CAPTURE"]


def test_ranks_at_different_work_are_told_so(results: Results) -> None:
    """One that was called once more than the others would otherwise pair with their next call."""
    for rank in results["other work"]:
        assert "rank 0: scoring; rank 1: replay" in rank["error"]
