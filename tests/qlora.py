"""Tiny models with NF4 weights, loaded as users load theirs: `from_pretrained` with a config."""

from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Params4bit
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from trl import GRPOTrainer

from tests.models import tiny_model


def nf4_config(dtype: torch.dtype, **changes: Any) -> BitsAndBytesConfig:
    """QLoRA's: NF4, the quantization constants quantized again, computation in `dtype`."""
    options = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
    }
    return BitsAndBytesConfig(**{**options, **changes})


def load_nf4(
    folder: Path | str, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """The model at `folder` with NF4 weights; arithmetic and what is not quantized in `dtype`.

    Args:
        changes: of the `BitsAndBytesConfig`.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=nf4_config(dtype, **changes)
    )
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # the same operators on every machine
    return model


def tiny_nf4(
    family: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """The model of `tests.models` with NF4 weights, by way of `folder`."""
    tiny_model(family).save_pretrained(folder)
    return load_nf4(folder, dtype, **changes)


def with_adapters(model: nn.Module, dtype: torch.dtype = torch.float32) -> PeftModel:
    """LoRA on every linear layer, no part of it zero, in `dtype`.

    B starts at zero in PEFT, which would hide every gradient of A.
    """
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data = noise.to(dtype)
    return adapted


def in_fp32(model: nn.Module) -> nn.Module:
    """`model` with the same packed weights, and everything else, arithmetic as well, in fp32."""
    for parameter in model.parameters():  # `float` of a quantized model is refused
        if not isinstance(parameter, Params4bit):
            parameter.data = parameter.data.float()
    for module in model.modules():
        if isinstance(getattr(module, "weight", None), Params4bit):
            module.compute_dtype = module.weight.quant_state.dtype = torch.float32
    return model


def widen_adapters(trainer: GRPOTrainer) -> None:
    """Make the adapters fp32, which TRL has rounded to bf16: no mistake hides behind rounding."""
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            assert parameter.dtype == torch.bfloat16  # else there is nothing to widen any more
            parameter.data = parameter.data.float()
