"""Two processes resume as one does, and end together when one of them cannot write."""

from itertools import product
from pathlib import Path

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from longstraw import ConfigError
from tests.trl.parity import ModelPath, make_trainer
from tests.trl.ranks import RanksError, run_ranks
from tests.trl.resuming import (
    ACCUMULATED,
    BUFFERED,
    RESUMED_ON_TWO,
    VARIANT,
    contents,
    uninterrupted,
)


@pytest.fixture(scope="module")
def several(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder in which two processes did `tests.trl.resuming.several`, and the checkpoint of
    one process that they were given."""
    folder = tmp_path_factory.mktemp("several")
    uninterrupted(BUFFERED.but(max_steps=1), model_path(**VARIANT), folder / "one")
    checkpoint = folder / "one" / "checkpoint-1"
    module = ["-m", "tests.trl.resuming", "several"]
    arguments = [*module, str(model_path(**VARIANT)), str(folder), str(checkpoint)]
    try:
        run_ranks(arguments, 2, folder / "logs", timeout=240)
    except RanksError:
        if not all((folder / f"done-{rank}").exists() for rank in (0, 1)):
            raise
    return folder, checkpoint


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_resume_to_the_last_bit(rank: int, several: tuple[Path, Path]) -> None:
    """Each has its own completions and its own random state; a sum of two does not depend on their
    order."""
    report = torch.load(several[0] / f"{rank}.pt", weights_only=True)
    assert report == {step: [] for step in RESUMED_ON_TWO}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_is_full_for_one_rank_stops_all(
    failing: int, several: tuple[Path, Path]
) -> None:
    """Rank 0 writes the optimizer and, with a best model, is waited for within the save; rank 1
    writes its random state only. Both raise the same error, and neither hangs."""
    folder = several[0]
    first, second = ((folder / f"rank{failing}-full-{rank}.txt").read_text() for rank in (0, 1))
    out = folder / f"rank{failing}-full"
    assert first == second
    assert f"rank {failing}: OSError: [Errno 28]" in first
    assert f"The last complete checkpoint is {out}/checkpoint-2" in first
    assert contents(out) == ["checkpoint-1", "checkpoint-2"]


def test_two_processes_refuse_a_checkpoint_of_one(several: tuple[Path, Path]) -> None:
    """Rank 0 finds its file, rank 1 does not; both say why."""
    for rank in (0, 1):
        message = (several[0] / f"refused-{rank}.txt").read_text()
        assert f"{several[1]} was written by 1 process(es), and this run has 2" in message
        assert "--num_processes 1" in message


def test_a_killed_rank_leaves_the_last_checkpoint(several: tuple[Path, Path]) -> None:
    """SIGKILL in the middle of the second rank's file: the first one's files are all there and
    do not get a checkpoint's name."""
    out = several[0] / "killed"
    assert contents(out) == ["_unfinished", "checkpoint-1", "checkpoint-2"]
    assert (out / "_unfinished" / "checkpoint-3" / "rng_state_1.pth").exists()
    assert get_last_checkpoint(str(out)) == f"{out}/checkpoint-2"
    states = {path.name for path in (out / "checkpoint-2").glob("longstraw_state_*")}
    assert states == {"longstraw_state_0.pt", "longstraw_state_1.pt"}


@pytest.mark.slow
def test_two_processes_under_zero_resume_and_end_together(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-2 and 3, in full and LoRA, resumed to the last bit. DeepSpeed writes a partition per
    rank, and its ranks wait for each other behind them: a rank whose disk is full has to go there
    before it says so."""
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    arguments = ["-m", "tests.trl.resuming", "zero", str(model_path(**VARIANT)), str(tmp_path)]
    run_ranks(arguments, 2, tmp_path / "logs", timeout=400)
    for rank in (0, 1):
        for stage, tuned in product((2, 3), ("full", "LoRA")):
            report = torch.load(tmp_path / f"ZeRO-{stage}, {tuned}" / f"{rank}.pt")
            assert report == {step: [] for step in RESUMED_ON_TWO}, (stage, tuned)
        message = (tmp_path / f"rank1-full-{rank}.txt").read_text()
        assert "rank 1: OSError: [Errno 28]" in message
        assert f"The last complete checkpoint is {tmp_path}/rank1-full/checkpoint-2" in message
    assert contents(tmp_path / "rank1-full") == ["checkpoint-1", "checkpoint-2"]


def test_one_process_refuses_a_checkpoint_of_two(
    several: tuple[Path, Path], model_path: ModelPath, tmp_path: Path
) -> None:
    """It would leave out the completions and the random state of the second."""
    checkpoint = several[0] / "run" / "checkpoint-3"
    trainer = make_trainer(ACCUMULATED, model_path(**VARIANT), tmp_path, longstraw=True)
    with pytest.raises(ConfigError) as raised:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    message = str(raised.value)
    assert "written by 2 process(es), and this run has 1" in message
    assert "--num_processes 2" in message
