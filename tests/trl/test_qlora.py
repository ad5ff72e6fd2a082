"""QLoRA with LongStraw gives what QLoRA with stock TRL gives.

As in `test_parity`: the same model, prompts and completions, three optimizer steps, each parameter
within 1e-4 of how far stock TRL moved it, and all logged numbers equal to 1e-4. The weights are NF4
with their constants quantized again, the adapters sit on every linear layer.

TRL rounds adapters of quantized models to bf16. A step is then often smaller than the rounding of
the weight it changes, and two sums in another order may differ by a whole step; the comparisons to
1e-4 therefore widen them again, in both trainers. As TRL leaves them, they are compared with what
fp32 gives.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Params4bit
from peft import prepare_model_for_kbit_training
from torch import Tensor
from transformers import PreTrainedModel
from trl import ModelConfig, TrlParser

from examples import train_grpo
from tests.marks import slow_but
from tests.qlora import in_fp32, load_nf4, nf4_config, widen_adapters
from tests.trl.ingredients import lora
from tests.trl.parity import (
    ADAMW,
    TOLERANCE,
    ModelPath,
    Outcome,
    Setting,
    log_row,
    prompts_dataset,
    train,
    word_tokenizer,
    worst_metric,
    worst_parameter,
)
from trl_integration import LongStrawGRPOConfig, LongStrawGRPOTrainer

FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_5")


def nf4(model: PreTrainedModel) -> PreTrainedModel:
    """The model at the same place with NF4 weights."""
    return load_nf4(model.name_or_path)


QLORA = Setting(
    trainer=lora(),
    wrap_model=nf4,
    prepare=widen_adapters,
    config={"max_steps": 3},
)


def prepared_by_peft(model: PreTrainedModel) -> PreTrainedModel:
    """As PEFT's guide has it: gradient checkpointing is on when TRL gets the model."""
    kwargs = {"use_reentrant": False}
    return prepare_model_for_kbit_training(nf4(model), gradient_checkpointing_kwargs=kwargs)


_CHECKPOINTING = QLORA.but(
    gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
)
_BY_NAME = replace(QLORA, wrap_model=lambda model: model.name_or_path).but(  # type: ignore[arg-type]
    model_init_kwargs={"dtype": "float32", "quantization_config": nf4_config(torch.float32)}
)
SETTINGS = {
    **{family: replace(QLORA, family=family) for family in FAMILIES},
    "AdamW": QLORA.but(**ADAMW),
    "checkpointing": _CHECKPOINTING,
    "prepared by PEFT": replace(QLORA, wrap_model=prepared_by_peft),
    "reference without adapters": QLORA.but(beta=0.2),
    "loaded by TRL": _BY_NAME,
    "greedy generation": replace(QLORA, rollout=None).but(
        beta=0.2, generation_kwargs={"do_sample": False}
    ),
}


