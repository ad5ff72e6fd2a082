"""A resumed run is the uninterrupted one to the last bit; a checkpoint is complete or not there.

fp32 on one thread: the same operations in the same order. Nothing here has a tolerance, so a
failure means that some state was not saved, or was restored too early or too late.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.marks import slow_but
from tests.trl.parity import ModelPath, Setting, prompts_dataset, train
from tests.trl.resuming import (
    ACCUMULATED,
    BUFFERED,
    LORA,
    VARIANT,
    Ended,
    resumed,
    uninterrupted,
)

SAVING = {"save_strategy": "steps", "save_steps": 1}
Runs = Callable[[str], tuple[Ended, Path]]
"""The fixture `runs`."""

SETTINGS: dict[str, tuple[Setting, tuple[int, ...]]] = {
    # Every step but the last: within the first and the second use of a generation, between two
    # generations (8), with and without a log right before. `IN_SHORT` has one of each.
    "a generation for 8 steps": (BUFFERED, tuple(range(1, 11))),
    "accumulation 2": (ACCUMULATED, (1, 3, 4)),
    "LoRA": (LORA, (3,)),
    # 4 steps are one pass over the data; each pass is another permutation.
    "several passes over the data": (
        replace(BUFFERED, dataset=lambda: prompts_dataset((7, 12, 23, 17))).but(
            per_device_train_batch_size=4, steps_per_generation=1, num_iterations=1, max_steps=9
        ),
        (3, 4, 6),
    ),
    "stream": (
        replace(BUFFERED, dataset=lambda: prompts_dataset().to_iterable_dataset()),
        (3, 8),
    ),
    # The reference moves toward the policy after every second step.
    "reference that moves": (
        BUFFERED.but(
            beta=0.3, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5
        ),
        (3,),
    ),
    # Its coefficient changes with every step, and evaluation samples in between.
    "adaptive entropy, evaluation": (
        replace(BUFFERED, trainer=lambda: {"eval_dataset": prompts_dataset((4, 19), seed=9)}).but(
            use_adaptive_entropy=True,
            entropy_coef=0.3,
            entropy_target=9.0,
            eval_strategy="steps",
            eval_steps=4,
            per_device_eval_batch_size=4,
        ),
        (3,),
    ),
}


IN_SHORT = [
    *(("a generation for 8 steps", step) for step in (3, 6, 8)),
    ("accumulation 2", 3),
    ("LoRA", 3),
    ("several passes over the data", 6),
    ("stream", 3),
    ("reference that moves", 3),
    ("adaptive entropy, evaluation", 3),
]


@pytest.fixture(scope="module")
def runs(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`runs(name)`: what the uninterrupted run of a setting ended with, and its folder."""
    done: dict[str, tuple[Ended, Path]] = {}

    def run(name: str) -> tuple[Ended, Path]:
        if name not in done:
            out = tmp_path_factory.mktemp("whole") / "run"
            done[name] = uninterrupted(SETTINGS[name][0], model_path(**VARIANT), out), out
        return done[name]

    return run


@pytest.fixture
def copied(runs: Runs, tmp_path: Path) -> Callable[[int], Path]:
    """`copied(step)`: a checkpoint of the first setting, to be damaged."""

    def copy(step: int) -> Path:
        target = tmp_path / "copied" / f"checkpoint-{step}"
        shutil.copytree(runs("a generation for 8 steps")[1] / target.name, target)
        return target

    return copy


# ---------------------------------------------------------------- bit for bit


@pytest.mark.parametrize(
    ("name", "step"),
    slow_but(IN_SHORT, [(name, step) for name, (_, steps) in SETTINGS.items() for step in steps]),
)
def test_a_resumed_run_is_the_uninterrupted_one(
    name: str, step: int, runs: Runs, model_path: ModelPath
) -> None:
    """Parameters, optimizer, scheduler, random states and every logged number but times."""
    whole, out = runs(name)
    again = resumed(SETTINGS[name][0], model_path(**VARIANT), out / f"checkpoint-{step}")
    assert not whole.differences(again)


def test_a_run_may_be_interrupted_twice(runs: Runs, model_path: ModelPath, tmp_path: Path) -> None:
    """What was restored is saved again, also within the same generation's use."""
    whole, out = runs("a generation for 8 steps")
    path = model_path(**VARIANT)
    first = BUFFERED.but(**SAVING)
    train(
        first,
        path,
        tmp_path / "b",
        longstraw=True,
        resume_from_checkpoint=str(out / "checkpoint-2"),
    )
    again = resumed(BUFFERED, path, tmp_path / "b" / "checkpoint-5")
    assert not whole.differences(again)


