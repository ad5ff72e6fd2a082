"""What the planner reads out of a config.json is what torch makes of the same config.

Tiny models of every family that can be planned, with both forms of a saved config: all fields, and
those that differ from the class's defaults.
"""

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from longstraw.config import EngineConfig
from longstraw.distributed.ownership import Ownership, most_owned
from longstraw.models import SERVED_FAMILIES, Decoder
from longstraw.planner.model_shape import FAMILIES, ModelShape
from longstraw.planner.options import PlanOptions
from longstraw.planner.parameters import adapter_numel, count_parameters
from longstraw.planner.terms import snapshot_bytes, state_terms, token_bytes, total
from tests.models import FAMILIES as TINY
from tests.models import tiny_model

PLANNED = [name for name in TINY if name != "gpt2"]


def shapes_of(config: Any) -> list[ModelShape]:
    """From both forms of a saved config."""
    texts = [config.to_json_string(use_diff=use_diff) for use_diff in (False, True)]
    return [ModelShape.from_config(json.loads(text)) for text in texts]


@pytest.mark.parametrize("family", PLANNED)
def test_parameters_are_counted_as_torch_makes_them(family: str) -> None:
    """All of them to the last one, and those in fp32 of a model in bf16."""
    config = tiny_model(family).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for shape in shapes_of(config):
        count = count_parameters(shape)
        assert count.total == sum(p.numel() for p in model.parameters())
        in_fp32 = sum(p.numel() for p in model.parameters() if p.dtype == torch.float32)
        assert in_fp32 in (0, count.routers)
        trained = sum(p.numel() for p in Decoder(model).trainable_parameters())
        assert count.total - count.indexers == trained


@pytest.mark.parametrize("family", PLANNED)
def test_adapters_are_counted_for_every_projection(family: str) -> None:
    """r (inputs + outputs) of every linear layer but the head; indexers' have no gradient, and
    routed experts are no linear layers."""
    model = tiny_model(family)
    linears = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head" and "indexer" not in name
    ]
    said = 4 * sum(module.in_features + module.out_features for module in linears)
    assert adapter_numel(shapes_of(model.config)[0], 4) == said


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_5", "qwen3_5_moe"])
def test_peft_makes_these_adapters_of_all_linear(family: str) -> None:
    """Of other mixtures of experts PEFT's own table takes other modules: name them there."""
    model = tiny_model(family)
    (shape, _) = shapes_of(model.config)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    trained = Decoder(adapted).trainable_parameters()
    assert adapter_numel(shape, 4) == sum(p.numel() for p in trained)


@pytest.mark.parametrize("family", PLANNED)
def test_state_is_what_the_engine_says(family: str) -> None:
    """Of a token and of a snapshot, and windows where the model has them."""
    model = tiny_model(family).bfloat16()
    decoder = Decoder(model)
    for shape in shapes_of(model.config):
        assert token_bytes(shape, 2) == decoder.state_bytes(1, with_cotangents=False)
        kinds = getattr(model.config, "layer_types", None) or ()
        windows = [kind == "sliding_attention" for kind in kinds]
        if any(windows):
            assert [layer.window is not None for layer in shape.layers] == windows
        for sp_size in (1, 2):
            options = PlanOptions(100, ranks=sp_size, engine=EngineConfig(sp_size=sp_size))
            for theirs in (False, True):
                said = decoder.snapshot_bytes(sp_size, of_cotangents=theirs)
                assert snapshot_bytes(shape, options, theirs) == said
        exact = PlanOptions(100, engine=EngineConfig(chunk_size=64, page_size=8))
        if family not in ("gemma2", "gemma3", "gpt_oss", "mistral", "qwen3_5", "qwen3_next"):
            said = decoder.state_bytes(100, with_cotangents=True) + 2 * decoder.snapshot_bytes()
            said += decoder.snapshot_bytes(of_cotangents=True)
            assert total(state_terms(shape, exact, 100)) == said


@pytest.mark.parametrize("layout", ["block_cyclic", "zigzag"])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 131])
def test_shares_are_those_of_the_engine(layout: Any, num_tokens: int) -> None:
    """The planner has its own form of `Ownership.width`, which comes with torch."""
    for sp_size in (1, 2, 3, 4):
        engine = EngineConfig(sp_size=sp_size, chunk_size=27, sp_layout=layout)
        options = PlanOptions(num_tokens, ranks=sp_size, engine=engine)
        assert options.owned(num_tokens) == most_owned(num_tokens, 27, sp_size, layout)
        assert options.width(num_tokens) == Ownership(num_tokens, sp_size, layout).width


def test_every_served_family_can_be_planned_but_one() -> None:
    """Multimodal names stand for their text models; GPT-2 has no gradient checkpointing."""
    served = {name for name, family in SERVED_FAMILIES.items() if family.can_checkpoint}
    assert served - {"qwen3_5", "qwen3_5_moe"} == set(FAMILIES)
