"""The central claim: the engine's gradient is that of the plain full-sequence step.

Everything is in fp64, with the models' fp32 casts lifted, so that a difference is a mistake and not
rounding: mistakes of every kind that we made or planted show as 1e-2 or more, rounding as 1e-10
(gpt-oss, whose experts amplify it) to 1e-14.
"""

import functools
from itertools import product

import pytest
import torch
from peft import LoraConfig, get_peft_model

from longstraw import Engine, EngineConfig
from tests.engine.compare import (
    RandomLoss,
    engine_gradients,
    full_sequence_gradients,
    gradients,
    random_groups,
    worst_error,
)
from tests.marks import slow_but
from tests.models import FAMILIES, Float64Islands, tiny_model

TOLERANCE = 1e-9

# Ragged members, among them responses of one to three tokens; a prompt that is a multiple of no
# chunk size below but 1; two prompts of different length in one update.
SHAPES = ((53, (9, 14, 1, 3, 2)), (24, (5, 17)))
# For chunks of a token or two, whose number is what a test costs.
SHORT = ((25, (9, 1, 4)), (8, (5,)))

MODES = ("exact", "stopped")
# All families, both modes, are in the first test.
BY_POSITION = [family for family in FAMILIES if family != "gpt2"]


@functools.cache
def reference(family: str, prompt_gradient: str, with_router: bool = False, shapes=SHAPES):
    """The definition's gradients, computed once per family and mode."""
    model = tiny_model(family).double()
    return full_sequence_gradients(
        model,
        random_groups(shapes),
        prompt_gradient=prompt_gradient,
        temperature=0.7,
        with_router=with_router,
    )


def config(**changes) -> EngineConfig:
    return EngineConfig(**{"chunk_size": 16, "page_size": 8, "temperature": 0.7, **changes})


@pytest.mark.parametrize("prompt_gradient", ["exact", "stopped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_gives_the_full_sequence_gradient(family: str, prompt_gradient: str) -> None:
    """Every family, both modes. Chunks of 16 tokens in pages of 8: no chunk fits the prompt of 52
    captured tokens, the responses of 14 and 17 tokens reach into a second chunk."""
    ours = engine_gradients(
        tiny_model(family).double(),
        random_groups(SHAPES),
        config(prompt_gradient=prompt_gradient),
    )
    error, name = worst_error(ours, reference(family, prompt_gradient))
    assert error <= TOLERANCE, name


CHUNKS = (1, 2, 7, 12, 24, 40, 500)


@pytest.mark.parametrize(
    ("family", "chunk_size", "prompt_gradient"),
    slow_but(
        [*product(["llama"], CHUNKS, ["exact"]), ("llama", 2, "stopped")],
        product(["llama", "gemma2", "gpt_oss"], CHUNKS, MODES),
    ),
)
def test_chunk_size_does_not_change_the_gradient(
    family: str, chunk_size: int, prompt_gradient: str
) -> None:
    """Of the 24 captured tokens 1, 2, 12 and 24 are divisors and 7 is none; 40 and 500 exceed
    them. Prompt and response together exceed the sliding window."""
    ours = engine_gradients(
        tiny_model(family).double(),
        random_groups(SHORT),
        config(chunk_size=chunk_size, page_size=5, prompt_gradient=prompt_gradient),
    )
    error, name = worst_error(ours, reference(family, prompt_gradient, shapes=SHORT))
    assert error <= TOLERANCE, name


@pytest.mark.parametrize("family", slow_but(["gemma2", "qwen3_5", "glm_moe_dsa"], BY_POSITION))
def test_chunks_of_seven_tokens_serve_every_family(family: str) -> None:
    """An odd chunk, smaller than the sliding window, with three members replayed together."""
    ours = engine_gradients(
        tiny_model(family).double(),
        random_groups(SHAPES),
        config(chunk_size=7, page_size=3, replay_batch=3),
    )
    error, name = worst_error(ours, reference(family, "exact"))
    assert error <= TOLERANCE, name


@pytest.mark.parametrize("prompt_len", [1, 2, 15, 16, 17, 18, 33], ids="P{}".format)
def test_prompts_around_page_and_chunk_boundaries(prompt_len: int) -> None:
    """Pages of 8 and chunks of 16: the last prompt token is not captured, so 17 and 33 tokens fill
    whole chunks, and a prompt of 1 captures nothing."""
    groups = random_groups([(prompt_len, (3, 1, 6))])
    model = tiny_model("qwen3").double()
    expected = full_sequence_gradients(model, groups)
    ours = engine_gradients(model, groups, EngineConfig(chunk_size=16, page_size=8))
    error, name = worst_error(ours, expected)
    assert error <= TOLERANCE, name


@pytest.mark.parametrize(
    ("family", "prompt_gradient", "use_lora"),
    slow_but(
        [
            *product(["llama", "gpt_oss", "glm_moe_dsa"], ["exact"], [False]),
            ("llama", "exact", True),
            ("qwen3_5", "stopped", True),
        ],
        product(BY_POSITION, MODES, [False, True]),
    ),
)
def test_gradient_checkpointing_keeps_the_prompt(
    family: str, prompt_gradient: str, use_lora: bool
) -> None:
    """transformers drops a layer's cache under checkpointing, and attention without a mask would
    then score responses as if there were no prompt; an error of 1e-1 here says that it did."""
    groups = random_groups([(37, (9, 4, 20))])
    model = tiny_model(family).double()
    if use_lora:
        model = _with_lora(model)
    expected = full_sequence_gradients(model, groups, prompt_gradient=prompt_gradient)
    model.activation_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: (Float64Islands(), Float64Islands())}
    )
    model.train()
    ours = engine_gradients(
        model, groups, EngineConfig(chunk_size=16, page_size=8, prompt_gradient=prompt_gradient)
    )
    error, name = worst_error(ours, expected)
    assert error <= TOLERANCE, name


