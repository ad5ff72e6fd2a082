"""Decoding responses from captured state, by transformers' own `generate`.

Sampling, logits processors and stopping criteria are transformers'; what differs is the cache: what
rows have in common is read in place by all of them, and each row adds its own tokens only.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList

from .distributed import DecodeTravel, SequenceGroup
from .engine import Engine
from .errors import ConfigError, MemoryPlanError
from .state import DecodeCache, FreeMemory, Page, Reader, RowRun, SegmentState


def generate(
    engine: Engine, prompt_ids: Tensor, num_members: int, **generate_options: Any
) -> Tensor:
    """Responses to one prompt.

    Args:
        prompt_ids: `[P]` on the model's device.
        num_members: G, how many responses.
        generate_options: see `generate_rows`.

    Returns:
        `[G, P + R]`: prompt and response, padded as transformers' `generate` pads.
    """
    rows = generate_rows(engine, [prompt_ids] * num_members, **generate_options)
    padding = _option(engine, generate_options, "pad_token_id") or 0
    responses = pad_sequence(rows, batch_first=True, padding_value=padding)
    return torch.cat([prompt_ids.expand(num_members, -1), responses], dim=1)


def generate_rows(
    engine: Engine, contexts: Sequence[Tensor], **generate_options: Any
) -> list[Tensor]:
    """What follows each of several contexts, decoded together.

    A context is captured if its state is not held, and stays held for scoring and replay. Of one
    that continues a held state (a tool's answer appended to an earlier turn) only what is new is
    captured, in chunks, and becomes a segment of its own; so does what several begin with.

    All states stand together, and where they do not fit, as many as do are decoded at a time.

    Collective over the ranks that share a prompt (`sp_size`), with the same contexts. Each attends
    to the pages that it owns; all draw the same tokens, as the first of them would alone.

    Args:
        contexts: each `[P]` on the model's device.
        generate_options: for `model.generate`; beam search and assisted decoding are not served.

    Returns:
        New tokens of each context, padded at the end as `generate` pads.

    Raises:
        MemoryPlanError: the state of one context would not fit.
        DataError: ranks that share a prompt were given different contexts.
        ConfigError: an option by which ranks that share a prompt would end at different times.
    """
    if not contexts:
        return []
    if engine.config.sp_size > 1 and _option(engine, generate_options, "max_time") is not None:
        raise ConfigError(
            "max_time ends generation by each rank's own clock, and ranks that share a prompt "
            "(sp_size > 1) must make the same steps. Use max_new_tokens (max_completion_length in "
            "the trainer)."
        )
    with engine.watch.naming_the_lost():
        return _generate_rows(engine, contexts, generate_options)


def _generate_rows(
    engine: Engine, contexts: Sequence[Tensor], generate_options: dict[str, Any]
) -> list[Tensor]:
    engine.axes.sequence.check_same(contexts, "contexts")
    engine.capture_shared(contexts)
    most_rows = _most_rows(engine, generate_options)
    rows: list[Tensor] = []
    states: list[SegmentState] = []
    for context in contexts:
        state = None if len(states) == most_rows else _capture_beside(engine, context, states)
        if state is None:
            begin = len(rows)
            rows += _decode(engine, contexts[begin : begin + len(states)], states, generate_options)
            states, state = [], engine.capture(context)
        states.append(state)
    return rows + _decode(engine, contexts[len(rows) :], states, generate_options)


def _capture_beside(
    engine: Engine, context: Tensor, states: Sequence[SegmentState]
) -> SegmentState | None:
    """The context's state, or None where it does not fit beside `states`."""
    try:
        return engine.capture(context, keep=states)
    except MemoryPlanError as error:
        is_known = engine.axes.sequence.is_alone or not error.of_one_rank
        if states and is_known:
            return None
        raise


def _decode(
    engine: Engine,
    contexts: Sequence[Tensor],
    states: Sequence[SegmentState],
    generate_options: dict[str, Any],
) -> list[Tensor]:
    width = max(context.numel() for context in contexts)
    # Left-padded, so that all rows go on at the same column; transformers takes each row's
    # positions from the mask. The padding itself is never run: the cache is that far already.
    padding = _option(engine, generate_options, "pad_token_id") or 0
    input_ids = contexts[0].new_full((len(contexts), width), padding)
    mask = torch.zeros_like(input_ids)
    for row, context in enumerate(contexts):
        input_ids[row, width - context.numel() :] = context
        mask[row, width - context.numel() :] = 1
    decoder, model, group = engine.decoder, engine.decoder.base, engine.axes.sequence
    group.share_random_state(decoder.device)
    if not group.is_alone:
        given = generate_options.get("logits_processor") or []
        processors = LogitsProcessorList([*given, _LeadersScores(group)])
        generate_options = {**generate_options, "logits_processor": processors}
    decoder.forget_last_prompt()
    with decoder.attached(), engine.ledger.phase("rollout", 0), decoder.autocast():
        output = model.generate(  # type: ignore[operator]
            input_ids=input_ids,
            attention_mask=mask,
            cache=DecodeCache(_reader(engine, states, width - 1)),
            synced_gpus=False,  # no pass here needs another rank, and ranks make different numbers
            **generate_options,
        )
    assert isinstance(output, Tensor)
    engine.ledger.add_tokens("rollout", len(contexts) * (output.shape[1] - width))
    return list(output[:, width:])


def _reader(engine: Engine, states: Sequence[SegmentState], start: int) -> Reader:
    """The histories of all rows; pages that several read are visited once for them."""
    readers: dict[SegmentState, list[int]] = {}
    ends: dict[SegmentState, list[int]] = {}
    for row, state in enumerate(states):
        ends.setdefault(state, []).append(row)
        for before in state.lineage():
            readers.setdefault(before, []).append(row)
    # Roots first: an indexer, and the table of selected rows, take positions in order.
    readers = dict(sorted(readers.items(), key=lambda item: item[0].depth))
    shifts = [start - state.segment.end for state in states]
    same = not any(shifts) and all(len(rows) == len(states) for rows in readers.values())
    layers, recurrent = range(engine.decoder.num_layers), engine.decoder.recurrent_layers

    def run(pages: list[Page], rows: list[int]) -> RowRun:
        indices = torch.tensor(rows, device=engine.decoder.device)
        return RowRun(pages, indices, [shifts[row] for row in rows])

    runs = [
        # A recurrent layer goes on from where a row's own history ends.
        [run(state.history(layer), rows) for state, rows in ends.items()]
        if layer in recurrent
        else [run(state.own_pages(layer), rows) for state, rows in readers.items()]
        for layer in layers
    ]
    places = engine.decoder.index_places
    index_runs = {
        layer: [run(state.own_pages(place), rows) for state, rows in readers.items()]
        for layer, place in places.items()
    }
    return Reader(
        [states[0].history(layer) if same else [] for layer in layers],
        engine.store,
        start,
        engine.config.attention,
        () if same else runs,
        travel=DecodeTravel(engine.axes.sequence),
        recurrent_layers=recurrent,
        index_histories={i: states[0].history(p) if same else [] for i, p in places.items()},
        index_row_runs={} if same else index_runs,
        index_ties=engine.config.index_ties,
    )


class _LeadersScores(LogitsProcessor):
    """Lets all ranks of a group draw from the scores of the first one.

    They run the same tokens and end with the same scores, to the last bit only if their devices
    are alike. One token that differs would set them apart for good.
    """

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.group.broadcast_(scores.contiguous())


def _most_rows(engine: Engine, generate_options: dict[str, Any]) -> int:
    """How many responses have room for their own keys and values beside what is captured."""
    left = FreeMemory(engine.decoder.device).bytes_left(0)
    num_tokens = _option(engine, generate_options, "max_new_tokens")
    most = 2**31
    if left is not None and num_tokens is not None:
        # Twice: a full buffer is copied into one of double the size.
        decoder = engine.decoder
        per_row = decoder.state_bytes(num_tokens, False) + decoder.snapshot_bytes()
        most = max(1, left // (2 * per_row))
    return engine.axes.sequence.minimum(most)


def _option(engine: Engine, generate_options: dict[str, Any], name: str) -> int | None:
    """What `generate` will take for an option."""
    config = generate_options.get("generation_config") or engine.decoder.base.generation_config
    return generate_options.get(name, getattr(config, name, None))