def floating(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the packed weights."""
    return {name: p for name, p in parameters.items() if p.is_floating_point()}


def without_packed(outcome: Outcome) -> Outcome:
    """The same, of the parameters that are not packed."""
    return replace(outcome, before=floating(outcome.before), after=floating(outcome.after))


@pytest.mark.parametrize(
    "name",
    slow_but(["qwen3_5", "prepared by PEFT", "loaded by TRL", "greedy generation"], SETTINGS),
)
def test_qlora_trains_as_in_stock_trl(name: str, model_path: ModelPath, tmp_path: Path) -> None:
    """Adapters, all metrics, and that the NF4 weights are what they were, bit for bit."""
    setting = SETTINGS[name]
    path = model_path(setting.family, **setting.variant)
    stock, ours = (
        train(setting, path, tmp_path / str(longstraw), longstraw=longstraw)
        for longstraw in (False, True)
    )
    packed = ours.before.keys() - floating(ours.before).keys()
    assert len(packed) >= 8, "four projections of attention in two layers"
    for parameter in packed:
        for after in (ours.after, stock.after):
            assert torch.equal(ours.before[parameter], after[parameter]), parameter
    worst = worst_parameter(floating(ours.after), without_packed(stock))
    metric = worst_metric(ours.logs, stock.logs)
    log_row(f"QLoRA, {name}", worst, metric)
    assert worst[0] <= TOLERANCE, worst
    assert metric[0] <= TOLERANCE, metric


# One step, and so large a one that the new weights are little but the gradient.
AS_TRL_HAS_IT = Setting(
    trainer=lora(),
    wrap_model=lambda model: load_nf4(model.name_or_path, torch.bfloat16),
    config={"max_steps": 1, "learning_rate": 10.0},
)


def test_bf16_is_as_close_as_stock_trl(model_path: ModelPath, tmp_path: Path) -> None:
    """Weights, arithmetic and adapters in bf16, as TRL leaves them. Truth is fp32 on the same
    packed weights and from the same adapters; LongStraw is at most twice as far from it as stock
    TRL."""
    path = model_path(**AS_TRL_HAS_IT.variant)
    in_full = replace(
        AS_TRL_HAS_IT,
        wrap_model=lambda model: in_fp32(load_nf4(model.name_or_path, torch.bfloat16)),
        prepare=widen_adapters,
    )
    truth = without_packed(train(in_full, path, tmp_path / "truth", longstraw=False))
    movement = _distance(truth.after, truth.before)
    errors = []
    for longstraw in (True, False):
        found = train(AS_TRL_HAS_IT, path, tmp_path / str(longstraw), longstraw=longstraw)
        assert {p.dtype for p in floating(found.after).values()} == {torch.bfloat16}
        after = {name: p.float() for name, p in floating(found.after).items()}
        errors.append((_distance(after, truth.after) / movement, worst_parameter(after, truth)))
    (error, worst), (budget, budget_worst) = errors
    log_row("QLoRA, bf16", (error, f"(worst {worst[0]:.1e})"), (budget, "stock"))
    assert error <= 2 * budget < 0.2, (error, budget)
    assert worst[0] <= 2 * budget_worst[0], (worst, budget_worst)


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(torch.stack([(a[name] - b[name]).norm() for name in a]).norm())


def test_a_resumed_run_is_the_uninterrupted_one(model_path: ModelPath, tmp_path: Path) -> None:
    """To the last bit. PEFT loads adapters in fp32, and these are bf16: with fp32 ones the second
    step would not be rounded, and the run would be another."""
    setting = replace(AS_TRL_HAS_IT, rollout=None).but(
        max_steps=2, learning_rate=1.0, save_strategy="steps", save_steps=1
    )
    path = model_path(**setting.variant)
    whole = train(setting, path, tmp_path / "whole", longstraw=True)
    resumed = train(
        setting,
        path,
        tmp_path / "resumed",
        longstraw=True,
        resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"),
    )
    moved = [name for name, p in whole.after.items() if not torch.equal(p, whole.before[name])]
    assert moved and all("lora_" in name for name in moved)
    for name, parameter in whole.after.items():
        assert resumed.after[name].dtype == parameter.dtype, name
        assert torch.equal(resumed.after[name], parameter), name


def test_the_example_takes_the_flags_of_trl(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--load_in_4bit` and what belongs to it, from the command line to the saved adapter."""
    trainers: list[LongStrawGRPOTrainer] = []

    class Kept(LongStrawGRPOTrainer):
        def train(self, *args, **kwargs):  # noqa: ANN002, ANN003, ANN202
            trainers.append(self)
            return super().train(*args, **kwargs)

    monkeypatch.setattr(train_grpo, "LongStrawGRPOTrainer", Kept)
    path, data = model_path(**AS_TRL_HAS_IT.variant), tmp_path / "data.jsonl"
    word_tokenizer().save_pretrained(path)
    prompts_dataset().to_json(data)
    flags = f"""
        --model_name_or_path {path} --dtype bfloat16 --load_in_4bit --use_bnb_nested_quant
        --use_peft --lora_target_modules all-linear --lora_r 4 --dataset_name {data}
        --reward_funcs tests.trl.parity.modular_reward --output_dir {tmp_path / "out"} --use_cpu
        --bf16 false --num_generations 4 --per_device_train_batch_size 4 --max_steps 1
        --max_completion_length 4 --report_to none --save_strategy no
    """
    parser = TrlParser((train_grpo.ScriptArguments, LongStrawGRPOConfig, ModelConfig))
    parser.set_defaults(lora_dropout=0.0)
    train_grpo.main(*parser.parse_args_and_config(args=flags.split()))
    (trainer,) = trainers
    packed = [p for p in trainer.model.parameters() if isinstance(p, Params4bit)]
    assert len(packed) == 14, "seven projections in each of two layers"
    assert all(p.quant_state.nested and p.quant_state.quant_type == "nf4" for p in packed)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
