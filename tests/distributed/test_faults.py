"""What happens when a rank fails, hangs or dies: nobody hangs, and the message names it.

Each case is a training on two gloo ranks in which something happens to rank 1 in its second step.
Times are measured from the moment of the fault, which the program prints.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.fault_program import TIMEOUT_SECONDS
from tests.distributed.processes import Ended, run_until_end
from tests.marks import slow_but
from tests.trl.parity import ModelPath
from tests.trl.ranks import base_environment, patience

PROGRAM = ["-m", "tests.distributed.fault_program"]
TIMEOUT = 150


def run(
    model_path: ModelPath, tmp_path: Path, stages: str, fault: str, until: Sequence[int] = (0, 1)
) -> list[Ended]:
    model = str(model_path(num_hidden_layers=2))
    arguments = [*PROGRAM, model, str(tmp_path / "out"), stages, fault]
    return run_until_end(arguments, 2, tmp_path / "logs", until, timeout=TIMEOUT)


def seconds_after_fault(survivor: Ended, faulty: Ended) -> float:
    found = re.search(r"FAULT at ([\d.]+)", faulty.log)
    assert found, faulty.log
    return survivor.at - float(found[1])


def test_the_survivor_of_a_killed_rank_ends_and_names_it(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """kill -9 in the middle of replay under ZeRO-3, whose passes the ranks make together."""
    survivor, killed = run(model_path, tmp_path, "3", "kill")
    assert killed.code == -9
    assert survivor.code not in (0, None), survivor.log
    # It notices within a second; the rest is Python that prints tracebacks and ends.
    assert seconds_after_fault(survivor, killed) < 30
    assert "RankLostError: rank 0 was" in survivor.log
    assert re.search(r"rank 1: process \d+ on \S+ is gone; last seen .* in replay", survivor.log)
    assert "step 2" in survivor.log


@pytest.mark.slow
def test_a_launcher_is_not_faster_than_the_message(model_path: ModelPath, tmp_path: Path) -> None:
    """`torchrun` ends the other ranks within a tenth of a second after one has died."""
    environment = base_environment()
    model = str(model_path(num_hidden_layers=2))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, *launch, *PROGRAM, model, str(tmp_path / "out"), "2", "kill"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(TIMEOUT),
        check=False,
    )
    assert done.returncode != 0
    assert re.search(r"rank 1: process \d+ on \S+ is gone; last seen .* in replay", done.stderr)


def test_a_hung_rank_is_given_up_after_the_timeout(model_path: ModelPath, tmp_path: Path) -> None:
    """DeepSpeed's own group would wait for half an hour whatever `ddp_timeout` says."""
    survivor, hung = run(model_path, tmp_path, "2", "stop", until=[0])
    waited = seconds_after_fault(survivor, hung)
    assert TIMEOUT_SECONDS - 1 < waited < TIMEOUT_SECONDS + 30
    assert survivor.code not in (0, None)
    assert re.search(r"rank 1: on \S+; last seen 1\d\.\d s ago in replay", survivor.log)


@pytest.mark.parametrize("stage", ["plain", "3"])
def test_an_error_on_one_rank_is_raised_on_all(
    stage: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """Between two passes the peers can be reached, also under ZeRO-3."""
    other, faulty = run(model_path, tmp_path, stage, "raise")
    assert "MemoryError: out of memory, planted" in faulty.log
    assert "RanksAbortedError: rank 1 failed in" in other.log
    assert "Rank 1 said: MemoryError: out of memory, planted" in other.log
    assert seconds_after_fault(other, faulty) < 30


def test_a_reward_function_that_raises_on_one_rank_raises_on_all(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """TRL gathers rewards; the others would wait there."""
    other, faulty = run(model_path, tmp_path, "plain", "reward raises")
    assert "KeyError: 'no answer for this prompt'" in faulty.log
    assert "rank 1 failed in the reward functions" in other.log


@pytest.mark.parametrize(
    "stages",
    slow_but(
        ["plain,0,3,0 bf16"],
        ["plain,0,3,0 bf16", "1,2,1 bf16,2 bf16,3 bf16"],
    ),
)
def test_a_nan_on_one_rank_skips_the_step_everywhere(
    stages: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """In fp32 stock DeepSpeed writes NaN into the weights at stage 0; elsewhere it skips the step
    and says nothing."""
    first, second = run(model_path, tmp_path, stages, "nan loss")
    for rank in (first, second):
        assert rank.code == 0, rank.log
        for stage in stages.split(","):
            done = "skipped [0.0, 1.0, 0.0, 0.0], finite [True, True, True, True]"
            assert f"DONE {stage}: {done}" in rank.log
    told = "step 2 changed no weight, because its gradient is not finite"
    assert first.log.count(told) == len(stages.split(","))


def test_sigterm_in_replay_ends_with_a_place(model_path: ModelPath, tmp_path: Path) -> None:
    """What a cluster sends before it takes the machine away."""
    other, ended = run(model_path, tmp_path, "2", "terminate")
    assert ended.code == 128 + 15
    assert "rank 1 was ended by SIGTERM in replay" in ended.log
    assert other.code not in (0, None)
