"""Decoding from captured state is transformers' own decoding, with the prompt run once."""

import pytest
import torch

from longstraw import Engine, EngineConfig, generate
from tests.models import FAMILIES, VOCAB, tiny_model


def random_prompt(length: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def plain_generate(model, prompt: torch.Tensor, **options) -> torch.Tensor:
    return model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **options)


@pytest.mark.parametrize("family", FAMILIES)
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
    """A tool's answer appended to a turn: only the new tokens are run."""
    model = tiny_model(family)
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=8))
    prompt = random_prompt(45)
    engine.capture(prompt)
    longer = torch.cat([prompt, random_prompt(9, seed=3)])
    options = {"max_new_tokens": 20, "do_sample": False}
    found = generate(engine, longer, 1, **options)
    assert torch.equal(found, plain_generate(model, longer, **options))
    assert engine.ledger.num_captures == 1


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
