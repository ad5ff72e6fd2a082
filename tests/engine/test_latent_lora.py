"""Adapters on latent attention, sparse attention and experts: their full-sequence gradient.

In fp64 as `test_exact_gradient` has it. With NF4 weights in fp32, as `test_qlora` has it and for
the reason given there: a mistake is of the order of 1 there too, as planted ones show.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Params4bit
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from longstraw import ConfigError, EngineConfig
from longstraw.audit import sparse_definition
from longstraw.models import mla_dsa
from tests.engine.compare import (
    Gradients,
    engine_gradients,
    full_sequence_gradients,
    random_groups,
    worst_error,
)
from tests.models import Float64Islands, tiny_model
from tests.qlora import load_nf4

FAMILIES = ("deepseek_v3", "glm_moe_dsa")
MODES = ("exact", "stopped")
TOLERANCE = 1e-9
NF4_TOLERANCE = 1e-3
# Ragged members, and a prompt of three chunks of 16; 12 tokens are selected of up to 55.
SHAPES = ((41, (9, 14)),)
# Three layers: a dense one, and two with experts; GLM's second shares the first one's selection.
GLM_LAYERS = {"num_hidden_layers": 3, "index_topk_pattern": "FSF"}

ATTENTION = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
INDEXER = ["wq_b", "wk", "weights_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WHERE: dict[str, dict[str, Any]] = {
    # Experts are 3-D parameters and no linear layers.
    "router frozen": {"target_modules": ATTENTION + INDEXER, "target_parameters": EXPERTS},
    "router trained": {
        "target_modules": ATTENTION,
        "target_parameters": EXPERTS,
        "modules_to_save": ["gate"],
    },
    # On these families PEFT takes it for attention, indexers, experts and routers.
    "all-linear": {"target_modules": "all-linear"},
}


def adapted(model: nn.Module, dtype: torch.dtype, where: str) -> PeftModel:
    """LoRA of which no part is zero, in `dtype`; train mode, as trainers have it."""
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **WHERE[where]))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # B starts at zero, which would hide every gradient of A
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data = noise.to(dtype)
    return model.train()


def tiny(family: str) -> PreTrainedModel:
    return tiny_model(family, **(GLM_LAYERS if family == "glm_moe_dsa" else {}))


@functools.cache
def model_of(family: str, where: str = "router frozen") -> PeftModel:
    return adapted(tiny(family).double(), torch.float64, where)


@functools.cache
def reference(family: str, prompt_gradient: str, where: str = "router frozen") -> Gradients:
    """The definition's gradients, computed once per family and mode."""
    return full_sequence_gradients(
        model_of(family, where), random_groups(SHAPES), prompt_gradient=prompt_gradient
    )


def config(prompt_gradient: str = "exact") -> EngineConfig:
    return EngineConfig(chunk_size=16, page_size=8, prompt_gradient=prompt_gradient)


