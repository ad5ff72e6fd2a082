"""`longstraw_prompt_refresh` in the trainer: captures, logs, the command line, and what is refused.

`tests/engine/test_prompt_refresh.py` compares what is trained with its definitions; here "never" is
compared once more with stock TRL, whose adapters a hook switches off in the prompt.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from trl import GRPOTrainer, ModelConfig, TrlParser

from longstraw import ConfigError
from tests.marks import slow_but
from tests.trl.ingredients import lora, some_tokens_only
from tests.trl.parity import (
    BASE,
    TOLERANCE,
    ModelPath,
    Outcome,
    Setting,
    fixed_rollout,
    make_trainer,
    prompts_dataset,
    train,
    worst_parameter,
)
from trl_integration import LongStrawGRPOConfig

NUM_STEPS = 8


def one_prompt() -> Dataset:
    return prompts_dataset((23,))


def setting(refresh: int | str, *, rollout: Any = None, **options: Any) -> Setting:
    """Eight steps on one prompt of several chunks, with an adapter; generation by the engine."""
    gradient = {} if refresh in ("never", "every_step") else {"prompt_gradient": "stopped"}
    longstraw = {"prompt_refresh": refresh, **gradient, **options}
    return Setting(
        config={"max_steps": NUM_STEPS, "learning_rate": 0.01},
        longstraw={f"longstraw_{name}": value for name, value in longstraw.items()},
        trainer=lora(),
        rollout=rollout,
        dataset=one_prompt,
    )


def trained(given: Setting, model_path: ModelPath, tmp_path: Path) -> Outcome:
    return train(given, model_path(given.family, **given.variant), tmp_path, longstraw=True)


# ---------------------------------------------------------------- what is logged


@pytest.mark.parametrize(
    ("refresh", "captures", "ages"),
    [
        pytest.param("every_step", [1, 2, 3, 4, 5, 6, 7, 8], [0] * 8, marks=pytest.mark.slow),
        ("4", [1, 1, 1, 1, 2, 2, 2, 2], [0, 1, 2, 3] * 2),
        ("never", [1] * 8, list(range(8))),
    ],
)
def test_captures_ages_and_drift_are_logged(
    refresh: str, captures: list[int], ages: list[int], model_path: ModelPath, tmp_path: Path
) -> None:
    """One prompt in eight steps, generation and update on one state. Drift is zero where the state
    is of the present weights; of "never" it is the adapter's part in the prompt from the start."""
    outcome = trained(setting(refresh, log_prompt_drift=True), model_path, tmp_path)
    assert outcome.logged("longstraw/captures") == captures
    assert outcome.logged("longstraw/prompt_age") == ages
    means, maxima, losses = (
        outcome.logged(f"longstraw/prompt_drift/{name}")
        for name in ("logps_mean", "logps_max", "loss")
    )
    for age, mean, largest, loss in zip(ages, means, maxima, losses, strict=True):
        is_fresh = refresh != "never" and age == 0
        assert (largest == 0) == is_fresh and 0 <= mean <= largest
        assert loss == 0 if is_fresh else loss != 0
    assert all(outcome.logged("longstraw/seconds/prompt_drift"))


