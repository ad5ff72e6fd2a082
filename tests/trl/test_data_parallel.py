"""Two data-parallel processes end where stock TRL on two processes ends.

In every step one rank's group has no advantage. That rank replays nothing while the other replays
four members, and both must reach the same reduction. Tolerances as in `test_parity`: the mean over
ranks adds one rounding.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trl.data_parallel import SETTINGS, TRAINERS, VARIANT
from tests.trl.parity import TOLERANCE, ModelPath, Outcome, log_row, worst_metric, worst_parameter
from tests.trl.ranks import RanksError, run_ranks

WORLD_SIZE = 2
Records = dict[str, list[dict[str, Any]]]
"""What each trainer left, per rank."""


@pytest.fixture(scope="module")
def results(
    model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Records], list[str]]:
    """All settings, trained by both trainers in one launch (most of its time goes into imports),
    and what each rank wrote."""
    folder = tmp_path_factory.mktemp("data_parallel")
    arguments = ["-m", "tests.trl.data_parallel", str(model_path(**VARIANT)), str(folder)]
    logs = run_ranks(arguments, WORLD_SIZE, folder / "logs", timeout=300)
    records = {
        name: {
            trainer: [torch.load(folder / f"{i}-{trainer}-{r}.pt") for r in range(WORLD_SIZE)]
            for trainer in TRAINERS
        }
        for i, name in enumerate(SETTINGS)
    }
    return records, logs


@pytest.mark.parametrize("name", SETTINGS)
def test_two_processes_train_as_stock_trl_on_two_processes(
    name: str, results: tuple[dict[str, Records], list[str]]
) -> None:
    """Parameters, and the metrics that rank 0 logs: those are gathered over both ranks by TRL."""
    records = results[0][name]
    first = records["stock"][0]
    stock = Outcome(first["before"], first["after"], first["logs"], first["advantages"], None)
    for rank in range(WORLD_SIZE):
        ours = records["longstraw"][rank]
        parameter = worst_parameter(ours["after"], stock)
        assert parameter[0] <= TOLERANCE, (rank, parameter)
        assert ours["advantages"] == pytest.approx(first["advantages"], rel=TOLERANCE, abs=1e-6)
    metric = worst_metric(records["longstraw"][0]["logs"], first["logs"])
    log_row(f"2 processes, {name}", parameter, metric)
    assert metric[0] <= TOLERANCE, metric


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_hold_the_same_weights_to_the_last_bit(
    name: str, results: tuple[dict[str, Records], list[str]]
) -> None:
    """They apply the same reduced gradient; any other difference would grow from step to step."""
    first, second = results[0][name]["longstraw"]
    for parameter, value in first["after"].items():
        assert torch.equal(value, second["after"][parameter]), parameter


def test_ranks_replay_different_numbers_of_members(
    results: tuple[dict[str, Records], list[str]],
) -> None:
    """Five steps of one group of four per rank: rank 0's has no advantage in steps 1, 3 and 5. In
    two of rank 1's groups two responses are the same, and run once."""
    ranks = results[0]["sgd"]["longstraw"]
    assert [rank["calls"].get("replay", 0) for rank in ranks] == [2 * 4, 3 * 4 - 2]
    assert [rank["captures"] for rank in ranks] == [5, 5]


def test_one_rank_says_how_the_engine_runs(
    results: tuple[dict[str, Records], list[str]],
) -> None:
    """In a plain script without any logging set up, and once: the line is of no use if only
    a configured logger shows it."""
    logs = results[1]
    assert "LongStraw: llama on cpu" in logs[0]
    assert "LongStraw: llama on cpu" not in logs[1]


# ---------------------------------------------------------------- the launcher


def test_a_rank_that_does_not_end_is_named(tmp_path: Path) -> None:
    """A hang in a collective must not become a test that runs until it is ended from outside."""
    program = "import os, time; print('at work'); time.sleep(60 * int(os.environ['RANK']))"
    with pytest.raises(RanksError, match=r"(?s)^rank 1 of 2 did not end in time.*at work"):
        run_ranks(["-u", "-c", program], 2, tmp_path, timeout=2)


def test_a_rank_that_fails_is_named_with_its_traceback(tmp_path: Path) -> None:
    """The other one, which would wait for it, is ended."""
    program = "import os, time; time.sleep(60 * (1 - int(os.environ['RANK']))); 1 / 0"
    with pytest.raises(RanksError, match=r"(?s)^rank 1 of 2 failed.*ZeroDivisionError"):
        run_ranks(["-c", program], 2, tmp_path, timeout=30)
