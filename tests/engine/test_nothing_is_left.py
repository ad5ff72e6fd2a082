"""After a step no tensor of it lives, without help from Python's garbage collector.

A circle through autograd's graph is one that the collector cannot see: its tensors stay for ever.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from longstraw import Engine, EngineConfig, PromptGroup
from longstraw.audit import PeakTensorBytes
from longstraw.members import GroupScores
from tests.models import FAMILIES, VOCAB, tiny_model

PROMPT_TOKENS, CHUNK_SIZE = 200, 64
SMALL = 1024
"""Bytes of buffers that a module makes in its first forward and keeps."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live_bytes_after_steps(
    family: str, prompt_gradient: str, response_tokens: int, num_steps: int = 2
) -> list[int]:
    """Bytes of tensors that live after each step and were made since the first began."""
    model = tiny_model(family)
    if family != "gpt2":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    config = EngineConfig(chunk_size=CHUNK_SIZE, page_size=16, prompt_gradient=prompt_gradient)
    engine = Engine(model, config)
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(2, VOCAB, (length,), generator=generator)

    group = PromptGroup(tokens(PROMPT_TOKENS), [tokens(response_tokens) for _ in range(3)])
    advantages = torch.linspace(-1, 1, 3)[:, None]

    def loss_of(scores: list[GroupScores]) -> torch.Tensor:
        return -(scores[0].logps * advantages).mean()

    found = []
    with PeakTensorBytes() as counter:
        for _ in range(num_steps):
            engine.accumulate([group], loss_of)
            engine.finalize()
            model.zero_grad(set_to_none=True)
            engine.weights_changed()
            found.append(counter.live_bytes)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_leaves_nothing(family: str, no_collector: None) -> None:
    """Also where a window ends behind most of a chunk, in every layer (mistral)."""
    first, second = live_bytes_after_steps(family, "exact", 16)
    assert first == second <= SMALL


@pytest.mark.parametrize("prompt_gradient", ["exact", "stopped"])
@pytest.mark.parametrize("family", ["mistral", "qwen3_5"])
def test_responses_of_several_chunks_leave_nothing(
    family: str, prompt_gradient: str, no_collector: None
) -> None:
    first, second = live_bytes_after_steps(family, prompt_gradient, CHUNK_SIZE + 40)
    assert first == second <= SMALL
