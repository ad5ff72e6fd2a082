"""The state of Gated DeltaNet layers: what it is, what it costs, and that no part of it is lost.

Their gradients are compared with the definition in `test_exact_gradient`, as for every family.
Errors by chunk: `pytest tests/engine/test_gated_deltanet.py --log-cli-level=INFO`.
"""

import logging
from itertools import product
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import DynamicCache

from longstraw import (
    ConfigError,
    Engine,
    EngineConfig,
    PromptGroup,
    PromptStateError,
    generate,
    generate_rows,
)
from longstraw.audit import PeakTensorBytes
from longstraw.models.gated_deltanet import DeltaNetShape
from longstraw.state import PageStore, Snapshot
from longstraw.state.recurrent import ChunkRecurrence
from tests.engine.compare import (
    RandomLoss,
    engine_gradients,
    full_sequence_gradients,
    gradients,
    random_groups,
    worst_error,
)
from tests.marks import slow_but
from tests.models import Float64Islands, tiny_model

logger = logging.getLogger("tests.gated_deltanet")
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
RECURRENT = (0, 2)
"""Layers of the tiny models; the others attend."""


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"chunk_size": 16, "page_size": 8, **changes})


# ---------------------------------------------------------------- what it is


@pytest.mark.parametrize("family", slow_but(["qwen3_5"], HYBRIDS))
def test_state_at_every_boundary_is_what_the_model_would_have_there(family: str) -> None:
    """Boundaries of chunks of 1, 2 and 16 tokens, against the model's own prefill from the start:
    its recurrent state, and the last three inputs of its convolution. fp64."""
    model = tiny_model(family).double()
    ids = random_groups([(34, (1,))])[0].prompt_ids
    for chunk_size in (1, 2, 16):
        engine = Engine(model, config(chunk_size=chunk_size))
        with Float64Islands():
            state = engine.capture(ids)
        for chunk in state.segment.chunks(chunk_size):
            expected = DynamicCache(config=model.config)
            with Float64Islands(), torch.no_grad():
                model(ids[None, : chunk.stop], cache=expected, use_cache=True)
            for layer in RECURRENT:
                (snapshot,) = state.pages(layer, chunk)
                assert isinstance(snapshot, Snapshot) and snapshot.start == chunk.stop
                stock: Any = expected.layers[layer]
                error = (snapshot.key - stock.recurrent_states[0]).abs().max()
                assert error <= 1e-10 * stock.recurrent_states[0].abs().max()
                error = (snapshot.value - stock.conv_states[0][..., -3:]).abs().max()
                assert error <= 1e-10 * stock.conv_states[0].abs().max()


def test_readers_never_change_a_snapshot() -> None:
    """Members of 1 to 20 tokens scored and replayed on one prompt leave its snapshots as they were,
    to the last bit; the models' own cache writes them in place."""
    model = tiny_model("qwen3_5")
    (group,) = random_groups([(40, (20, 1, 2, 7))])
    engine = Engine(model, config(prompt_gradient="stopped"))
    state = engine.capture(group.prompt_ids)
    last = state.segment.chunks(16)[-1]
    snapshots = [state.pages(layer, last)[0] for layer in RECURRENT]
    before = [(s.key.clone(), s.value.clone()) for s in snapshots]
    engine.score(group)
    generate(engine, group.prompt_ids, 3, max_new_tokens=5, do_sample=False)
    open_group = type(group)(group.prompt_ids, group.completion_ids, is_complete=False)
    engine.accumulate([open_group], RandomLoss([group]))
    for snapshot, (key, value) in zip(snapshots, before, strict=True):
        assert torch.equal(snapshot.key, key) and torch.equal(snapshot.value, value)


# ---------------------------------------------------------------- no part is lost


@pytest.mark.parametrize(
    ("family", "prompt_gradient"),
    slow_but([("qwen3_5", "exact")], product(HYBRIDS, ["exact", "stopped"])),
)
def test_chunks_of_any_size_give_the_full_sequence_gradient(
    family: str, prompt_gradient: str
) -> None:
    """Chunks of 1, 2 and 3 tokens, shorter than the convolution's filter, one that fits no length,
    and one that exceeds all; four ragged members, responses of one to five tokens. fp64."""
    groups = random_groups([(14, (5, 1, 2, 3))])
    model = tiny_model(family).double()
    expected = full_sequence_gradients(model, groups, prompt_gradient=prompt_gradient)
    for chunk_size in (1, 2, 3, 5, 100):
        options = config(chunk_size=chunk_size, page_size=2, prompt_gradient=prompt_gradient)
        error, name = worst_error(engine_gradients(model, groups, options), expected)
        logger.info(f"| {family} | {prompt_gradient} | {chunk_size} | {error:.1e} | {name} |")
        assert error <= 1e-9, f"chunks of {chunk_size}: {name}"


