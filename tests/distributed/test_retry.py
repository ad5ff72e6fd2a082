"""A step that failed on one rank leaves nothing behind: made again, it is the step it would have
been, to the last bit.

What a window that is not forgotten would do: gradients of its first micro-batch count twice.
"""

import json
from typing import Any

import pytest

from tests.distributed.retry_program import STAGES
from tests.trl.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank reports; all stages in one launch."""
    folder = tmp_path_factory.mktemp("retry")
    logs = run_ranks(["-m", "tests.distributed.retry_program"], 2, folder, timeout=180)
    lines = [line for log in logs for line in log.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_step_can_be_made_again(stage: str, results: list[dict[str, Any]]) -> None:
    errors = [rank[stage]["True"]["error"] for rank in results]
    assert errors == ["RanksAbortedError", "MemoryError"]
    for rank in results:
        assert rank[stage]["True"]["scores"] == rank[stage]["False"]["scores"]
        assert rank[stage]["True"]["left_over"] == 0  # nor pages of a response that was cut off


@pytest.mark.parametrize("stage", STAGES)
def test_stages_agree_on_the_uninterrupted_steps(stage: str, results: list[dict[str, Any]]) -> None:
    """Else the comparison above could be one of two wrong runs."""
    for rank in results:
        expected = [float.fromhex(x) for x in rank["plain"]["False"]["scores"]]
        found = [float.fromhex(x) for x in rank[stage]["False"]["scores"]]
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_nobody_announced_is_noticed(stage: str, results: list[dict[str, Any]]) -> None:
    """Else prompts captured before it would be replayed with the weights after it."""
    assert all(rank[stage]["False"]["is_told_apart"] for rank in results)
