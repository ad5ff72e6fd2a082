"""QLoRA: the engine's gradient of adapters on NF4 weights is that of the full-sequence step.

bitsandbytes dequantizes NF4 in fp32 at best (in fp64 it gives NaN), so this is fp32, where the
sharp models of `tests.models` amplify rounding to 1e-4 of a gradient. A lost part of the prompt's
gradient is of the order of 1, which is shown as well.

All errors: `pytest tests/engine/test_qlora.py --log-cli-level=INFO --log-cli-format='%(message)s' |
grep '^|'`
"""

import functools
import logging
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Params4bit
from peft import PeftModel, prepare_model_for_kbit_training
from transformers import PreTrainedModel

from longstraw import ConfigError, Engine, EngineConfig
from longstraw.state import PageStore
from tests.engine.compare import (
    Gradients,
    RandomLoss,
    engine_gradients,
    full_sequence_gradients,
    gradients,
    random_groups,
    worst_error,
)
from tests.marks import slow_but
from tests.models import tiny_model
from tests.qlora import in_fp32, load_nf4, tiny_nf4, with_adapters

logger = logging.getLogger("tests.qlora")

FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_5")
MODES = ("exact", "stopped")
TOLERANCE = 1e-3
# As in `test_exact_gradient`: ragged members, and prompts that chunks of 7 and 16 do not divide.
SHAPES = ((38, (9, 1, 14)), (24, (17,)))


@functools.cache
def model_of(family: str) -> PeftModel:
    """Adapters on NF4 weights, in fp32. In train mode, as trainers have it."""
    with tempfile.TemporaryDirectory() as folder:
        return with_adapters(tiny_nf4(family, Path(folder))).train()


@functools.cache
def reference(family: str, prompt_gradient: str) -> Gradients:
    """The definition's gradients, computed once per family and mode."""
    return full_sequence_gradients(
        model_of(family), random_groups(SHAPES), prompt_gradient=prompt_gradient
    )


def error_of(ours: Gradients, right: Gradients, name: str) -> float:
    """That of the worst parameter; logged. All are finite: NaN compares as no error at all."""
    assert ours.keys() == right.keys() and all("lora_" in key for key in right)
    assert all(x.isfinite().all() for found in (ours, right) for x in found.values())
    error, parameter = worst_error(ours, right)
    logger.info(f"| {name} | {error:.1e} | {parameter} | {len(right)} parameters |")
    return error


@pytest.mark.parametrize(
    ("family", "prompt_gradient", "chunk_size"),
    slow_but(
        [
            ("llama", "exact", 7),
            ("llama", "stopped", 16),
            ("qwen3_moe", "exact", 16),
            ("qwen3_5", "exact", 500),
        ],
        product(FAMILIES, MODES, [7, 16, 500]),
    ),
)
def test_adapters_on_nf4_get_their_full_sequence_gradient(
    family: str, prompt_gradient: str, chunk_size: int
) -> None:
    """Each adapter of each linear layer. 500 tokens exceed every prompt and response."""
    config = EngineConfig(chunk_size=chunk_size, page_size=5, prompt_gradient=prompt_gradient)
    ours = engine_gradients(model_of(family), random_groups(SHAPES), config)
    name = f"{family}, {prompt_gradient}, chunks of {chunk_size}"
    assert error_of(ours, reference(family, prompt_gradient), name) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "prompt_gradient"),
    slow_but([("qwen3_moe", "exact")], product(FAMILIES, MODES)),
)
def test_gradient_checkpointing_keeps_the_prompt(family: str, prompt_gradient: str) -> None:
    """Layers dequantize their weights a second time, in the backward."""
    expected = reference(family, prompt_gradient)
    model = model_of(family)
    base = model.get_base_model()
    base.activation_checkpointing_enable({"use_reentrant": False})
    try:
        config = EngineConfig(chunk_size=16, page_size=8, prompt_gradient=prompt_gradient)
        ours = engine_gradients(model, random_groups(SHAPES), config)
    finally:
        base.activation_checkpointing_disable()
    assert error_of(ours, expected, f"{family}, {prompt_gradient}, checkpointing") <= TOLERANCE


def test_the_weights_stay_as_they_were_quantized() -> None:
    """Packed bytes and double-quantized constants, over captures, replays and prompt backwards."""
    model = model_of("llama")
    packed = [p for p in model.parameters() if isinstance(p, Params4bit)]
    states = [p.quant_state for p in packed]
    assert states and all(state.nested and state.quant_type == "nf4" for state in states)

    def snapshot() -> list[torch.Tensor]:
        constants = [x for s in states for x in (s.absmax, s.state2.absmax, s.offset)]
        return [x.clone() for x in (*packed, *constants)]

    before = snapshot()
    engine_gradients(model, random_groups(SHAPES), EngineConfig(chunk_size=16, page_size=8))
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))