def test_measuring_drift_leaves_no_trace_in_trls_metrics(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """The loss runs twice, and logs once. The adaptive entropy coefficient moves whenever a loss is
    evaluated: once too often shows in all that comes after."""
    entropy = {"use_adaptive_entropy": True, "entropy_target": 4.5, "entropy_coef": 0.1}
    runs = []
    for is_measured in (False, True):
        given = setting("never", rollout=fixed_rollout, log_prompt_drift=is_measured)
        given = given.but(**entropy, entropy_coef_delta=0.05, beta=0.1)
        runs.append(trained(given, model_path, tmp_path / str(is_measured)))
    without, measured = runs
    coefficients = measured.logged("entropy_coef")
    assert coefficients == pytest.approx([0.1 + 0.05 * step for step in range(1, NUM_STEPS + 1)])
    for log, other in zip(measured.logs, without.logs, strict=True):
        assert comparable(log) == comparable(other)
    assert all(torch.equal(p, without.after[name]) for name, p in measured.after.items())


def comparable(log: dict[str, float]) -> dict[str, float]:
    """What is logged of the training, without times, bytes and the drift itself."""
    others = ("runtime", "per_second", "step_time", "seconds", "_bytes", "prompt_drift")
    return {k: v for k, v in log.items() if not any(other in k for other in others)}


# ---------------------------------------------------------------- what is trained


def switch_adapters_off_in_prompts(trainer: GRPOTrainer) -> None:
    """Make stock TRL's loss multiply adapters by 0 at all columns before the last prompt token."""
    num_off = 0
    compute_loss = trainer._compute_loss

    def watched(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        nonlocal num_off
        num_off = inputs["prompt_ids"].shape[1] - 1
        try:
            return compute_loss(model, inputs)
        finally:
            num_off = 0

    def mask(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        is_on = torch.arange(output.shape[1]) >= num_off
        return output * is_on.to(output.dtype)[:, None]

    trainer._compute_loss = watched
    for name, module in trainer.model.named_modules():
        if ".lora_B." in name:
            module.register_forward_hook(mask)


@pytest.mark.parametrize("beta", slow_but([0.2], [0.0, 0.2]))
def test_never_is_stock_trl_with_the_adapter_off_in_the_prompt(
    beta: float, model_path: ModelPath, tmp_path: Path
) -> None:
    """Two micro-batches in each step, prompts of all lengths, and the reference policy, which TRL
    has run without the adapter at all and reads the same state."""
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    given = Setting(config={**batches, "beta": beta}, trainer=lora())
    path = model_path(given.family, **given.variant)
    masked = Setting(config=given.config, trainer=lora(), prepare=switch_adapters_off_in_prompts)
    stock = train(masked, path, tmp_path / "stock", longstraw=False)
    never = Setting(
        config=given.config, trainer=lora(), longstraw={"longstraw_prompt_refresh": "never"}
    )
    ours = train(never, path, tmp_path / "ours", longstraw=True)
    error, name = worst_parameter(ours.after, stock)
    assert error <= TOLERANCE, name
    unmasked = train(given, path, tmp_path / "unmasked", longstraw=False)
    assert worst_parameter(ours.after, unmasked)[0] > 0.1


def test_the_reference_policy_reads_the_same_state(model_path: ModelPath, tmp_path: Path) -> None:
    """TRL scores it with the adapter off: the state is the one that generation has captured."""
    outcome = trained(setting("never").but(beta=0.1), model_path, tmp_path)
    assert outcome.logged("longstraw/captures") == [1] * NUM_STEPS
    assert max(outcome.logged("kl")) > 0


def test_an_evaluation_in_between_costs_training_no_capture(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """Its own prompt is captured in each evaluation and freed."""
    given = setting("never").but(eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4)
    with_eval = Setting(
        **{
            **vars(given),
            "trainer": lambda: {**lora()(), "eval_dataset": prompts_dataset((9,), seed=5)},
        }
    )
    outcome = trained(with_eval, model_path, tmp_path)
    assert outcome.logged("longstraw/captures") == [1, 1, 2, 2, 3, 3, 4, 4]
    assert len(outcome.trainer.engine.captured.states()) == 1


# ---------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("given", "steps"), [("never", None), ("4", 4), ("every_step", 1), (None, 1)]
)
def test_the_command_line_takes_a_word_or_a_number(
    given: str | None, steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    words += ["--longstraw_prompt_gradient", "stopped", "--longstraw_log_prompt_drift"]
    words += [] if given is None else ["--longstraw_prompt_refresh", given]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    args, _ = TrlParser((LongStrawGRPOConfig, ModelConfig)).parse_args_and_config()
    engine = args.to_engine_config()
    assert engine.refresh_steps == steps and engine.log_prompt_drift


def test_a_yaml_file_takes_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("longstraw_prompt_refresh: 4\nlongstraw_prompt_gradient: stopped\n")
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--config", str(file)]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    args, _ = TrlParser((LongStrawGRPOConfig, ModelConfig)).parse_args_and_config()
    assert args.to_engine_config().refresh_steps == 4


# ---------------------------------------------------------------- what is refused


def assert_refused(words: str, make: Any) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    missing = [word for word in words.split("|") if not re.search(word, str(error.value))]
    assert not missing, f"{missing} not in: {error.value}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"longstraw_prompt_refresh": "nevr"}, "longstraw_prompt_refresh='nevr'|mean 'never'"),
        (
            {"longstraw_prompt_refresh": "4"},
            "longstraw_prompt_refresh='4'|weights that are gone|longstraw_prompt_gradient",
        ),
        (
            {"longstraw_prompt_refresh": "never", "use_vllm": True},
            "use_vllm=True|another policy|decoded from captured prompts",
        ),
        (
            {"longstraw_prompt_refresh": "never", "longstraw_shared_rollout": False},
            "longstraw_shared_rollout=False|another policy",
        ),
    ],
)
def test_a_config_that_cannot_hold_is_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert_refused(words, lambda: LongStrawGRPOConfig(str(tmp_path), **{**BASE, **options}))


def a_tool(x: int) -> int:
    """A tool.

    Args:
        x: any number.
    """
    return x


@pytest.mark.parametrize(
    ("given", "extra", "words"),
    [
        (setting("never"), {"tools": [a_tool]}, "tools with|never|one turn"),
        (setting("2"), {"environment_factory": object}, "environment_factory with|'2'|one turn"),
        (setting("never"), {"peft_config": None}, "LlamaForCausalLM has none|peft_config"),
        (
            setting("never").but(generation_kwargs={"num_beams": 2}),
            {},
            "beams|another policy|Leave it out",
        ),
    ],
)
def test_a_trainer_that_cannot_hold_is_refused(
    given: Setting, extra: dict[str, Any], words: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """Turns, where earlier ones would become a prompt, and generation by another policy."""
    make = given.trainer
    given = Setting(**{**vars(given), "trainer": lambda: {**make(), **extra}})
    path = model_path(given.family, **given.variant)
    assert_refused(words, lambda: make_trainer(given, path, tmp_path, longstraw=True))


def test_a_rollout_of_several_turns_is_refused(model_path: ModelPath, tmp_path: Path) -> None:
    """A rollout function says by its mask that tokens are not the policy's own."""
    given = setting("never", rollout=some_tokens_only)
    assert_refused("env_mask|one turn", lambda: trained(given, model_path, tmp_path))
