"""The parts of TRL that the trainer leans on are there, and a missing one is named."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from longstraw import ConfigError
from tests.trl.parity import (
    BASE,
    TWO_LAYERS,
    ModelPath,
    Setting,
    load_model,
    make_trainer,
    modular_reward,
    prompts_dataset,
    word_tokenizer,
)
from trl_integration import LongStrawGRPOConfig, LongStrawGRPOTrainer
from trl_integration.seams import check_seams, shuffle_groups, whole_groups


def test_the_installed_trl_has_every_seam() -> None:
    """A failure means that TRL was upgraded past what this release was written for."""
    check_seams()


@pytest.mark.parametrize(
    "method",
    [
        "compute_loss",
        "_compute_loss",
        "_get_per_token_logps_and_entropies",
        "_prepare_inputs",
        "_tokenize_prompts",
        "_generate_single_turn",
        "prediction_step",
        "_save_checkpoint",
        "_get_output_dir",
        "_load_rng_state",
    ],
)
def test_a_missing_method_is_named(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed or renamed: TRL would then run its own, and the engine nothing."""
    owners = [c for c in GRPOTrainer.__mro__ if method in vars(c)]
    for owner in owners:
        monkeypatch.delattr(owner, method)
    with pytest.raises(ConfigError, match=rf"{method}.*pip install 'trl==") as raised:
        check_seams()
    assert "gone" in str(raised.value) or "does not call" in str(raised.value)


def test_a_renamed_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer passes some by name; TRL would raise in the middle of a run, or ignore them."""

    def renamed(self: Any, generated_batch: Any) -> Any: ...

    monkeypatch.setattr(GRPOTrainer, "_prepare_inputs", renamed)
    with pytest.raises(ConfigError, match=r"_prepare_inputs has no parameter 'generation_batch'"):
        check_seams()


@pytest.mark.parametrize(
    "function",
    ["shuffle_sequence_dict", "unwrap_model_for_generation", "gather", "gather_object"],
)
def test_a_missing_function_is_named(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(grpo_trainer, function)
    with pytest.raises(ConfigError, match=rf"grpo_trainer\.{function} is gone"):
        check_seams()


def test_a_loss_that_takes_log_probs_from_elsewhere_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient would be that of other log-probs than the replayed ones."""

    def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
        return model(**inputs).loss

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", _compute_loss)
    with pytest.raises(ConfigError, match="does not call _get_per_token_logps_and_entropies"):
        check_seams()


def test_a_rollout_that_returns_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share prompts get its results from the one that ran it, field by field."""

    def _generate(self: Any, prompts: Any) -> Any:
        completion_ids, prompt_ids = self.turn(prompts)
        return completion_ids, prompt_ids

    monkeypatch.setattr(GRPOTrainer, "_generate", _generate)
    with pytest.raises(ConfigError, match=r"_generate returns \('completion_ids', 'prompt_ids'\)"):
        check_seams()


def test_several_problems_come_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that who upgrades sees the whole distance."""
    monkeypatch.delattr(grpo_trainer, "shuffle_sequence_dict")
    monkeypatch.delattr(GRPOTrainer, "_tokenize_prompts")
    with pytest.raises(ConfigError, match=r"_tokenize_prompts.*shuffle_sequence_dict"):
        check_seams()


def test_a_trainer_is_not_made_on_an_unknown_trl(
    monkeypatch: pytest.MonkeyPatch, model_path: ModelPath, tmp_path: Any
) -> None:
    """The check runs where the mistake would enter, before anything is loaded."""
    monkeypatch.delattr(GRPOTrainer, "_tokenize_prompts")
    with pytest.raises(ConfigError, match="_tokenize_prompts"):
        make_trainer(Setting(), model_path(), tmp_path, longstraw=True)


def test_arguments_are_taken_in_trls_order(model_path: ModelPath, tmp_path: Any) -> None:
    """A script that names none of them changes the class and no more."""
    callback = TrainerCallback()
    trainer = LongStrawGRPOTrainer(
        load_model(model_path(**TWO_LAYERS)),
        [modular_reward],
        LongStrawGRPOConfig(str(tmp_path), **BASE),
        prompts_dataset(),
        prompts_dataset((4,)),
        word_tokenizer(),
        [None],
        [callback],
    )
    assert trainer.eval_dataset is not None
    assert callback in trainer.callback_handler.callbacks


# ---------------------------------------------------------------- the shuffle that is replaced


def batch_of(num_groups: int, group_size: int) -> dict[str, Any]:
    rows = torch.arange(num_groups * group_size)
    return {
        "prompt_ids": rows.unsqueeze(1),
        "images": [f"row {i}" for i in rows.tolist()],
        "num_items_in_batch": torch.tensor(7),
        "pixel_values": None,
    }


def test_groups_are_shuffled_whole_and_every_column_alike() -> None:
    """Members keep their order, no row is lost, and what is not a sequence is left alone."""
    torch.manual_seed(1)
    out = shuffle_groups(batch_of(5, 3), 3)
    rows = out["prompt_ids"].flatten()
    assert rows.sort().values.tolist() == list(range(15))
    groups = rows.view(5, 3)
    assert (groups[:, 0] % 3 == 0).all()
    assert (groups.diff(dim=1) == 1).all()
    assert groups[:, 0].tolist() != [0, 3, 6, 9, 12], "nothing was shuffled"
    assert out["images"] == [f"row {i}" for i in rows.tolist()]
    assert out["num_items_in_batch"] == 7 and out["pixel_values"] is None


def test_the_shuffle_takes_what_trls_takes() -> None:
    """It stands in for TRL's function, in TRL's module."""
    own: Callable[..., Any] = grpo_trainer.shuffle_sequence_dict
    with whole_groups(3):
        put_in: Callable[..., Any] = grpo_trainer.shuffle_sequence_dict
        assert put_in is not own
        assert len(inspect.signature(put_in).parameters) == len(inspect.signature(own).parameters)
        assert put_in(batch_of(2, 3)).keys() == own(batch_of(2, 3)).keys()
    assert grpo_trainer.shuffle_sequence_dict is own


def test_trls_shuffle_is_put_back_after_an_error() -> None:
    """Another trainer in the same process must find TRL as it was."""
    own = grpo_trainer.shuffle_sequence_dict
    with pytest.raises(RuntimeError, match="in between"), whole_groups(2):
        raise RuntimeError("in between")
    assert grpo_trainer.shuffle_sequence_dict is own
