"""Latent and sparse attention: what is kept, what is selected, and that no part of it is lost.

Gradients are compared with the definition in `test_exact_gradient`, as for every family; prompts
there and here have more tokens than are selected. Errors by chunk:
`pytest tests/engine/test_sparse_attention.py --log-cli-level=INFO`.
"""

import logging
from itertools import product
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from longstraw import (
    ConfigError,
    Engine,
    EngineConfig,
    ReplayMismatchError,
    UnsupportedModelError,
    generate,
    generate_rows,
)
from longstraw.attention import operands, selected, selection
from longstraw.audit import PeakTensorBytes, selections, ties_decided
from longstraw.models import mla_dsa
from longstraw.models.mla_dsa import LatentShape
from longstraw.state import IndexKeys, PageStore, fingerprint
from longstraw_kernels.page_copy import scatter_add_pages
from tests.engine.compare import (
    RandomLoss,
    engine_gradients,
    full_sequence_gradients,
    random_groups,
    worst_error,
)
from tests.models import Float64Islands, tiny_model

logger = logging.getLogger("tests.sparse_attention")
LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
SPARSE = ("deepseek_v32", "glm_moe_dsa")
TOPK = 12
"""Tokens that the tiny models select."""


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"chunk_size": 16, "page_size": 8, **changes})


# ---------------------------------------------------------------- what is kept


def test_state_is_latents_rotary_keys_and_index_keys() -> None:
    """Latents and rotary keys as the model's own cache has them, index keys on layers that have an
    indexer and only there; nothing of heads. fp64."""
    model = tiny_model("glm_moe_dsa").double()
    ids = random_groups([(38, (1,))])[0].prompt_ids
    engine = Engine(model, config())
    expected: Any = hf.DynamicCache(config=model.config)
    with Float64Islands(), torch.no_grad():
        state = engine.capture(ids)
        with ties_decided(model, "first"):
            model(ids[None, :-1], cache=expected, use_cache=True)
    places = engine.decoder.index_places
    assert list(places) == [0, 2, 4]
    for layer, stock in enumerate(expected.layers):
        pages = state.own_pages(layer)
        for name, theirs in (("key", stock.keys), ("value", stock.values)):
            ours = torch.cat([getattr(page, name) for page in pages], dim=-2)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
        if layer not in places:
            continue
        pages = state.own_pages(places[layer])
        assert all(isinstance(page, IndexKeys) and not page.needs_cotangent for page in pages)
        ours = torch.cat([torch.cat([page.key, page.value], -1) for page in pages], -2)[:, 0]
        torch.testing.assert_close(ours, stock.indexer_keys, rtol=0, atol=1e-11)


@pytest.mark.parametrize("prompt_gradient", ["exact", "stopped"])
@pytest.mark.parametrize("family", LATENT)
def test_bytes_are_those_of_the_formula(family: str, prompt_gradient: str) -> None:
    """What the store held most, to the byte."""
    model = tiny_model(family)
    groups = random_groups([(50, (3, 5))])
    engine = Engine(model, config(prompt_gradient=prompt_gradient))
    engine.accumulate(groups, RandomLoss(groups))
    is_exact = prompt_gradient == "exact"
    assert engine.store.peak_bytes == engine.decoder.state_bytes(49, is_exact)
    sizes = {"deepseek_v3": (3, 0), "deepseek_v32": (3, 3), "glm_moe_dsa": (6, 3)}
    layers, indexers = sizes[family]
    per_token = layers * (20 + 8) * (8 if is_exact else 4) + indexers * 16 * 4
    assert engine.store.peak_bytes == 49 * per_token


def test_glm_5_2_keeps_95232_bytes_a_token() -> None:
    """78 layers of 512 + 64, 21 index layers of 128, bf16."""
    glm = hf.GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3)
    shape = LatentShape.from_config(glm)
    assert shape is not None and len(shape.index_layers) == 21
    assert shape.token_bytes(78, 2) == 95_232
    assert shape.token_bytes(78, 2, 4) == 95_232 + 78 * 576 * 4


# ---------------------------------------------------------------- what is selected


def total_of(found: dict[str, Tensor]) -> int:
    """The sum of the fingerprints of all selections, as `Choices.total` adds them up."""
    return sum(int(fingerprint(x, torch.arange(len(x)))) for x in found.values()) % 2**64


def captured_total(model: Any, ids: Tensor, **options: Any) -> int:
    engine = Engine(model, config(**options))
    with Float64Islands():
        state = engine.capture(ids)
    chunks = state.segment.chunks(engine.config.chunk_size)
    return sum(state.choices(chunk).total("indexer") for chunk in chunks) % 2**64


