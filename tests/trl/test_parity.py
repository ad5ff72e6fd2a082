"""Training with LongStraw gives what training with stock TRL gives: parameters and all metrics.

Both trainers get the same model, prompts and completions and make five optimizer steps. Then, per
parameter, |ours - stock| is at most 1e-4 of how far stock TRL moved it, and every number that stock
TRL logs is logged here and equal to 1e-4. The tolerance is that of fp32: gradients of one step
agree to about 1e-6 (the same sums in another order), and five steps and the optimizer amplify that
to 1e-5 on these well-conditioned models. A mistake (a wrong scale, a lost part of the gradient, a
row too many) is of the order of 1.

Each combination also shows that its option matters: stock TRL without the option ends elsewhere.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.marks import slow_but
from tests.trl.combinations import COMBINATIONS
from tests.trl.parity import (
    ADAMW,
    FIRST_WORD,
    TOLERANCE,
    TWO_LAYERS,
    ModelPath,
    Outcome,
    Setting,
    assert_same_training,
    make_trainer,
    train,
    worst_metric,
    worst_parameter,
)

# An option counts as having an effect if it changes where stock TRL ends by more than this,
# relative to the movement of the parameter it changes most: 100 times what is accepted as equal.
EFFECT = 1e-2

StockOf = Callable[[Setting], Outcome]
"""The fixture `stock_of`."""


# ---------------------------------------------------------------- the losses

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


# Completions are used twice, so that ratios leave 1 and clipping, gates and weights act; and a
# group comes in two micro-batches of different lengths, so that normalizers differ.
LOSS_OPTIONS = {
    "num_iterations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
}


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_trains_as_in_stock_trl(
    loss_type: str, optimizer: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """The loss is TRL's own code; what is shown is that its gradient reaches every parameter."""
    setting = Setting(config={**LOSS_OPTIONS, "loss_type": loss_type})
    if optimizer == "adamw":
        setting = setting.but(**ADAMW)
    assert_same_training(f"{loss_type}, {optimizer}", setting, model_path, tmp_path)


def test_the_losses_compared_above_differ(model_path: ModelPath, tmp_path: Path) -> None:
    """Otherwise equality would say little: under some settings all clipped losses are one.

    Each pair of losses ends with a parameter at least 1e-2 of its movement apart in stock TRL, 100
    times what is accepted as equal.
    """
    stock = [
        train(
            Setting(config={**LOSS_OPTIONS, "loss_type": loss_type}),
            model_path(**TWO_LAYERS),
            tmp_path,
            longstraw=False,
        )
        for loss_type in LOSS_TYPES
    ]
    for a, b in itertools.combinations(stock, 2):
        assert worst_parameter(a.after, b)[0] > EFFECT
    assert 0.05 < max(stock[0].logged("clip_ratio/region_mean")) < 0.95


# ---------------------------------------------------------------- options


# One or more of each kind.
IN_SHORT = (
    "beta, reference model, adamw",
    "LoRA, gradient checkpointing",
    "steps_per_generation 4, accumulation 2, grpo",
    "a group cut by an optimizer step",
    "prompts that differ within a group",
    "normalize_then_sum",
    "updates without any advantage, LoRA, accumulation 2, adamw",
    "entropy bonus, adaptive, accumulation 2",
    "top_entropy_quantile, first tokens left out",
    "environment mask, truncated completions masked, beta",
    "temperature, beta, entropy bonus",
    "qwen3_moe, auxiliary loss",
    "tied embeddings, cast_lm_head_to_fp32",
    "gemma2, softcap and sliding window",
    "qwen3_5, LoRA, adamw",
    "replay_batch 3, LoRA, beta, accumulation 2",
    "a state budget",
    "evaluation between steps of one generation, auxiliary loss",
    "an optimizer that writes past autograd",
)


