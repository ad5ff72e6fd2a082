"""A checkpoint is complete or not there; what cannot be resumed from is refused with the reason."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOTrainer

from longstraw import ConfigError
from tests.trl.parity import ModelPath, Setting, make_trainer, prompts_dataset, train
from tests.trl.ranks import RanksError, run_ranks
from tests.trl.resuming import (
    BUFFERED,
    VARIANT,
    Ended,
    contents,
    disk_full,
    interrupted_write,
    uninterrupted,
)
from trl_integration.checkpoints import CheckpointError, CheckpointWriter, keeping_errors_of

SAVING = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def whole(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """What the uninterrupted run ended with, and its folder."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return uninterrupted(BUFFERED, model_path(**VARIANT), out), out


@pytest.fixture
def copied(whole: tuple[Ended, Path], tmp_path: Path) -> Callable[[int], Path]:
    """`copied(step)`: a checkpoint of that run, to be damaged."""

    def copy(step: int) -> Path:
        target = tmp_path / "copied" / f"checkpoint-{step}"
        shutil.copytree(whole[1] / target.name, target)
        return target

    return copy


# ---------------------------------------------------------------- whole or not at all


def test_a_full_disk_leaves_the_last_checkpoint(
    whole: tuple[Ended, Path], model_path: ModelPath, tmp_path: Path
) -> None:
    """Half of the optimizer's file is there when the disk is full. The error says so and what is
    left, the half is removed, and the run goes on from the checkpoint before."""
    path, out = model_path(**VARIANT), tmp_path / "run"
    with (
        interrupted_write("optimizer.pt", disk_full, nth=3),
        pytest.raises(CheckpointError) as raised,
    ):
        uninterrupted(BUFFERED, path, out)
    message = str(raised.value)
    assert "rank 0: OSError: [Errno 28] No space left on device" in message
    assert f"{out}/_unfinished/checkpoint-3" in message
    assert f"The last complete checkpoint is {out}/checkpoint-2" in message
    assert contents(out) == ["checkpoint-1", "checkpoint-2"]
    outcome = train(BUFFERED, path, out, longstraw=True, resume_from_checkpoint=True)
    assert not whole[0].differences(Ended.of(outcome))


def test_a_full_disk_before_any_checkpoint_says_that_there_is_none(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """The model's own file, written by another library."""
    trainer = make_trainer(BUFFERED.but(**SAVING), model_path(**VARIANT), tmp_path, longstraw=True)
    trainer.model.save_pretrained = lambda *args, **kwargs: disk_full()
    with pytest.raises(CheckpointError, match="no complete checkpoint before it"):
        trainer.train()
    assert contents(tmp_path) == []


def test_a_terminated_save_leaves_the_last_checkpoint(
    whole: tuple[Ended, Path], model_path: ModelPath, tmp_path: Path
) -> None:
    """SIGTERM in the middle of a file. What is left does not bear a checkpoint's name, is not
    found, and is removed by the next save."""
    path, out = model_path(**VARIANT), tmp_path / "run"
    arguments = ["-m", "tests.trl.resuming", "terminated", str(path), str(tmp_path)]
    with pytest.raises(RanksError, match="rank 0 of 1 failed"):
        run_ranks(arguments, 1, tmp_path / "logs", timeout=300)
    assert contents(out) == ["_unfinished", "checkpoint-1", "checkpoint-2"]
    assert (out / "_unfinished" / "checkpoint-3" / "optimizer.pt").exists()
    assert get_last_checkpoint(str(out)) == f"{out}/checkpoint-2"
    outcome = train(
        BUFFERED.but(save_strategy="steps", save_steps=4),
        path,
        out,
        longstraw=True,
        resume_from_checkpoint=True,
    )
    assert not whole[0].differences(Ended.of(outcome))
    assert "_unfinished" not in contents(out)


def test_a_checkpoint_of_the_same_step_is_replaced(model_path: ModelPath, tmp_path: Path) -> None:
    """A run begun anew in the same folder; nothing of the old checkpoint stays."""
    setting = BUFFERED.but(**SAVING, max_steps=1)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "of the earlier run").touch()
    train(setting, model_path(**VARIANT), tmp_path, longstraw=True)
    assert contents(tmp_path) == ["checkpoint-1"]
    assert not (tmp_path / "checkpoint-1" / "of the earlier run").exists()


class OnSave(TrainerCallback):
    """Looks at the checkpoint as a callback that uploads it would."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[str]]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        json.loads((folder / "trainer_state.json").read_text())
        self.seen.append((state.global_step, contents(Path(args.output_dir))))


def test_rotation_callbacks_and_the_best_model_see_the_final_name(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 is the best: it outlives rotation, is what the state file names, and is loaded at the
    end, after which the trainer evaluates with those weights."""
    pushed = []

    def push(self: Any, checkpoint_folder: str) -> None:
        pushed.append((checkpoint_folder, os.path.isdir(checkpoint_folder)))

    monkeypatch.setattr(GRPOTrainer, "_push_from_checkpoint", push)
    watch = OnSave()
    setting = replace(
        BUFFERED,
        trainer=lambda: {
            "eval_dataset": prompts_dataset((4,), seed=9),
            "callbacks": [watch],
        },
    ).but(
        **SAVING,
        max_steps=4,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
    )
    trainer = make_trainer(setting, model_path(**VARIANT), tmp_path, longstraw=True)
    trainer.args.push_to_hub = True
    evaluate = trainer.evaluate
    monkeypatch.setattr(
        trainer,
        "evaluate",
        lambda *args, **kwargs: (
            evaluate(*args, **kwargs)
            | {"eval_score": 1.0 if trainer.state.global_step == 2 else 0.0}
        ),
    )
    weights = {}
    trainer.add_callback(_Weights(weights))
    trainer.train()
    best = f"{tmp_path}/checkpoint-2"
    assert trainer.state.best_model_checkpoint == best
    assert watch.seen == [
        (1, ["checkpoint-1"]),
        (2, ["checkpoint-1", "checkpoint-2"]),
        (3, ["checkpoint-2", "checkpoint-3"]),
        (4, ["checkpoint-2", "checkpoint-4"]),
    ]
    assert pushed == [(f"{tmp_path}/checkpoint-{step}", True) for step in range(1, 5)]
    for step in (2, 4):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert (state["best_model_checkpoint"], state["best_global_step"]) == (best, 2)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, weights[2][name])
    assert trainer.evaluate()["eval_reward"] is not None


