"""Decoding responses from captured state, by transformers' own `generate`.

Sampling, logits processors and stopping criteria are transformers'; what differs is the cache: the
prompt's pages are read in place by all members, and each member adds its own tokens only.
"""

from typing import Any

import torch
from torch import Tensor

from .engine import Engine
from .state import DecodeCache, Reader, SegmentState


def generate(
    engine: Engine, prompt_ids: Tensor, num_members: int, **generate_options: Any
) -> Tensor:
    """Responses to one prompt.

    The prompt is captured if its state is not held, and stays held for scoring and replay. If the
    prompt continues one that is held by a few tokens (a tool's answer appended to an earlier turn),
    only these are run.

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
        state = _continued(engine, prompt_ids, num_members) or engine.capture(prompt_ids)
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
            synced_gpus=False,  # no pass here needs another rank, and ranks make different numbers
            **generate_options,
        )
    assert isinstance(output, Tensor)
    engine.ledger.add_tokens("rollout", num_members * (output.shape[1] - prompt_ids.numel()))
    return output


def _continued(engine: Engine, prompt_ids: Tensor, num_members: int) -> SegmentState | None:
    """The held state that `prompt_ids` continues, if the rest fits one forward of a chunk.

    `generate` runs the rest at once and for each member; a long rest is better captured.
    """
    state = engine.prompts.find_prefix(prompt_ids, engine.policy_version)
    if state is None:
        return None
    rest = prompt_ids.numel() - state.segment.num_tokens
    return state if rest * num_members <= engine.config.chunk_size else None