@pytest.mark.parametrize("ties", ["first", "last"])
def test_selections_are_the_definitions_for_any_chunks_and_pages(ties: str) -> None:
    """To the token, by a fingerprint of all (query, token) pairs; 2 to 4 % of the scores are exact
    zeros, so that rules matter. The other rule selects others."""
    model = tiny_model("glm_moe_dsa").double()
    ids = random_groups([(50, (1,))])[0].prompt_ids
    with Float64Islands(), torch.no_grad():
        found = selections(model, ids[:-1], ties)
        other = selections(model, ids[:-1], "last" if ties == "first" else "first")
    assert set(found) == {f"model.layers.{i}.self_attn.indexer" for i in (0, 2, 4)}
    assert all(int((x[-1] >= 0).sum()) == TOPK for x in found.values())
    expected = total_of(found)
    for chunk_size, page_size in ((1, 1), (7, 3), (16, 8), (500, 512)):
        options = {"chunk_size": chunk_size, "page_size": page_size, "index_ties": ties}
        assert captured_total(model, ids, **options) == expected, (chunk_size, page_size)
    assert total_of(other) != expected


def test_both_rules_give_the_definitions_gradient() -> None:
    """Of `index_ties="last"`; that of "first" is compared in all other tests."""
    groups = random_groups([(53, (9, 2))])
    model = tiny_model("glm_moe_dsa").double()
    expected = full_sequence_gradients(model, groups, index_ties="last")
    ours = engine_gradients(model, groups, config(index_ties="last"))
    error, name = worst_error(ours, expected)
    assert error <= 1e-9, name
    first = engine_gradients(model, groups, config())
    assert worst_error(first, expected)[0] > 1e-3


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="index_ties='lowest' is unknown; choose one of first, l"):
        EngineConfig(index_ties="lowest")


# ---------------------------------------------------------------- no part is lost


@pytest.mark.parametrize("prompt_gradient", ["exact", "stopped"])
@pytest.mark.parametrize("family", LATENT)
def test_chunks_of_any_size_give_the_full_sequence_gradient(
    family: str, prompt_gradient: str
) -> None:
    """Chunks of 1, 2 and 3 tokens, one that fits no length, and one that exceeds all; ragged
    members, responses of one to four tokens; the prompt is longer than the selection. fp64."""
    groups = random_groups([(17, (4, 1, 2))])
    model = tiny_model(family).double()
    expected = full_sequence_gradients(model, groups, prompt_gradient=prompt_gradient)
    for chunk_size in (1, 2, 3, 5, 100):
        options = config(chunk_size=chunk_size, page_size=2, prompt_gradient=prompt_gradient)
        error, name = worst_error(engine_gradients(model, groups, options), expected)
        logger.info(f"| {family} | {prompt_gradient} | {chunk_size} | {error:.1e} | {name} |")
        assert error <= 1e-9, f"chunks of {chunk_size}: {name}"