def test_without_the_saved_state_the_continuation_differs(
    copied: Callable[[int], Path],
    runs: Runs,
    model_path: ModelPath,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The planted mistake: what TRL saves is not enough within a generation's use, and the trainer
    says so."""
    checkpoint = copied(3)
    (checkpoint / "longstraw_state_0.pt").unlink()
    with caplog.at_level(logging.WARNING):
        again = resumed(BUFFERED, model_path(**VARIANT), checkpoint)
    differing = runs("a generation for 8 steps")[0].differences(again)
    assert "model.layers.0.self_attn.q_proj.weight" in differing
    assert "New ones are sampled from the weights of the checkpoint" in caplog.text


def test_a_checkpoint_of_stock_trl_between_generations_is_resumed_from(
    model_path: ModelPath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that matters is missing from it, so nothing is said."""
    setting, path = BUFFERED.but(max_steps=9, logging_steps=1), model_path(**VARIANT)
    train(setting.but(save_strategy="steps", save_steps=8), path, tmp_path / "a", longstraw=False)
    with caplog.at_level(logging.WARNING):
        again = resumed(setting, path, tmp_path / "a" / "checkpoint-8")
    assert {f"step {step} loss" for step in range(1, 10)} <= again.values.keys()
    assert "New ones are sampled" not in caplog.text


def test_the_permutation_of_a_later_pass_is_not_the_first_one_again(
    runs: Runs, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Trainer` makes a new sampler when it resumes, and that one starts with the first pass's
    order. Told apart by leaving out what moves it on."""
    name = "several passes over the data"
    whole, out = runs(name)
    monkeypatch.setattr(
        "trl_integration.resumable.ResumableGRPOTrainer._get_train_sampler",
        GRPOTrainer._get_train_sampler,
    )
    again = resumed(SETTINGS[name][0], model_path(**VARIANT), out / "checkpoint-6")
    assert "step 9 loss" in whole.differences(again)


def test_a_stream_in_its_second_pass_says_what_differs(
    model_path: ModelPath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`Trainer` finds the place in a stream by reading as many rows of its first pass as were
    used. One generation is one pass here."""
    setting = replace(BUFFERED, dataset=lambda: prompts_dataset((7, 12)).to_iterable_dataset()).but(
        max_steps=10
    )
    uninterrupted(setting, model_path(**VARIANT), tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        resumed(setting, model_path(**VARIANT), tmp_path / "run" / "checkpoint-8")
        assert "begins that pass anew" not in caplog.text
        resumed(setting, model_path(**VARIANT), tmp_path / "run" / "checkpoint-9")
        assert "pass 2 over it: the resumed run begins that pass anew" in caplog.text


def test_completions_are_saved_only_while_they_are_in_use(runs: Runs) -> None:
    """Step 8 is right before a generation. At step 3 slices 0 to 2 are needed again in the second
    use; at step 6 only slices 2 and 3 are left."""
    out = runs("a generation for 8 steps")[1]

    def slices(step: int) -> Any:
        file = out / f"checkpoint-{step}" / "longstraw_state_0.pt"
        return torch.load(file, weights_only=True)["completions"]

    assert slices(8) is None
    assert [part is not None for part in slices(3)] == [True] * 4
    assert [part is not None for part in slices(6)] == [False, False, True, True]
    prompts = slices(3)[0]["items"]["prompt_ids"]
    assert len(prompts["rows"]) == 1 and prompts["counts"].tolist() == [2]


def test_printed_completions_are_there_after_resuming(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """With `log_completions` TRL writes the table of the last generation at each log, also where
    the run was resumed after that generation."""
    setting, path = BUFFERED.but(log_completions=True, max_steps=6), model_path(**VARIANT)
    uninterrupted(setting, path, tmp_path / "run")
    resumed(setting, path, tmp_path / "run" / "checkpoint-4")
    table = Path("completions", "completions_00006.parquet")
    whole, again = (tmp_path / name / table for name in ("run", "resumed"))
    import pandas

    assert pandas.read_parquet(whole).equals(pandas.read_parquet(again))


def test_a_finished_run_is_not_made_longer(
    runs: Runs, model_path: ModelPath, tmp_path: Path
) -> None:
    """A job that is started again after its end trains nothing; `Trainer` alone makes one step more
    each time."""
    whole, out = runs("a generation for 8 steps")
    outcome = train(
        BUFFERED,
        model_path(**VARIANT),
        tmp_path,
        longstraw=True,
        resume_from_checkpoint=str(out / "checkpoint-11"),
    )
    assert outcome.trainer.state.global_step == 11
    for name, parameter in outcome.after.items():
        assert torch.equal(parameter, whole.tensors[name])
