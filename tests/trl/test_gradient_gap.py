"""`longstraw_prompt_gradient="stopped"`: what it is, that it is not TRL's, and how far it is off.

Learning rate 0 and no clipping, so that each step's gradient is that of the same weights, whatever
an earlier step did.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.marks import slow_but
from tests.trl.parity import TOLERANCE, ModelPath, Outcome, Setting, train

Gradients = dict[str, Tensor]


class KeepGradients(TrainerCallback):
    """Copies every gradient just before the optimizer's step."""

    def __init__(self) -> None:
        self.steps: list[Gradients] = []

    def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self.steps.append(
            {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        )


def gradients(
    setting: Setting, model_path: ModelPath, tmp_path: Path, *, longstraw: bool, **options: Any
) -> tuple[list[Gradients], Outcome]:
    """Each step's gradients, with `longstraw_*` options."""
    keep = KeepGradients()
    make = setting.trainer
    setting = Setting(
        config={"learning_rate": 0.0, "max_grad_norm": 0.0, "max_steps": 3, **setting.config},
        longstraw={f"longstraw_{name}": value for name, value in options.items()},
        trainer=lambda: {**make(), "callbacks": [keep]},
        prepare=setting.prepare,
    )
    path = model_path(setting.family, **setting.variant)
    outcome = train(setting, path, tmp_path, longstraw=longstraw)
    return keep.steps, outcome


def flat(step: Gradients) -> Tensor:
    return torch.cat([grad.flatten() for grad in step.values()]).double()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def hold_prompt_constant(trainer: GRPOTrainer) -> None:
    """Make stock TRL's loss hold constant the keys and values of all prompt tokens but the last.

    The last one is run with the response, whose first token it predicts.
    """
    num_constant = 0
    compute_loss = trainer._compute_loss

    def watched(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        nonlocal num_constant
        num_constant = inputs["prompt_ids"].shape[1] - 1
        try:
            return compute_loss(model, inputs)
        finally:
            num_constant = 0

    def hold(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return torch.cat([output[:, :num_constant].detach(), output[:, num_constant:]], dim=1)

    trainer._compute_loss = watched
    for name, module in trainer.model.named_modules():
        if name.endswith(("k_proj", "v_proj")):
            module.register_forward_hook(hold)


SETTINGS = {
    "all weights": Setting(),
    "accumulation 2, KL": Setting(
        config={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "beta": 0.2}
    ),
    "LoRA": Setting(
        trainer=lambda: {"peft_config": LoraConfig(r=4, target_modules="all-linear",
                                                   init_lora_weights=False)}
    ),
}  # fmt: skip


def test_stopped_is_stock_trl_with_the_prompts_state_held_constant(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """Against stock TRL with detached keys and values at prompt positions; fp32, one step each."""
    setting = Setting(prepare=hold_prompt_constant)
    stock, _ = gradients(setting, model_path, tmp_path, longstraw=False)
    ours, _ = gradients(Setting(), model_path, tmp_path, longstraw=True, prompt_gradient="stopped")
    for theirs, mine in zip(stock, ours, strict=True):
        for name in theirs:
            assert relative(mine[name], theirs[name]) <= TOLERANCE, name


def test_stopped_is_another_gradient_than_stock_trls(model_path: ModelPath, tmp_path: Path) -> None:
    """By a tenth and more on a random model; "exact" is equal. The log says so without being asked.

    What is called "stopped" must never be mistaken for a cheaper way to the same result.
    """
    stock, _ = gradients(Setting(), model_path, tmp_path, longstraw=False)
    exact, _ = gradients(Setting(), model_path, tmp_path, longstraw=True)
    stopped, outcome = gradients(
        Setting(), model_path, tmp_path, longstraw=True, prompt_gradient="stopped"
    )
    gaps = [relative(flat(a), flat(b)) for a, b in zip(stopped, stock, strict=True)]
    assert max(gaps) > 0.1
    for a, b in zip(exact, stock, strict=True):
        assert relative(flat(a), flat(b)) <= 1e-5
    phases = {record["phase"] for record in outcome.trainer.engine.ledger.table()}
    assert "prompt_backward" not in phases


@pytest.mark.parametrize(
    ("name", "mode"),
    slow_but(
        [("accumulation 2, KL", "exact")],
        product(SETTINGS, ["exact", "stopped"]),
    ),
)
def test_the_logged_gap_is_that_of_two_runs(
    name: str, mode: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """Relative gap and cosine against those of an exact and a stopped run, to 1e-5.

    The gradients' own rounding is 1e-6 of them; the gap is of the order of 0.1 to 1. Measuring it
    changes the gradient in neither mode.
    """
    setting = SETTINGS[name]
    exact, _ = gradients(setting, model_path, tmp_path, longstraw=True)
    stopped, _ = gradients(setting, model_path, tmp_path, longstraw=True, prompt_gradient="stopped")
    measured, outcome = gradients(
        setting,
        model_path,
        tmp_path,
        longstraw=True,
        prompt_gradient=mode,
        log_gradient_gap=True,
    )
    for plain, step in zip(exact if mode == "exact" else stopped, measured, strict=True):
        assert relative(flat(step), flat(plain)) <= 1e-6
    pairs = [(flat(a), flat(b)) for a, b in zip(exact, stopped, strict=True)]
    assert outcome.logged("longstraw/gradient_gap") == pytest.approx(
        [relative(b, a) for a, b in pairs], abs=1e-5
    )
    assert outcome.logged("longstraw/gradient_cosine") == pytest.approx(
        [float(a @ b / (a.norm() * b.norm())) for a, b in pairs], abs=1e-5
    )
    assert max(outcome.logged("longstraw/gradient_gap")) > 0.1
