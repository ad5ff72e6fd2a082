"""What nobody reads is not computed: of prompt tokens the last layer needs keys and values only."""

from typing import Any

import pytest
import torch
from torch import nn

from longstraw import Engine, EngineConfig
from tests.engine.compare import RandomLoss, gradients, random_groups, worst_error
from tests.marks import slow_but
from tests.models import FAMILIES, Float64Islands, tiny_model

SHAPES = ((53, (9, 14)),)


class TokensSeen:
    """Counts the tokens that pass a module's forward."""

    def __init__(self, module: nn.Module) -> None:
        self.num_tokens = 0
        module.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.num_tokens += args[0].shape[:-1].numel()


@pytest.mark.parametrize("mode", ["exact", "stopped"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_the_last_layers_mlp_runs_responses_only(mode: str, checkpointing: bool) -> None:
    """Scored, replayed, and replayed again under checkpointing; prompts of 52 tokens never."""
    model = tiny_model("llama")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    seen = TokensSeen(model.model.layers[-1].mlp)
    groups = random_groups(SHAPES)
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=8, prompt_gradient=mode))
    engine.accumulate(groups, RandomLoss(groups))
    assert seen.num_tokens == (3 if checkpointing else 2) * sum(SHAPES[0][1])


def test_it_runs_everything_where_its_routing_counts() -> None:
    model = tiny_model("qwen3_moe")
    seen = TokensSeen(model.model.layers[-1].post_attention_layernorm)
    groups = random_groups(SHAPES)
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=8, router_statistics=True))
    engine.accumulate(groups, RandomLoss(groups))
    # Captured and run again: the prompt. Scored and replayed: responses, with their last tokens.
    assert seen.num_tokens == 2 * 52 + 2 * (10 + 15)


@pytest.mark.parametrize("family", slow_but(["llama", "qwen3_5", "glm_moe_dsa"], FAMILIES))
def test_ending_early_changes_no_gradient(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, for every family."""
    found = []
    for may_end_early in (True, False):
        if not may_end_early:
            monkeypatch.setattr("longstraw.passes.SegmentPasses._may_end_early", False)
        model = tiny_model(family).double()
        groups = random_groups(SHAPES)
        engine = Engine(model, EngineConfig(chunk_size=16, page_size=8))
        with Float64Islands():
            engine.accumulate(groups, RandomLoss(groups))
        found.append(gradients(model))
    error, name = worst_error(*found)
    assert error == 0, name
    assert all(torch.isfinite(grad).all() for grad in found[0].values())
