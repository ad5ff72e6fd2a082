"""One rank of a group runs a rollout, the others serve it: the words between them.

Both ranks are played one after the other by this process.
"""

import contextlib
from typing import Any

import pytest
import torch

from longstraw import MemoryPlanError, RanksAbortedError, SequenceGroup
from trl_integration.group_rollout import GroupRollout, PackedIds, RolloutResults


class ScriptedGroup(SequenceGroup):
    """A group of two on this one process: the leader's words are kept, and read by the other."""

    def __init__(self, rank: int, words: list[Any]) -> None:
        super().__init__(rank, 2)
        self.words = words

    def share(self, value: Any) -> Any:
        if not self.is_leader:
            return self.words.pop(0)
        self.words.append(value)
        return value


RESULTS = RolloutResults(
    [[3, 4], [3, 4]], [[5], [6, 7]], None, ["a", "b"], None, {"own": lambda: None}, None, []
)


def both() -> tuple[GroupRollout, GroupRollout, list[Any]]:
    """The rollouts of both ranks, and what the second was called with."""
    words: list[Any] = []
    calls: list[Any] = []
    joined = {"turn": lambda contexts: calls.append(contexts.lists()), "meeting": calls.append}
    return (
        GroupRollout(ScriptedGroup(0, words), joined),
        GroupRollout(ScriptedGroup(1, words), joined),
        calls,
    )


def test_a_rank_that_serves_joins_each_turn_and_gets_the_results() -> None:
    """Without the fields for reward functions, which may hold what cannot be sent."""
    leader, other, calls = both()

    def rollout() -> RolloutResults:
        with leader.announced("meeting", lambda: "tokenizing"):
            pass
        with leader.announced("turn", lambda: PackedIds.of([[3, 4], [3, 4], [9]])):
            pass
        return RESULTS

    assert leader.run(rollout) is RESULTS
    served = other.run(rollout)
    assert calls == ["tokenizing", [[3, 4], [3, 4], [9]]]
    assert served.extra_fields == {}
    assert vars(served) | {"extra_fields": None} == vars(RESULTS) | {"extra_fields": None}


def test_outside_a_rollout_nothing_is_announced() -> None:
    """All ranks make the same calls there."""
    leader, _, _ = both()
    with leader.announced("turn", lambda: pytest.fail("made in vain")):
        pass
    assert leader.sequence.words == []  # type: ignore[attr-defined]


def test_an_error_of_the_rollout_is_told() -> None:
    """Also one in a meeting, which has told the others only that this rank failed in it."""
    leader, other, _ = both()

    def fails() -> RolloutResults:
        raise KeyError("x")

    def fails_together() -> RolloutResults:
        with leader.announced("meeting", lambda: "tokenizing", tells_errors=True):
            raise KeyError("x")

    for rollout in (fails, fails_together):
        with pytest.raises(KeyError):
            leader.run(rollout)
        with pytest.raises(RanksAbortedError, match="KeyError: 'x'"):
            other.run(rollout)
        assert leader.sequence.words == []  # type: ignore[attr-defined]


def test_an_error_of_one_rank_in_shared_work_is_told_to_nobody() -> None:
    """The others stand in a collective of that work: no word reaches them there."""
    leader, _, _ = both()

    def fails_alone() -> RolloutResults:
        with leader.announced("turn", lambda: PackedIds.of([[3]])):
            raise MemoryError("of this device")

    with pytest.raises(MemoryError):
        leader.run(fails_alone)
    assert [name for name, _ in leader.sequence.words] == ["turn"]  # type: ignore[attr-defined]


def test_a_rollout_may_catch_what_all_ranks_of_the_group_have() -> None:
    """A context that does not fit: the others have the same error, and wait for the next turn. If
    it is not caught they raise it too."""
    leader, other, calls = both()
    too_long = MemoryPlanError("too long")

    def turn(ids: list[int]) -> None:
        with leader.announced("turn", lambda: PackedIds.of([ids])):
            if len(ids) > 1:
                raise too_long

    def join(contexts: PackedIds) -> None:
        if len(contexts.lists()[0]) > 1:
            raise too_long
        calls.append(contexts.lists())

    other.joined = {"turn": join}

    def catches() -> RolloutResults:
        with contextlib.suppress(MemoryPlanError):
            turn([3, 4])
        turn([3])
        return RESULTS

    def fails() -> RolloutResults:
        turn([3])
        turn([3, 4])
        return RESULTS

    leader.run(catches)
    other.run(catches)
    assert calls == [[[3]]]
    for rollout in (leader, other):
        with pytest.raises(MemoryPlanError, match="too long"):
            rollout.run(fails)


def test_equal_rows_are_sent_once() -> None:
    """Whether they are one list or equal ones, of numbers, arrays or tensors; an empty row too."""
    prompt = [70_000, 3]
    rows = [prompt, prompt, [70_000, 3], torch.tensor(prompt), [], [5]]
    packed = PackedIds.of(rows)
    assert [array.nbytes for array in packed.distinct] == [8, 0, 4]
    assert packed.lists() == [prompt, prompt, prompt, prompt, [], [5]]
    assert PackedIds.of(torch.arange(400).view(200, 2)).lists()[-1] == [398, 399]  # type: ignore[arg-type]