@pytest.mark.parametrize("lost", ["recurrent", "conv"])
def test_a_lost_cotangent_of_either_part_would_be_seen(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted mistake: the forward, and so the loss, is as it was."""
    original = PageStore.add_snapshot_cotangent

    def lossy(self: PageStore, snapshot: Snapshot, recurrent: Any, conv: Any) -> None:
        recurrent = recurrent * 0 if lost == "recurrent" else recurrent
        original(self, snapshot, recurrent, conv * 0 if lost == "conv" else conv)

    monkeypatch.setattr(PageStore, "add_snapshot_cotangent", lossy)
    groups = random_groups([(40, (5, 9))])
    model = tiny_model("qwen3_5").double()
    expected = full_sequence_gradients(model, groups)
    assert worst_error(engine_gradients(model, groups, config()), expected)[0] > 1e-2


def test_a_state_that_forgets_the_prompt_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: recurrent layers of later chunks begin anew."""
    monkeypatch.setattr(ChunkRecurrence, "read_state", lambda *_: None)
    groups = random_groups([(40, (5, 9))])
    model = tiny_model("qwen3_5").double()
    expected = full_sequence_gradients(model, groups)
    assert worst_error(engine_gradients(model, groups, config()), expected)[0] > 1e-2


def test_single_tokens_never_reach_the_kernel_without_a_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """flash-linear-attention's kernel for single tokens cannot be differentiated. Chunks and
    responses of one token go through the chunked one; decoding may use it."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    calls = []

    def step(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    original = modeling_qwen3_5.torch_recurrent_gated_delta_rule
    monkeypatch.setattr(modeling_qwen3_5, "torch_recurrent_gated_delta_rule", step)
    groups = random_groups([(6, (1, 2, 3))])
    model = tiny_model("qwen3_5")
    engine = Engine(model, config(chunk_size=1))
    engine.accumulate(groups, RandomLoss(groups))
    engine.finalize()
    assert not calls
    generate(engine, groups[0].prompt_ids, 1, max_new_tokens=2, do_sample=False)
    assert calls


def test_the_convolution_always_sees_its_whole_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for it are wrong or missing below the width of the filter: inputs before the chunk
    stand in front, zeros at the beginning of a sequence."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    original, widths = modeling_qwen3_5.causal_conv1d_fn, []

    def convolve(x: Any, *args: Any, **kwargs: Any) -> Any:
        widths.append(x.shape[-1])
        return original(x, *args, **kwargs)

    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", convolve)
    groups = random_groups([(6, (1, 2, 3))])
    Engine(tiny_model("qwen3_5"), config(chunk_size=1)).accumulate(groups, RandomLoss(groups))
    assert min(widths) == 4


def test_without_its_cache_a_layer_raises() -> None:
    """It would begin at a state of zeros, and nothing would look wrong."""
    model = tiny_model("qwen3_5")
    engine = Engine(model)
    with engine.decoder.attached(), pytest.raises(PromptStateError, match="without LongStraw"):
        model.get_decoder().layers[0].linear_attn(torch.zeros(1, 3, 48))


def test_the_model_is_as_before_afterwards() -> None:
    model = tiny_model("qwen3_5")
    ids = random_groups([(9, (1,))])[0].prompt_ids[None]
    with torch.no_grad():
        before = model(ids).logits
        Engine(model, config()).capture(ids[0])
        assert torch.equal(model(ids).logits, before)
    assert "forward" not in vars(model.get_decoder().layers[0].linear_attn)


# ---------------------------------------------------------------- what it costs

# 4 value heads of 8 x 6 in fp32, and 3 inputs of 2 * 2 * 8 + 4 * 6 channels; two layers.
SNAPSHOT = 2 * (4 * 8 * 6 * 4 + 56 * 3 * 4)
PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Two attention layers, keys and values of 2 heads of 16, fp32."""


@pytest.mark.parametrize("prompt_len", [33, 65, 257], ids="P{}".format)
def test_recurrent_state_is_constant_in_the_prompt(prompt_len: int) -> None:
    """Stopped: the snapshot behind the last chunk and no other, however long the prompt."""
    engine = Engine(tiny_model("qwen3_5"), config(prompt_gradient="stopped"))
    engine.capture(random_groups([(prompt_len, (1,))])[0].prompt_ids)
    assert engine.store.bytes_in_use == (prompt_len - 1) * PER_TOKEN + SNAPSHOT
    assert engine.store.peak_bytes == engine.store.bytes_in_use


def test_an_exact_gradient_keeps_a_snapshot_for_each_chunk() -> None:
    """64 tokens in chunks of 16, captured: four of them. After the members have been replayed, the
    last one has cotangents as well; that is what was planned, to the byte."""
    engine = Engine(tiny_model("qwen3_5"), config())
    (group,) = random_groups([(65, (5, 3))])
    engine.capture(group.prompt_ids)
    assert engine.store.bytes_in_use == 64 * PER_TOKEN + 4 * SNAPSHOT
    assert engine.store.bytes_in_use == engine._passes.state_bytes(64)
    open_group = type(group)(group.prompt_ids, group.completion_ids, is_complete=False)
    engine.accumulate([open_group], RandomLoss([group]))
    assert engine.store.bytes_in_use == 2 * 64 * PER_TOKEN + 5 * SNAPSHOT
    assert engine.store.bytes_in_use == engine._passes.state_bytes(64, with_cotangents=True)
    engine.finalize()
    assert engine.store.bytes_in_use == 0
    assert engine.store.peak_bytes == 2 * 64 * PER_TOKEN + 5 * SNAPSHOT


def test_prompts_that_begin_alike_keep_one_snapshot_each() -> None:
    """Stopped: the shared 64 tokens, and 40 and 24 more behind them, are three states, each of
    several chunks, and no backward of theirs will come."""
    beginning, first, second = (g.prompt_ids for g in random_groups([(64, ()), (41, ()), (25, ())]))
    prompts = [torch.cat([beginning, rest]) for rest in (first, second)]
    groups = [
        PromptGroup(ids, [beginning[:3], beginning[5:9]], is_complete=False) for ids in prompts
    ]
    options = config(prompt_gradient="stopped", min_shared_tokens=16)
    engine = Engine(tiny_model("qwen3_5"), options)
    engine.accumulate(groups, RandomLoss(groups))
    # The shared run ends a token early: its last one predicts two different ones.
    tokens = 63 + (1 + 40) + (1 + 24)
    assert engine.store.bytes_in_use == tokens * PER_TOKEN + 3 * SNAPSHOT


@pytest.mark.parametrize(
    "change",
    [{"page_device": "host"}, {"page_device": "host", "state_budget_bytes": 60_000}],
    ids=["host", "files"],
)
def test_where_snapshots_lie_does_not_change_a_bit(change: dict[str, Any], tmp_path: Any) -> None:
    """In host memory, and most of them in files, with responses of several chunks."""
    groups = random_groups([(90, (9, 40))])
    if "state_budget_bytes" in change:
        change = {**change, "spill_dir": str(tmp_path)}
    base = engine_gradients(tiny_model("qwen3_5").double(), groups, config())
    model = tiny_model("qwen3_5").double()
    engine = Engine(model, config(**change))
    with Float64Islands():
        engine.accumulate(groups, RandomLoss(groups))
        engine.finalize()
    found = gradients(model)
    for name, grad in base.items():
        assert torch.equal(found[name], grad), name
    assert (engine.store.peak_disk_bytes > 0) == ("spill_dir" in change)


def test_turns_of_a_stopped_prompt_keep_their_boundaries() -> None:
    """A rollout captures a turn of several chunks before anyone knows that it will be replayed as
    a part of responses: its own backward needs all its snapshots."""
    (group,) = random_groups([(30, (45, 45))])
    turn = group.completion_ids[0][:40]
    members = [torch.cat([turn, ids[40:]]) for ids in group.completion_ids]
    group = type(group)(group.prompt_ids, members)
    model = tiny_model("qwen3_5").double()
    expected = full_sequence_gradients(model, [group], prompt_gradient="stopped")
    engine = Engine(model, config(prompt_gradient="stopped"))
    with Float64Islands():
        engine.capture(group.prompt_ids)
        engine.capture(torch.cat([group.prompt_ids, turn]))
        engine.accumulate([group], RandomLoss([group]))
        engine.finalize()
    found = {n: p.grad for n, p in model.named_parameters()}
    assert worst_error(found, expected)[0] <= 1e-9


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_long_response_takes_the_graph_of_one_block(family: str) -> None:
    """The LongStraw paper replays 8,192 tokens as four blocks of 2,048 in reverse; here 512 as
    four of 128. Beside the response's own state the peak is that of a response of one block within
    5 %, and less than half of that in a single pass."""
    peaks = {}
    for response_len, chunk_size in ((128, 128), (512, 128), (512, 512)):
        model = tiny_model(family)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # as in every step but the first
        (group,) = random_groups([(33, (response_len,))])
        engine = Engine(model, config(chunk_size=chunk_size, prompt_gradient="stopped"))
        loss_of = RandomLoss([group])
        with PeakTensorBytes() as counter:
            engine.accumulate([group], loss_of)
        peaks[response_len, chunk_size] = counter.peak_bytes - engine.store.peak_bytes
    assert peaks[512, 128] <= 1.05 * peaks[128, 128]
    assert peaks[512, 128] < 0.5 * peaks[512, 512]


def test_a_recurrent_last_layer_ends_the_forward_with_its_state() -> None:
    """Of prompt tokens its output is dead work, as an attention layer's is."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    model = tiny_model("qwen3_5", num_hidden_layers=3, layer_types=kinds).double()
    groups = random_groups([(40, (5, 9))])
    expected = full_sequence_gradients(model, groups)
    seen = []
    model.model.layers[-1].mlp.register_forward_pre_hook(lambda _, x: seen.append(x[0].shape[1]))
    ours = engine_gradients(model, groups, config(replay_batch=1))
    assert worst_error(ours, expected)[0] <= 1e-9
    assert sum(seen) == 2 * (5 + 9)  # scored and replayed


# ---------------------------------------------------------------- decoding


def test_rows_of_different_histories_go_on_from_their_own_states() -> None:
    """Two members of one conversation at different turns, another prompt, and one token."""
    model = tiny_model("qwen3_5")
    first, second = (g.prompt_ids for g in random_groups([(40, (1,)), (21, (1,))]))
    contexts = [first, torch.cat([first, second[:9]]), second, second[:1], first]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    engine = Engine(model, config())
    engine.capture(first)
    for context, row in zip(contexts, generate_rows(engine, contexts, **options), strict=True):
        mask = torch.ones_like(context[None])
        expected = model.generate(context[None], attention_mask=mask, **options)
        assert torch.equal(row, expected[0, context.numel() :])


# ---------------------------------------------------------------- through the multimodal wrapper


WRAPPERS = {
    "qwen3_5": (hf.Qwen3_5Config, hf.Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (hf.Qwen3_5MoeConfig, hf.Qwen3_5MoeForConditionalGeneration),
}


def multimodal(family: str) -> Any:
    """The tiny text model below a wrapper with a vision tower."""
    text: Any = tiny_model(family)
    config_class, model_class = WRAPPERS[family]
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 48,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    wrapper = model_class(config_class(text_config=text.config.to_dict(), vision_config=vision))
    wrapper.config.text_config._experts_implementation = "eager"
    wrapper.model.language_model.load_state_dict(text.model.state_dict())
    wrapper.lm_head.load_state_dict(text.lm_head.state_dict())
    return wrapper.eval()


@pytest.mark.parametrize("family", slow_but(["qwen3_5"], WRAPPERS))
def test_text_through_the_multimodal_wrapper_is_the_same(family: str) -> None:
    """Gradients of all text parameters, and greedy tokens after another prompt's positions were
    left in the wrapper."""
    groups = random_groups([(37, (9, 3))])
    expected = full_sequence_gradients(tiny_model(family).double(), groups)
    model = multimodal(family).double()
    found = engine_gradients(model, groups, config())
    found = {n.replace("model.language_model.", "model."): g for n, g in found.items()}
    assert worst_error(found, expected)[0] <= 1e-9
    model = multimodal(family)
    model.model.rope_deltas = torch.tensor([[5]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = groups[0].prompt_ids
    engine = Engine(model, config())
    generate(engine, ids, 3, **options)  # of which the wrapper remembers three rows
    (row,) = generate(engine, ids, 1, **options)
    plain = tiny_model(family)
    assert torch.equal(row, plain.generate(ids[None], **options)[0])


# ---------------------------------------------------------------- what is refused


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    shape = DeltaNetShape(frozenset({0}), 16, 48, 128, 128, 4)
    for sp_size in (1, 2, 4, 8, 16):
        shape.check_ranks(sp_size)
    with pytest.raises(ConfigError, match="16 key heads and 48 value heads.*1, 2, 4, 8, 16"):
        shape.check_ranks(3)


def test_chunks_beyond_31_bits_are_refused() -> None:
    """Of Qwen3.6-27B: 48 heads of 128 make 6,144 elements a token."""
    shape = DeltaNetShape(frozenset({0}), 16, 48, 128, 128, 4)
    most = (2**31 - 1) // 6144
    shape.check_chunk(most, 1, sp_size=1)
    shape.check_chunk(8 * most, 1, sp_size=8)
    with pytest.raises(ConfigError, match=f"{most:,} or less"):
        shape.check_chunk(most + 1, 1, sp_size=1)
    with pytest.raises(ConfigError, match=f"{most // 4:,} or less"):
        shape.check_chunk(most, 4, sp_size=1)
    with pytest.raises(ConfigError, match="chunk_size"):
        Engine(tiny_model("qwen3_5"), EngineConfig(chunk_size=2**27))
