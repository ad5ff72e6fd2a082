"""Decoding responses from captured state, by transformers' own `generate`.

Sampling, logits processors and stopping criteria are transformers'; what differs is the cache: the
prompt's pages are read in place by all members, and each member adds its own tokens only.
"""

from typing import Any

import torch
from torch import Tensor

from .engine import Engine
from .state import DecodeCache, Reader


def generate(
    engine: Engine, prompt_ids: Tensor, num_members: int, **generate_options: Any
) -> Tensor:
    """Responses to one prompt.

    The prompt is captured if its state is not held, and stays held for scoring and replay. If the
    prompt continues one that is held (a tool's answer appended to an earlier turn), only the rest
    is run.

    Args:
        prompt_ids: `[P]` on the model's device.
        num_members: G, how many responses.
        generate_options: for `model.generate`; beam search and assisted decoding are not served.

    Returns:
        `[G, P + R]`: prompt and response, padded as `generate` pads.
    """
    version = engine.policy_version
    state = engine.prompts.find(prompt_ids, version)
    if state is None:
        state = engine.prompts.find_prefix(prompt_ids, version) or engine.capture(prompt_ids)
    decoder = engine.decoder
    histories = [state.history(layer) for layer in range(decoder.num_layers)]
    reader = Reader(histories, engine.store, state.segment.num_tokens, engine.config.attention)
    rows = prompt_ids.expand(num_members, -1)
    model: Any = decoder.base
    with decoder.attached(), engine.ledger.phase("rollout", 0), decoder.autocast():
        output = model.generate(
            input_ids=rows,
            attention_mask=torch.ones_like(rows),
            cache=DecodeCache(reader),
            **generate_options,
        )
    assert isinstance(output, Tensor)
    engine.ledger.add_tokens("rollout", num_members * (output.shape[1] - prompt_ids.numel()))
    return output