@pytest.mark.parametrize(
    ("family", "lost"),
    [
        *product(["deepseek_v3", "glm_moe_dsa"], ["latent", "rotary"]),
        ("deepseek_v3", "value part"),  # under selection the kernel adds both parts, in its test
    ],
)
def test_a_lost_cotangent_of_any_part_would_be_seen(
    family: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted mistakes: the forward, and so the loss, is as it was."""
    if lost == "value part":  # what reaches latents as values, in attention over all tokens

        def gradients(self: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
            return dk[..., : dv.shape[-1]], dk[..., dv.shape[-1] :]

        monkeypatch.setattr(operands.AttentionOptions, "gradients", gradients)
    else:
        original = PageStore.add_cotangent

        def lossy(self: PageStore, page: Any, latent: Tensor, rotary: Tensor) -> None:
            latent = latent * 0 if lost == "latent" else latent
            original(self, page, latent, rotary * 0 if lost == "rotary" else rotary)

        def lossy_copy(table: Tensor, places: Any, into: Any, **options: Any) -> None:
            is_latent = into[0].shape[1] == model.config.kv_lora_rank
            table = table * 0 if is_latent == (lost == "latent") else table
            scatter_add_pages(table, places, into, **options)

        monkeypatch.setattr(PageStore, "add_cotangent", lossy)
        monkeypatch.setattr(selected, "scatter_add_pages", lossy_copy)
    groups = random_groups([(40, (5, 9))])
    model = tiny_model(family).double()
    expected = full_sequence_gradients(model, groups)
    assert worst_error(engine_gradients(model, groups, config()), expected)[0] > 1e-2


def test_attention_over_all_tokens_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: what was selected does not reach attention."""
    original = mla_dsa.paged_attention
    monkeypatch.setattr(mla_dsa, "paged_attention", lambda *args: original(*args[:-1], None))
    groups = random_groups([(40, (5, 9))])
    model = tiny_model("glm_moe_dsa").double()
    expected = full_sequence_gradients(model, groups)
    assert worst_error(engine_gradients(model, groups, config()), expected)[0] > 1e-2


# ---------------------------------------------------------------- choices repeat


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("what", ["tokens", "experts"])
def test_a_rerun_that_chooses_otherwise_is_an_error(
    what: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that gives other results each time: the gradient would be of another function. The
    engine says which module it was, and has forgotten the update."""
    model = tiny_model("glm_moe_dsa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    module = model.model.layers[2].self_attn.indexer if what == "tokens" else None
    module = module or model.model.layers[2].mlp.gate
    noise = torch.randn_like(next(module.parameters()))
    disturbed = []

    def disturb(module: Any, args: Any) -> None:
        if torch.is_grad_enabled() and not disturbed:
            disturbed.append(True)
            next(module.parameters()).data += noise

    handle = module.register_forward_pre_hook(disturb)
    groups = random_groups([(40, (5, 9))])
    engine = Engine(model, config())
    with pytest.raises(ReplayMismatchError, match=r"layers\.2\..* chose other tokens or experts"):
        engine.accumulate(groups, RandomLoss(groups))
        engine.finalize()
    handle.remove()
    assert disturbed and engine.store.num_pages == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe", "deepseek_v3"])
def test_every_family_with_experts_is_watched(family: str) -> None:
    model = tiny_model(family)
    engine = Engine(model, config())
    state = engine.capture(random_groups([(20, (1,))])[0].prompt_ids)
    choices = state.choices(state.segment.chunks(16)[0])
    assert choices is not None and not choices.is_empty


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("family", LATENT)
def test_decoded_tokens_are_those_of_full_forwards(family: str) -> None:
    """Three contexts of different length in one batch, greedy, against a forward over everything
    for each token. fp64."""
    model = tiny_model(family).double()
    ids = random_groups([(40, (1,))])[0].prompt_ids
    contexts = [ids[:30], ids, torch.cat([ids[:20], ids[5:12]])]
    with Float64Islands(), torch.no_grad():
        rows = generate_rows(
            Engine(model, config()), contexts, max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        together = generate(Engine(model, config()), ids, 2, max_new_tokens=6, do_sample=False)
        for context, row in zip(contexts, rows, strict=True):
            sequence = context[None]
            for _ in range(6):
                with ties_decided(model, "first"):
                    logits = model(input_ids=sequence, use_cache=False).logits
                sequence = torch.cat([sequence, logits[:, -1].argmax(-1, keepdim=True)], 1)
            new = sequence[0, context.numel() :].tolist()
            stop = new.index(1) + 1 if 1 in new else 6
            assert row.tolist()[:stop] == new[:stop]
    assert together[0].tolist() == torch.cat([ids, rows[1]]).tolist()[: together.shape[1]]


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("prompt_gradient", ["exact", "stopped"])
def test_beside_the_state_only_a_layer_in_flight_grows_with_the_prompt(
    prompt_gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the prompt adds its state and, on the device, one layer's table of it and of its
    gradients, in models of 2 layers and of 4."""
    monkeypatch.setattr(selection, "BLOCK", 256)  # keys scored at a time, fewer than the prompt has
    peaks = {}
    for num_layers in (2, 4):
        for length in (512, 1024):
            changes = {"num_hidden_layers": num_layers, "index_topk_pattern": "FS" * 4}
            model = tiny_model("glm_moe_dsa", index_topk=16, **changes)
            groups = random_groups([(length + 1, (2,))])
            engine = Engine(
                model, config(chunk_size=256, page_size=256, prompt_gradient=prompt_gradient)
            )
            with PeakTensorBytes() as counter:
                engine.accumulate(groups, RandomLoss(groups))
            peaks[num_layers, length] = counter.peak_bytes - engine.store.peak_bytes
    table = 512 * (20 + 8) * 4  # of one layer, for the tokens that the longer prompt has more
    for num_layers in (2, 4):
        growth = peaks[num_layers, 1024] - peaks[num_layers, 512]
        assert growth <= 2.1 * table, (num_layers, growth / table)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("model_type", ["glm5_next", "deepseek_v4", "minimax_m3_vl", "qwen4_exp"])
def test_other_ways_to_select_tokens_are_refused_by_name(model_type: str) -> None:
    """Their indexers pool, compress or share keys in ways that these pages do not hold."""
    model = tiny_model("llama")
    model.config.model_type = model_type
    with pytest.raises(UnsupportedModelError, match=rf"{model_type}.*selects tokens"):
        Engine(model)


def test_an_indexer_of_another_class_is_refused() -> None:
    """Also within a served model_type: a class of remote code, for example."""
    model = tiny_model("glm_moe_dsa")
    kind = type(model.model.layers[0].self_attn.indexer)
    model.model.layers[0].self_attn.indexer.__class__ = type("PooledIndexer", (kind,), {})
    with pytest.raises(UnsupportedModelError, match="PooledIndexer selects tokens in a way"):
        Engine(model)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "llama"])
def test_sums_for_a_loss_that_does_not_exist_are_refused(family: str) -> None:
    """GLM balances its experts by a bias that no gradient trains."""
    with pytest.raises(ConfigError, match=rf"none for {family}\. Set output_router_logits=False"):
        Engine(tiny_model(family), config(router_statistics=True))