@pytest.fixture(scope="module")
def stock_of(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> StockOf:
    """`stock_of(setting)`: what stock TRL does, trained once for all who ask with this object."""
    found: dict[int, Outcome] = {}

    def run(setting: Setting) -> Outcome:
        if id(setting) not in found:
            path = model_path(setting.family, **setting.variant)
            out = tmp_path_factory.mktemp("stock")
            found[id(setting)] = train(setting, path, out, longstraw=False)
        return found[id(setting)]

    return run


@pytest.mark.parametrize("name", slow_but(IN_SHORT, COMBINATIONS))
def test_options_train_as_in_stock_trl(
    name: str, model_path: ModelPath, stock_of: StockOf, tmp_path: Path
) -> None:
    """See the module's docstring for the tolerance.

    A failure in parameters and not in metrics means that the gradient is another than that of the
    logged loss.
    """
    combination = COMBINATIONS[name]
    stock, _ = assert_same_training(name, combination.setting, model_path, tmp_path)
    if combination.without is not None:
        without = stock_of(combination.without)
        assert worst_parameter(without.after, stock)[0] > EFFECT


def test_learned_positions_are_counted_from_the_prompts_first_token(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """gpt2 with prompts of 4 and 11 tokens: each as stock TRL scores it on its own.

    In one batch stock TRL left-pads the shorter prompt and numbers its positions from the padding,
    so that they depend on the other prompt. Rotary models only see differences of positions. This
    is the one place where LongStraw's numbers are not stock TRL's, and why.
    """
    lengths, width = (4, 11), 6
    ids = torch.zeros(2, max(lengths) + width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length - width :] = torch.arange(FIRST_WORD, FIRST_WORD + length + width)

    def log_probs(rows: slice, *, longstraw: bool) -> torch.Tensor:
        trainer = make_trainer(
            Setting("gpt2", {}), model_path("gpt2"), tmp_path, longstraw=longstraw
        )
        skip = 0 if rows.stop - rows.start > 1 else max(lengths) - lengths[rows.start]
        part = ids[rows, skip:]
        with torch.no_grad():
            logps, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, part, (part != 0).long(), width
            )
        return logps

    alone = torch.cat([log_probs(slice(row, row + 1), longstraw=False) for row in (0, 1)])
    torch.testing.assert_close(log_probs(slice(0, 2), longstraw=True), alone, rtol=0, atol=1e-5)
    together = log_probs(slice(0, 2), longstraw=False)
    torch.testing.assert_close(together[1], alone[1], rtol=0, atol=1e-5)
    assert (together[0] - alone[0]).abs().max() > 0.1


def test_cast_lm_head_to_fp32_holds_under_mixed_precision(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """Log-probs against stock TRL's under bf16 autocast, to 1e-5.

    The model's only layer adds nothing (its output projections are zero), so hidden states are
    exact in bf16 too and the head is all that rounds. Its logits in bf16 would be off by 1e-2.
    """

    def without_its_layer(model: PreTrainedModel) -> PreTrainedModel:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    parameter.zero_()
        return model

    def log_probs(*, longstraw: bool, cast: bool) -> torch.Tensor:
        setting = Setting(
            variant={"num_hidden_layers": 1},
            wrap_model=without_its_layer,
            config={"bf16": True, "cast_lm_head_to_fp32": cast},
        )
        path = model_path(**setting.variant)
        trainer = make_trainer(setting, path, tmp_path, longstraw=longstraw)
        ids = torch.arange(3, 23).expand(2, -1)
        with torch.no_grad():
            logps, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), 9
            )
        return logps

    stock = log_probs(longstraw=False, cast=True)
    torch.testing.assert_close(log_probs(longstraw=True, cast=True), stock, rtol=0, atol=1e-5)
    rounded = log_probs(longstraw=True, cast=False)
    assert (rounded - stock).abs().max() > 1e-3, "the option makes no difference here"


# ---------------------------------------------------------------- without a hand in stock TRL


@pytest.mark.parametrize("loss_type", slow_but(["dapo"], ["dapo", "dr_grpo", "cispo"]))
def test_moving_whole_groups_changes_no_gradient(
    loss_type: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """Stock TRL with its own shuffle, which scatters a group over micro-batches, ends the same.

    These losses are sums over all rows of an accumulation window, so it does not matter which rows
    meet in a micro-batch; stock TRL is not touched in this test. Logged means over micro-batches
    do depend on it and are not compared.
    """
    setting = Setting(
        config={
            "loss_type": loss_type,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
        }
    )
    path = model_path(setting.family, **setting.variant)
    stock = train(setting, path, tmp_path / "stock", longstraw=False, shuffle="rows")
    ours = train(setting, path, tmp_path / "ours", longstraw=True)
    assert worst_parameter(ours.after, stock)[0] <= TOLERANCE
    assert ours.logged("grad_norm") == pytest.approx(stock.logged("grad_norm"), rel=TOLERANCE)


def test_a_checkpoint_of_stock_trl_is_taken_up_as_by_stock_trl(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """Both resume from the checkpoint that stock TRL wrote after two of its five steps.

    AdamW, so that its state has to be loaded. The rollout function starts anew with each trainer.
    """
    setting = Setting(config={**ADAMW, "gradient_accumulation_steps": 2})
    path = model_path(setting.family, **setting.variant)
    saving = setting.but(max_steps=2, save_strategy="steps", save_steps=2)
    train(saving, path, tmp_path, longstraw=False)
    checkpoint = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    stock = train(setting, path, tmp_path / "stock", longstraw=False, **checkpoint)
    ours = train(setting, path, tmp_path / "ours", longstraw=True, **checkpoint)
    assert ours.trainer.state.global_step == 5
    assert worst_parameter(ours.after, stock)[0] <= TOLERANCE
    assert worst_metric(ours.logs, stock.logs)[0] <= TOLERANCE