@pytest.mark.parametrize("where", ["router frozen", "router trained"])
@pytest.mark.parametrize("prompt_gradient", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_attention_and_experts_get_their_gradient(
    family: str, prompt_gradient: str, where: str
) -> None:
    """Each adapter, those of experts included; and the routers themselves, if trained."""
    ours = engine_gradients(model_of(family, where), random_groups(SHAPES), config(prompt_gradient))
    error, name = worst_error(ours, reference(family, prompt_gradient, where))
    assert error <= TOLERANCE, name
    for part in (*ATTENTION, "experts.base_layer.lora", "experts.lora"):
        assert any(part in name for name in ours), part
    routers = {name for name in ours if "lora_" not in name}
    is_trained = where == "router trained"
    assert len(routers) == is_trained * sum("experts.lora_A" in name for name in ours)
    assert all("gate.modules_to_save" in name for name in routers)


def test_all_linear_is_attention_experts_and_routers() -> None:
    """What PEFT makes of it, and no part without a gradient but indexers'. Linear layers of the
    first, dense layers and of shared experts are not in it."""
    right = reference("glm_moe_dsa", "exact", "all-linear")
    ours = engine_gradients(model_of("glm_moe_dsa", "all-linear"), random_groups(SHAPES), config())
    error, name = worst_error(ours, right)
    assert error <= TOLERANCE, name
    parts = (*ATTENTION, "experts.base_layer.lora", "experts.lora", "gate.lora")
    for part in parts:
        assert any(part in name for name in right), part
    assert all(any(part in name for part in parts) for name in right)
    assert not any("shared_experts" in name for name in right)


def test_adapters_of_indexers_get_none() -> None:
    """An indexer selects, and a selection has no gradient: neither the definition nor the engine
    gives one to adapters of its projections. All others get theirs."""
    model = model_of("glm_moe_dsa")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    without = {name for name in trained if ".indexer." in name}
    assert len(without) == 2 * len(INDEXER) * 2  # layers with an indexer, its projections, A and B
    ours = engine_gradients(model, random_groups(SHAPES), config())
    assert reference("glm_moe_dsa", "exact").keys() == trained - without
    assert ours.keys() >= trained - without
    assert {name for name, gradient in ours.items() if gradient.any()} == trained - without


def test_an_indexer_selects_with_its_adapters() -> None:
    """Adapters that are given, and not trained here, decide as much as weights do: without them
    other tokens are selected, and the gradient is another."""
    model = model_of("glm_moe_dsa")
    indexers = [p for n, p in model.named_parameters() if ".indexer." in n and "lora_B" in n]
    before = [p.detach().clone() for p in indexers]
    with torch.no_grad():
        for parameter in indexers:
            parameter.zero_()
    without = full_sequence_gradients(model, random_groups(SHAPES))
    with torch.no_grad():
        for parameter, value in zip(indexers, before, strict=True):
            parameter.copy_(value)
    assert worst_error(without, reference("glm_moe_dsa", "exact"))[0] > 1e-2


@pytest.mark.parametrize("prompt_gradient", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_keeps_the_gradient(family: str, prompt_gradient: str) -> None:
    """PEFT puts an expert's weight together anew in each run of its layer, the second included."""
    expected = reference(family, prompt_gradient, "router trained")
    model = model_of(family, "router trained")
    base = model.get_base_model()
    base.activation_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: (Float64Islands(), Float64Islands())}
    )
    try:
        ours = engine_gradients(model, random_groups(SHAPES), config(prompt_gradient))
    finally:
        base.activation_checkpointing_disable()
    error, name = worst_error(ours, expected)
    assert error <= TOLERANCE, name


def test_a_bias_in_the_absorbed_projection_is_refused() -> None:
    """`lora_bias` gives an adapter one. Applied to the identity it would be taken for weights: the
    gradient was off by more than its size."""
    adapter = LoraConfig(target_modules=["kv_b_proj"], lora_bias=True)
    model = get_peft_model(tiny("deepseek_v3"), adapter)
    with pytest.raises(ConfigError, match="kv_b_proj has a bias.*lora_bias"):
        engine_gradients(model, random_groups(SHAPES), config())


# ---------------------------------------------------------------- planted mistakes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_two_modes_differ_by_more_than_rounding(family: str) -> None:
    """Guards the tests above: if both references were the same, none of them could fail."""
    assert worst_error(reference(family, "stopped"), reference(family, "exact"))[0] > 0.1


def _without_gradient(*args: object) -> tuple[Tensor, Tensor]:
    to_keys, to_values = _PROJECTIONS(*args)
    return to_keys.detach(), to_values.detach()


_PROJECTIONS = mla_dsa._projections