def test_a_lost_page_gradient_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake, dV of pages dropped, is off by more than 100 times the tolerance."""
    original = PageStore.add_cotangent

    def lossy(self, page, key_grad, value_grad):  # noqa: ANN001, ANN202
        original(self, page, key_grad, value_grad * 0)

    monkeypatch.setattr(PageStore, "add_cotangent", lossy)
    config = EngineConfig(chunk_size=16, page_size=8)
    ours = engine_gradients(model_of("llama"), random_groups(SHAPES), config)
    assert error_of(ours, reference("llama", "exact"), "planted: no dV") > 100 * TOLERANCE


# ---------------------------------------------------------------- bf16


def test_bf16_is_as_close_as_the_full_sequence_step(tmp_path: Path) -> None:
    """Everything in bf16, adapters as TRL leaves them. Truth is fp32 on the same packed weights and
    the same adapters; the engine is at most twice as far from it as one graph in bf16.

    On qwen3, whose norms of queries and keys keep bf16 at 5e-2; without them the sharp models of
    `tests.models` amplify it to 1, which would say nothing.
    """
    model = with_adapters(tiny_nf4("qwen3", tmp_path, torch.bfloat16), torch.bfloat16).train()
    groups = random_groups(SHAPES)
    definition = full_sequence_gradients(model, groups)
    ours = engine_gradients(model, groups, EngineConfig(chunk_size=16, page_size=8))
    right = full_sequence_gradients(in_fp32(model), groups)

    def distance(found: Gradients) -> float:
        difference = torch.stack([(found[n].float() - x).norm() for n, x in right.items()]).norm()
        return float(difference / torch.stack([x.norm() for x in right.values()]).norm())

    error, budget = distance(ours), distance(definition)
    logger.info(f"| qwen3, bf16 | {error:.1e} | one graph {budget:.1e} |")
    assert error <= 2 * budget < 0.5


# ---------------------------------------------------------------- how models are prepared


def _prepared(folder: Path, dtype: torch.dtype, **options: object) -> PreTrainedModel:
    """As PEFT prepares models for training: what is not packed is fp32, checkpointing is on."""
    return prepare_model_for_kbit_training(load_nf4(folder, dtype), **options)


# What adapters and states are in: the packed weights are uint8 (or what they are stored as), and
# say nothing of it.
LOADED = {
    "fp32": (lambda folder: load_nf4(folder), torch.float32),
    "bf16": (lambda folder: load_nf4(folder, torch.bfloat16), torch.bfloat16),
    "fp32, computed in bf16": (
        lambda folder: load_nf4(folder, bnb_4bit_compute_dtype=torch.bfloat16),
        torch.float32,
    ),
    "fp32, packed in bf16": (
        lambda folder: load_nf4(folder, bnb_4bit_quant_storage=torch.bfloat16),
        torch.float32,
    ),
    "bf16, prepared by PEFT": (
        lambda folder: _prepared(folder, torch.bfloat16, use_gradient_checkpointing=False),
        torch.float32,
    ),
}


@pytest.mark.parametrize("name", LOADED)
def test_states_have_the_dtype_of_hidden_states(name: str, nf4_folder: Path) -> None:
    """Bytes that are announced are bytes that are held, in the dtype layers hand on: what
    `Linear4bit` computes in is its own affair."""
    load, dtype = LOADED[name]
    model = with_adapters(load(nf4_folder))
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=16))
    (group,) = random_groups([(33, (9, 9))])
    engine.score(group)
    config = model.get_base_model().config
    per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    assert engine.store.bytes_in_use == 32 * per_token * dtype.itemsize
    assert engine.store.bytes_in_use == engine.decoder.state_bytes(32, with_cotangents=False)


def test_a_model_prepared_by_peft_gives_the_same_gradient(nf4_folder: Path) -> None:
    """Its checkpointing is on when the engine gets it, with inputs that require gradients."""
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    model = with_adapters(_prepared(nf4_folder, torch.float32, **options)).train()
    assert model.get_base_model().is_activation_checkpointing
    groups = random_groups(SHAPES)
    ours = engine_gradients(model, groups, EngineConfig(chunk_size=16, page_size=8))
    assert error_of(ours, reference("llama", "exact"), "prepared by PEFT") <= TOLERANCE


def test_checkpointing_as_peft_switches_it_on_by_default_is_refused(nf4_folder: Path) -> None:
    """PEFT says nothing of `use_reentrant`, and torch then takes the re-entrant form: gradients of
    the prompt were off by more than their size, without a sign."""
    model = with_adapters(_prepared(nf4_folder, torch.float32)).train()
    groups = random_groups(SHAPES)
    with pytest.raises(ConfigError, match="use_reentrant"):
        Engine(model, EngineConfig(chunk_size=16)).accumulate(groups, RandomLoss(groups))


def test_weights_are_not_packed_for_inference(nf4_folder: Path) -> None:
    """On a CPU with AVX512-BF16, bitsandbytes packs weights anew at the first forward in eval mode,
    in place and for good, into a form that has no backward and holds constants in bf16."""
    model = with_adapters(load_nf4(nf4_folder)).eval()
    linears = [m for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
    for linear in linears:
        linear.support_avx512bf16_for_cpu = True  # what such a CPU says
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=8))
    groups = random_groups(SHAPES)
    engine.accumulate(groups, RandomLoss(groups))
    engine.finalize()
    assert not any(getattr(m.weight.quant_state, "packing_format_for_cpu", 0) for m in linears)
    assert error_of(gradients(model), reference("llama", "exact"), "eval mode") <= TOLERANCE


@pytest.fixture(scope="module")
def nf4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of `model_of("llama")`."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(folder)
    return folder
