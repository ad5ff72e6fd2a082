"""Decoding from captured state is transformers' own decoding, with the prompt run once."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from longstraw import Engine, EngineConfig, MemoryPlanError, generate, generate_rows
from longstraw.audit import ties_decided
from tests.marks import slow_but
from tests.models import FAMILIES, VOCAB, tiny_model


def random_prompt(length: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def plain_generate(model, prompt: torch.Tensor, **options) -> torch.Tensor:
    """transformers' own; where tokens are selected, of equal scores the first."""
    with ties_decided(model, "first"):
        return model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **options)


def captured_tokens(engine: Engine) -> int:
    return next(row["tokens"] for row in engine.ledger.table() if row["phase"] == "capture")


@pytest.mark.parametrize(
    "family",
    slow_but(["llama", "gemma2", "gpt_oss", "qwen3_5", "glm_moe_dsa", "gpt2"], FAMILIES),
)
def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    """45 prompt tokens in chunks of 16, beyond every sliding window; three members at once."""
    model = tiny_model(family)
    prompt, options = random_prompt(45), {"max_new_tokens": 20, "do_sample": False}
    expected = plain_generate(model, prompt, **options)
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=8))
    found = generate(engine, prompt, 3, **options)
    assert all(torch.equal(row, expected[0]) for row in found)


def test_sampling_repeats_with_a_seed_and_differs_between_members() -> None:
    model = tiny_model("llama")
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=8))
    prompt, options = random_prompt(45), {"max_new_tokens": 20, "do_sample": True, "top_k": 0}
    torch.manual_seed(5)
    first = generate(engine, prompt, 3, **options)
    torch.manual_seed(5)
    assert torch.equal(first, generate(engine, prompt, 3, **options))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_longer_prompt_continues_from_a_captured_one(family: str) -> None:
    """A tool's answer appended to a turn: only the new tokens are captured."""
    model = tiny_model(family)
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=8))
    prompt = random_prompt(45)
    engine.capture(prompt)
    longer = torch.cat([prompt, random_prompt(9, seed=3)])
    options = {"max_new_tokens": 20, "do_sample": False}
    found = generate(engine, longer, 1, **options)
    assert torch.equal(found, plain_generate(model, longer, **options))
    assert captured_tokens(engine) == longer.numel() - 1


def test_a_prompt_of_one_token_needs_no_state() -> None:
    model = tiny_model("llama")
    prompt, options = random_prompt(1), {"max_new_tokens": 8, "do_sample": False}
    found = generate(Engine(model), prompt, 2, **options)
    assert all(torch.equal(row, plain_generate(model, prompt, **options)[0]) for row in found)


def test_the_model_attends_as_before_afterwards() -> None:
    """Paged attention is switched on inside the engine's calls only."""
    model = tiny_model("llama")
    before = model.config._attn_implementation
    engine = Engine(model)
    engine.capture(random_prompt(20))
    assert model.config._attn_implementation == before
    model(random_prompt(5)[None])


# ---------------------------------------------------------------- rows of different histories


def contexts_that_share(num: int = 5) -> list[torch.Tensor]:
    """Two conversations that have gone different ways, a third prompt, and one token."""
    prompt = random_prompt(45)
    first = [torch.cat([prompt, random_prompt(9 + 7 * i, seed=3 + i)]) for i in range(2)]
    return [*first, random_prompt(12, seed=8), first[0], random_prompt(1, seed=9)][:num]


@pytest.mark.parametrize("family", slow_but(["gemma2", "qwen3_5", "glm_moe_dsa", "gpt2"], FAMILIES))
def test_rows_of_different_histories_are_decoded_together(family: str) -> None:
    """Lengths of 1 to 61 tokens, some within and some beyond every sliding window; what two rows
    have in common is read once. Each row's greedy tokens are those of `generate` on it alone."""
    model = tiny_model(family)
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=8, min_shared_tokens=4))
    options = {"max_new_tokens": 20, "do_sample": False}
    contexts = contexts_that_share()
    found = generate_rows(engine, contexts, **options)
    for row, context in zip(found, contexts, strict=True):
        expected = plain_generate(model, context, **options)[0, context.numel() :]
        assert torch.equal(row[: expected.numel()], expected)
    rollout = next(row for row in engine.ledger.table() if row["phase"] == "rollout")
    assert rollout["calls"] == 1


def test_contexts_that_do_not_fit_together_are_decoded_one_after_the_other() -> None:
    model = tiny_model("llama")
    per_token = Engine(model).decoder.state_bytes(1, False)
    config = EngineConfig(chunk_size=16, page_size=8, state_budget_bytes=64 * per_token)
    engine = Engine(model, config)
    options = {"max_new_tokens": 6, "do_sample": False}
    contexts = contexts_that_share()
    found = generate_rows(engine, contexts, **options)
    for row, context in zip(found, contexts, strict=True):
        assert torch.equal(row, plain_generate(model, context, **options)[0, context.numel() :])
    rollout = next(row for row in engine.ledger.table() if row["phase"] == "rollout")
    assert rollout["calls"] > 1
    with pytest.raises(MemoryPlanError):
        generate_rows(engine, [random_prompt(90)], **options)


def test_padding_is_the_configurations_token_for_logits_processors() -> None:
    """They see the padded rows, and would take token 0 for a part of the shorter context."""
    model = tiny_model("llama")
    seen = []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(input_ids.clone())
            return scores

    generate_rows(
        Engine(model, EngineConfig(chunk_size=16, page_size=8)),
        [random_prompt(9), random_prompt(5)],
        max_new_tokens=2,
        do_sample=False,
        pad_token_id=7,
        logits_processor=LogitsProcessorList([Watch()]),
    )
    assert seen[0][1, :4].tolist() == [7] * 4


def test_more_rows_than_have_room_for_their_own_tokens_are_decoded_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at a time; batches that end at different lengths are padded to one."""
    monkeypatch.setattr("longstraw.rollout._most_rows", lambda engine, options: 2)
    model = tiny_model("llama")
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=8))
    prompt, options = random_prompt(45), {"max_new_tokens": 20, "do_sample": False}
    expected = plain_generate(model, prompt, **options)
    found = generate(engine, prompt, 5, **options)
    assert found.shape[0] == 5 and all(torch.equal(row, expected[0]) for row in found)
    rollout = next(row for row in engine.ledger.table() if row["phase"] == "rollout")
    assert rollout["calls"] == 3