@pytest.mark.parametrize(
    ("family", "prompt_gradient"),
    slow_but(
        [*product(["llama", "gpt_oss", "glm_moe_dsa", "gpt2"], ["exact"]), ("qwen3_5", "stopped")],
        product(FAMILIES, MODES),
    ),
)
def test_lora_gets_its_full_sequence_gradient(family: str, prompt_gradient: str) -> None:
    """A frozen base with adapters on every linear layer: roots without gradient must be left out,
    and adapters of the first layers are reached through the state alone."""
    model = _with_lora(tiny_model(family).double())
    groups = random_groups(SHAPES)
    expected = full_sequence_gradients(model, groups, prompt_gradient=prompt_gradient)
    ours = engine_gradients(
        model, groups, EngineConfig(chunk_size=16, page_size=8, prompt_gradient=prompt_gradient)
    )
    assert all("lora" in name for name in ours)
    error, name = worst_error(ours, expected)
    assert error <= TOLERANCE, name


def _with_lora(model):
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # B starts at zero, which would hide every gradient of A
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data = noise.to(torch.float64)
    return adapted


@pytest.mark.parametrize(
    ("family", "prompt_gradient", "replay_batch"),
    slow_but(
        [
            ("qwen3", "exact", 1),
            ("gpt_oss", "exact", 3),
            ("qwen3_5", "stopped", 1),
            ("glm_moe_dsa", "exact", 3),
        ],
        product(
            ["qwen3", "gemma3", "gpt_oss", "qwen3_5", "qwen3_next", "glm_moe_dsa"], MODES, [1, 3]
        ),
    ),
)
def test_responses_longer_than_chunks_are_replayed_in_reverse(
    family: str, prompt_gradient: str, replay_batch: int
) -> None:
    """Responses of up to five chunks, ragged within a batch: cotangents cross the chunks of a
    response, and rows that have ended ride along as padding."""
    groups = random_groups([(21, (41, 60, 3, 17, 33))])
    model = tiny_model(family).double()
    expected = full_sequence_gradients(model, groups, prompt_gradient=prompt_gradient)
    ours = engine_gradients(
        model,
        groups,
        EngineConfig(
            chunk_size=12, page_size=5, replay_batch=replay_batch, prompt_gradient=prompt_gradient
        ),
    )
    error, name = worst_error(ours, expected)
    assert error <= TOLERANCE, name


