"""Ranks need not have equally much to do, and none waits for a pass that never comes.

Under ZeRO-3 each forward gathers weights, and where gradients are partitioned each backward reduces
them: ranks with different numbers of members, prompt chunks or response chunks would stand in
different collectives. A hang ends after a minute or two, with the rank that hung and where it was.
"""

import os
from pathlib import Path

import pytest

from tests.deepspeed.compare import assert_same
from tests.deepspeed.conftest import Launched, Truth
from tests.deepspeed.jobs import RAGGED
from tests.deepspeed.launch import write_accelerate_config
from tests.trl.ranks import RanksError, run_accelerate


@pytest.mark.parametrize("name", RAGGED)
def test_unequal_ranks_end_where_one_process_ends(
    name: str, launched: Launched, truth: Truth
) -> None:
    """In the second step the ranks' roles are exchanged. Tolerances as in `test_zero`."""
    assert_same(name, launched("ragged")[name][0], truth("ragged", name))


@pytest.mark.slow
def test_members_are_as_unequal_as_the_names_say(launched: Launched) -> None:
    """Two steps, roles exchanged: 4 + 0 members on both ranks, 1 + 3 on both."""
    records = launched("ragged")
    for name, ranks in records.items():
        replays = [rank["calls"].get("replay", 0) for rank in ranks]
        expected = 8 if "against none" not in name and "1 member" not in name else 4
        if "against 1 token" in name:
            expected = 7  # two of its responses are the same token, and equal ones are run once
        assert replays == [expected] * 2, name


# ---------------------------------------------------------------- the launcher

STUCK = """
import faulthandler, os, signal, time
faulthandler.register(signal.SIGUSR1)
def waiting_for_the_others():
    time.sleep(60 * int(os.environ["RANK"]))
waiting_for_the_others()
"""


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_says_where(tmp_path: Path) -> None:
    """Else a hang under `accelerate launch` would be a test that says nothing."""
    program = tmp_path / "stuck.py"
    program.write_text(STUCK)
    config = write_accelerate_config(tmp_path, 0)
    with pytest.raises(RanksError, match=r"(?s)^rank 1 of 2 did not.*waiting_for_the_others"):
        run_accelerate([os.fspath(program)], 2, config, tmp_path / "logs", timeout=20)


def test_a_rank_that_fails_is_named_with_its_traceback(tmp_path: Path) -> None:
    """The other one is ended by the launcher."""
    program = tmp_path / "failing.py"
    program.write_text("import os, time; time.sleep(60 * (1 - int(os.environ['RANK']))); 1 / 0")
    config = write_accelerate_config(tmp_path, 0)
    with pytest.raises(RanksError, match=r"(?s)^rank 1 of 2 failed.*ZeroDivisionError"):
        run_accelerate([os.fspath(program)], 2, config, tmp_path / "logs", timeout=60)
