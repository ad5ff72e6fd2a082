"""Checkpointing frees what routers and experts compute; what is left grows as a formula says.

Layers are checkpointed as a whole, so of each stays what it began with and what it found in its
history; the intermediates of experts exist for one layer at a time.
"""

import functools

import pytest
import torch

from longstraw import Engine, EngineConfig
from longstraw.audit import PeakTensorBytes
from tests.engine.compare import RandomLoss, random_groups
from tests.models import tiny_model

TOKENS = 64
"""Of the prompt's captured part and of the response; one chunk each."""
WIDTH = 256
"""Of each expert."""
FLOAT = 4


@functools.cache
def update(num_layers: int, is_checkpointed: bool) -> tuple[int, Engine]:
    """Peak bytes of one update with gradients allocated, and the engine.

    Layers have an indexer and none in turn; the first is dense. Two wide experts, of which each
    token takes both: how large an expert's part is depends on no routing. The prompt is held
    constant, so that the one backward is that of the response's one chunk.
    """
    model = tiny_model(
        "glm_moe_dsa",
        num_hidden_layers=num_layers,
        index_topk_pattern="FS" * (num_layers // 2),
        n_routed_experts=2,
        moe_intermediate_size=WIDTH,
    ).train()
    if is_checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    config = EngineConfig(chunk_size=TOKENS, page_size=16, prompt_gradient="stopped")
    engine = Engine(model, config)
    (group,) = random_groups([(TOKENS + 1, (TOKENS,))])
    loss_of = RandomLoss([group])
    with PeakTensorBytes() as counter:
        engine.accumulate([group], loss_of)
    return counter.peak_bytes, engine


def growth(is_checkpointed: bool) -> int:
    """Bytes of two more layers, one with an indexer and one without, both with experts."""
    return update(4, is_checkpointed)[0] - update(2, is_checkpointed)[0]


def test_a_checkpointed_layer_keeps_what_it_read_and_nothing_of_its_experts() -> None:
    """A layer's input `[C, E]`, attention's result in latents `[C, H, r]` and its `[C, H]`
    log-sum-exp, of an indexer its selection `[C, K]`, beside the prompt's state: within 1 %."""
    shallow, deep = (update(num_layers, True)[1].decoder for num_layers in (2, 4))
    config = deep.model.config
    heads = config.num_attention_heads
    numbers = 2 * (config.hidden_size + heads * (config.kv_lora_rank + 1)) + config.index_topk
    state = [d.state_bytes(TOKENS, with_cotangents=False) for d in (shallow, deep)]
    formula = TOKENS * numbers * FLOAT + state[1] - state[0]
    assert growth(is_checkpointed=True) == pytest.approx(formula, rel=0.01)


def test_without_checkpointing_the_experts_of_all_layers_are_held() -> None:
    """Gate, up and product of two experts per token, in each layer: by them alone its graph is
    more than eight times what is left of it, so the formula above has no room for any."""
    experts = 2 * TOKENS * 2 * 3 * WIDTH * FLOAT
    assert growth(is_checkpointed=False) > experts > 8 * growth(is_checkpointed=True)