class _Weights(TrainerCallback):
    """Keeps the parameters of each step."""

    def __init__(self, kept: dict[int, dict[str, torch.Tensor]]) -> None:
        self.kept = kept

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        named = model.named_parameters()
        self.kept[state.global_step] = {name: p.detach().clone() for name, p in named}


def test_deepspeeds_writer_keeps_its_error_and_gets_its_method_back(tmp_path: Path) -> None:
    """Its ranks wait for each other after the file that could not be written."""

    class Writer:
        def save(self, state_dict: Any, path: str) -> None:
            Path(path).touch()
            if state_dict == "too much":
                disk_full()

    engine, writer = Writer(), CheckpointWriter(str(tmp_path), 1, 0, is_owner=True)
    with keeping_errors_of(engine, writer):
        engine.save("little", path=str(tmp_path / "a"))
        assert writer.error is None
        engine.save("too much", path=str(tmp_path / "b"))
    assert isinstance(writer.error, OSError)
    assert contents(tmp_path) == ["a"]
    with pytest.raises(OSError):
        engine.save("too much", path=str(tmp_path / "b"))


# ---------------------------------------------------------------- what cannot be resumed from


def refusal(setting: Setting, path: Path, out: Path, checkpoint: Any) -> str:
    """The message of the `ConfigError` that resuming raises."""
    trainer = make_trainer(setting, path, out, longstraw=True)
    with pytest.raises(ConfigError) as raised:
        trainer.train(resume_from_checkpoint=checkpoint)
    return str(raised.value)


def test_no_checkpoint_and_no_such_folder_are_named(model_path: ModelPath, tmp_path: Path) -> None:
    """`Trainer` raises for the first one only, and for the second from inside a loader."""
    path, out = model_path(**VARIANT), tmp_path / "run"
    message = refusal(BUFFERED, path, out, True)
    assert f"output_dir='{out}' holds no complete checkpoint" in message
    (out / "checkpoint-3").mkdir(parents=True)
    assert "(checkpoint-3: incomplete)" in refusal(BUFFERED, path, out, True)
    message = refusal(BUFFERED, path, out, str(out / "checkpoint-30"))
    assert "checkpoint-30' is not a folder" in message and "holds checkpoint-3)" in message


def test_the_newest_complete_checkpoint_is_taken(model_path: ModelPath, tmp_path: Path) -> None:
    """Another trainer may have left a later one half-written."""
    setting, path = BUFFERED.but(**SAVING, max_steps=2), model_path(**VARIANT)
    train(setting, path, tmp_path, longstraw=True)
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "model.safetensors").touch()
    longer = BUFFERED.but(max_steps=3)
    outcome = train(longer, path, tmp_path, longstraw=True, resume_from_checkpoint=True)
    assert outcome.trainer._initial_global_step == 2


def remove_optimizer(checkpoint: Path) -> None:
    (checkpoint / "optimizer.pt").unlink()


def cut_scheduler(checkpoint: Path) -> None:
    os.truncate(checkpoint / "scheduler.pt", 100)


def remove_state(checkpoint: Path) -> None:
    (checkpoint / "trainer_state.json").unlink()


def mark_unfinished(checkpoint: Path) -> None:
    (checkpoint / "checkpoint-is-incomplete.txt").touch()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (remove_optimizer, "optimizer.pt is missing"),
        (cut_scheduler, "scheduler.pt is cut short"),
        (remove_state, "trainer_state.json is missing"),
        (mark_unfinished, "checkpoint-is-incomplete.txt says"),
    ],
)
def test_an_incomplete_checkpoint_is_refused(
    damage: Callable[[Path], None],
    problem: str,
    copied: Callable[[int], Path],
    model_path: ModelPath,
    tmp_path: Path,
) -> None:
    """`Trainer` begins with a new optimizer, silently, where its file is missing."""
    checkpoint = copied(4)
    damage(checkpoint)
    message = refusal(BUFFERED, model_path(**VARIANT), tmp_path / "run", str(checkpoint))
    assert problem in message and f"model_name_or_path='{checkpoint}'" in message


def test_other_batches_are_refused(
    whole: tuple[Ended, Path], model_path: ModelPath, tmp_path: Path
) -> None:
    """The completions in use would be cut otherwise."""
    checkpoint = whole[1] / "checkpoint-3"
    message = refusal(
        BUFFERED.but(num_iterations=1), model_path(**VARIANT), tmp_path, str(checkpoint)
    )
    assert "was written with num_iterations=2, and this run has num_iterations=1" in message