@pytest.mark.parametrize("prompt_gradient", MODES)
def test_a_lost_gradient_of_the_absorbed_projection_would_be_seen(
    prompt_gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kv_b_proj is applied to the identity, and not to any token: its adapter's only gradient."""
    monkeypatch.setattr(mla_dsa, "_projections", _without_gradient)
    ours = engine_gradients(model_of("deepseek_v3"), random_groups(SHAPES), config(prompt_gradient))
    error, name = worst_error(ours, reference("deepseek_v3", prompt_gradient))
    assert error >= 1 and "kv_b_proj" in name


def _expand_constant(expand, num_tokens: int, *state: Tensor):  # noqa: ANN001, ANN202
    return tuple(sparse_definition.stop_tokens(x, num_tokens, -2) for x in expand(*state))


def test_a_lost_part_of_prompt_tokens_in_kv_b_proj_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stopped prompt its latents are constant, and what kv_b_proj makes of them is not.
    Holding keys and values constant, as a cache of these would, is another gradient."""
    monkeypatch.setattr(sparse_definition, "_expand_stopped", _expand_constant)
    other = full_sequence_gradients(
        model_of("deepseek_v3"), random_groups(SHAPES), prompt_gradient="stopped"
    )
    right = reference("deepseek_v3", "stopped")
    part = {name for name in right if "kv_b_proj" in name}
    error, name = worst_error({n: other[n] for n in part}, {n: right[n] for n in part})
    assert error > 0.1, name
    error, name = worst_error(
        {n: x for n, x in other.items() if n not in part},
        {n: x for n, x in right.items() if n not in part},
    )
    assert error <= TOLERANCE, name


# ---------------------------------------------------------------- NF4


@functools.cache
def nf4_model_of(family: str) -> PeftModel:
    """Adapters on NF4 weights, in fp32; on experts too."""
    with tempfile.TemporaryDirectory() as folder:
        tiny(family).save_pretrained(folder)
        model = load_nf4(Path(folder))
    return adapted(model, torch.float32, "router frozen")


@functools.cache
def nf4_reference(family: str, prompt_gradient: str) -> Gradients:
    return full_sequence_gradients(
        nf4_model_of(family), random_groups(SHAPES), prompt_gradient=prompt_gradient
    )


@pytest.mark.parametrize("prompt_gradient", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_nf4_get_their_gradient(family: str, prompt_gradient: str) -> None:
    """With kv_b_proj in NF4, of which W^K and W^V are what it gives for the identity."""
    ours = engine_gradients(nf4_model_of(family), random_groups(SHAPES), config(prompt_gradient))
    right = nf4_reference(family, prompt_gradient)
    error, name = worst_error(ours, right)
    assert error <= NF4_TOLERANCE, name


@pytest.mark.parametrize("prompt_gradient", MODES)
def test_a_lost_gradient_on_nf4_would_be_seen(
    prompt_gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, with kv_b_proj in NF4."""
    monkeypatch.setattr(mla_dsa, "_projections", _without_gradient)
    ours = engine_gradients(
        nf4_model_of("glm_moe_dsa"), random_groups(SHAPES), config(prompt_gradient)
    )
    error, name = worst_error(ours, nf4_reference("glm_moe_dsa", prompt_gradient))
    assert error >= 1 and "kv_b_proj" in name


def test_experts_and_routers_are_not_quantized() -> None:
    """bitsandbytes quantizes linear layers. Experts are 3-D parameters and routers are parameters:
    they stay as they are loaded, which in a large model is most of it. GLM keeps the weights of an
    indexer's heads in fp32."""
    model = nf4_model_of("glm_moe_dsa").get_base_model()
    packed = {name for name, p in model.named_parameters() if isinstance(p, Params4bit)}
    parts = {name.removesuffix(".weight").removesuffix(".base_layer") for name in packed}
    shared = ["gate_proj", "up_proj", "down_proj"]
    indexer = [name for name in INDEXER if name != "weights_proj"]
    assert {part.rpartition(".")[2] for part in parts} == {*ATTENTION, *indexer, *shared}
    others = {
        name.rpartition(".")[2]: p.dtype
        for name, p in model.named_parameters()
        if (".experts." in name or ".gate." in name) and "lora_" not in name
    }
    assert others == dict.fromkeys(("gate_up_proj", "down_proj", "weight"), torch.float32)