@pytest.mark.parametrize(
    ("family", "replay_batch"),
    slow_but(
        [("qwen3_moe", 2), ("qwen3_next", 1)],
        product(["qwen3_moe", "gpt_oss", "qwen3_5_moe", "qwen3_next"], [1, 2]),
    ),
)
def test_load_balancing_loss_reaches_every_token(family: str, replay_batch: int) -> None:
    """The routing sums of prompt and responses, each prompt counted once per member, give the
    auxiliary loss's gradient on all of them."""
    ours = engine_gradients(
        tiny_model(family).double(),
        random_groups(SHAPES),
        config(router_statistics=True, replay_batch=replay_batch),
    )
    error, name = worst_error(ours, reference(family, "exact", with_router=True))
    assert error <= TOLERANCE, name


def test_the_two_modes_differ_by_more_than_rounding() -> None:
    """Guards the tests above: if both references were the same, none of them could fail."""
    error, _ = worst_error(reference("llama", "stopped"), reference("llama", "exact"))
    assert error > 0.1


@pytest.mark.parametrize("lost", ["key", "value"])
def test_a_lost_page_gradient_would_be_seen(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: dropping dK or dV of pages leaves the loss as it is and must fail."""
    from longstraw.state import PageStore

    original = PageStore.add_cotangent

    def lossy(self, page, key_grad, value_grad):
        key_grad = key_grad * 0 if lost == "key" else key_grad
        original(self, page, key_grad, value_grad * 0 if lost == "value" else value_grad)

    monkeypatch.setattr(PageStore, "add_cotangent", lossy)
    ours = engine_gradients(tiny_model("llama").double(), random_groups(SHAPES), config())
    error, _ = worst_error(ours, reference("llama", "exact"))
    assert error > 1e-2


def test_groups_may_come_in_several_calls() -> None:
    """Members of one prompt in three calls: one capture, one prompt backward, the same gradient.

    The loss must be a sum over members for this; then only the order of summation differs.
    """
    (group,) = random_groups([(30, (5, 9, 2))])
    model = tiny_model("llama").double()

    def plain_sum(scores):
        return sum(s.logps.sum() for s in scores)

    with Float64Islands():
        engine = Engine(model, EngineConfig(chunk_size=8, page_size=4))
        engine.accumulate([group], plain_sum)
        engine.finalize()
        expected = gradients(model)
        for member in range(3):
            part = type(group)(group.prompt_ids, [group.completion_ids[member]], is_complete=False)
            engine.accumulate([part], plain_sum)
        assert engine.ledger.num_captures == 2  # one before, one now
        engine.finalize()
    error, name = worst_error(gradients(model), expected)
    assert error <= TOLERANCE, name
    assert engine.store.bytes_in_use == 0


def test_losses_of_one_member_stay_with_it() -> None:
    """RandomLoss without its coupling term would not notice members that see each other; here one
    member's log-probs are scored alone and in company."""
    (group,) = random_groups([(30, (5, 9, 2))])
    model = tiny_model("llama").double()
    with Float64Islands():
        engine = Engine(model, EngineConfig(chunk_size=4, page_size=4, replay_batch=3))
        together = engine.score(group)
        for member, ids in enumerate(group.completion_ids):
            alone = engine.score(type(group)(group.prompt_ids, [ids]))
            row = together.logps[member, : ids.numel()]
            assert torch.allclose(row, alone.logps[0], rtol=0, atol=1e-12)
    assert RandomLoss([group])([together]).isfinite()


def test_groups_with_the_same_prompt_share_its_state() -> None:
    """A dataset may repeat a prompt: two groups in one update, one capture, one prompt backward."""
    first, second = random_groups([(30, (5, 9)), (30, (4,))])
    groups = [first, type(first)(first.prompt_ids, second.completion_ids)]
    model = tiny_model("llama").double()
    expected = full_sequence_gradients(model, groups)
    ours = engine_gradients(model, groups, EngineConfig(chunk_size=8, page_size=4))
    error, name = worst_error(ours, expected)
    assert error <= TOLERANCE, name
