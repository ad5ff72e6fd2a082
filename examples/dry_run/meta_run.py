"""What one pass of the engine takes at its real size, counted without memory: on the meta device.

Tensors there have shapes and no bytes. The engine's own passes run over a few layers of the model
at one rank's share of a chunk, and every tensor that they make is counted while it lives. What
other ranks would send is a tensor of its size. What depends on numbers takes its largest size.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from longstraw import EngineConfig, Segment, SequenceGroup, TorchBackend
from longstraw.audit import PeakTensorBytes
from longstraw.distributed import LockStep
from longstraw.models import Decoder, TokenCotangents, score_anchor
from longstraw.passes import SegmentLoss, SegmentPasses
from longstraw.state import Choices, PageStore, SegmentState
from longstraw_kernels.index_topk import running
from longstraw_kernels.selected_attention import reference


class MetaGroup(SequenceGroup):
    """The first of `size` ranks that share a prompt; what the others send is a shape.

    The first has the most to do: its keys are seen by the queries of all ranks.
    """

    def gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size, *x.shape)

    def exchange(self, parts: Tensor) -> Tensor:
        return torch.empty_like(parts.contiguous())

    def sum_home(self, parts: Tensor) -> Tensor:
        return torch.empty_like(parts.contiguous()[0])

    def any(self, flags: list[bool]) -> list[bool]:
        return flags


def decoder_on_meta(config: Any, lora: LoraConfig, engine: EngineConfig) -> Decoder:
    """The model of a config as it is trained: in bf16, with adapters and gradient checkpointing.

    Its weights are not quantized: NF4 takes real numbers. What a projection keeps for its backward
    is the same, its weight.
    """
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = get_peft_model(base, deepcopy(lora))  # which writes into it what it finds
    return as_trained(model, engine)


def as_trained(model: PeftModel, engine: EngineConfig) -> Decoder:
    """A model with adapters in bf16, as TRL has those of a quantized one, and their gradients."""
    model.train()
    model.enable_input_require_grads()
    base: Any = model.get_base_model()
    base.activation_checkpointing_enable({"use_reentrant": False})
    options = {
        "allow_extrapolation": engine.allow_extrapolation,
        "cotangent_dtype": engine.cotangent_dtype,
    }
    decoder = Decoder(model, **options)
    for parameter in decoder.trainable_parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    TorchBackend().begin_update(decoder.trainable_parameters())
    for parameter in decoder.trainable_parameters():
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    return decoder


def count_passes(
    decoder: Decoder,
    engine: EngineConfig,
    num_rows: int,
    num_tokens: int,
    history_tokens: int | None = None,
) -> tuple[int, int]:
    """Most bytes beside weights, state and gradients in a capture and in a backward.

    Of `num_rows` runs of `num_tokens` that continue a history, with cotangents on all that they
    have added to the state.

    Args:
        history_tokens: of the history, at least a chunk; None for `num_tokens`, which is enough
            where pages are visited one at a time.

    Returns:
        Of the capture (with what it writes, if that is more), and of the backward.
    """
    device = decoder.device
    store = PageStore(device, engine.page_size, cotangent_dtype=engine.cotangent_dtype)
    group = MetaGroup(0, engine.sp_size)
    passes = SegmentPasses(decoder, store, TorchBackend(), LockStep(), engine, group)
    bar = tqdm(disable=True)
    with _on_meta(), _collector_off(), decoder.attached():
        if history_tokens is None:
            history = passes.new_state(
                _segment(1, num_tokens, 0, device), None, needs_cotangent=True
            )
            passes.capture(history, bar)
        else:
            history = _long_history(passes, history_tokens, bar)
        segment = _segment(num_rows, num_tokens, history.segment.num_tokens, device)
        state = passes.new_state(segment, None, history, needs_cotangent=True)
        with PeakTensorBytes() as capture:
            passes.capture(state, bar)
        for held in (history, state):
            _leave_cotangents(held, store, decoder.num_layers, engine.chunk_size)
        with PeakTensorBytes() as backward:
            passes.backward(state, SegmentLoss(), bar)
    history.free()
    return capture.peak_bytes, backward.peak_bytes


def _long_history(passes: SegmentPasses, num_tokens: int, bar: tqdm) -> SegmentState:
    """A state of as many whole chunks as `num_tokens` have, each like the first."""
    size, device = passes.config.chunk_size, passes.decoder.device
    first = passes.new_state(_segment(1, size, 0, device), None, needs_cotangent=True)
    passes.capture(first, bar)
    (like,) = first.segment.chunks(size)
    segment = _segment(1, num_tokens // size * size, 0, device)
    history = passes.new_state(segment, None, needs_cotangent=True)
    for chunk in segment.chunks(size):
        for place in range(passes.decoder.num_layers + len(passes.decoder.index_layers)):
            for page in first.pages(place, like):
                part = torch.empty_like(page.key), torch.empty_like(page.value)
                runs = [(slice(0, page.num_tokens), page.start)]
                history.append(chunk, place, *part, runs, type(page))
    first.free()
    return history


def _segment(num_rows: int, num_tokens: int, start: int, device: torch.device) -> Segment:
    ids = torch.zeros(num_rows, num_tokens, dtype=torch.long, device=device)
    return Segment(ids, (num_tokens,) * num_rows, start)


def _leave_cotangents(
    state: SegmentState, store: PageStore, num_layers: int, chunk_size: int
) -> None:
    """On every page, as if later tokens had been there."""
    for chunk in state.segment.chunks(chunk_size):
        for layer in range(num_layers):
            for page in state.pages(layer, chunk):
                gradients = [torch.zeros_like(x) for x in (page.key, page.value)]
                store.add_cotangent(page, *gradients)


@contextmanager
def _on_meta() -> Iterator[None]:
    """Take the way through what depends on numbers that takes most memory.

    * `torch.autocast` knows no meta device, on which there is nothing to cast.
    * Any token of a page may be among the best of a query, and all of them are of the first pages.
    * Tiles of queries follow each other and are alike: one says all.
    * What is chosen has no numbers that could differ.
    """
    autocast, tiles, entrants = torch.autocast, reference._tiles, running._entrants
    differing = Choices.differing

    def no_autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)

    def first_tile(index: Tensor, rows: Tensor) -> Iterator[slice]:
        all_tiles = tiles(index, rows)
        return islice(all_tiles, 1) if index.is_meta else all_tiles

    def all_enter(scores: Tensor, lowest: Tensor, ties: str) -> tuple[Tensor, Tensor] | None:
        if not scores.is_meta:
            return entrants(scores, lowest, ties)
        scores = scores.masked_fill(scores <= lowest, -torch.inf)
        return scores, torch.arange(scores.shape[-1], device="meta").expand_as(scores)

    def differ(ours: Choices, captured: Choices | None) -> list[str]:
        is_meta = any(choice.is_meta for choice in ours._made.values())
        return [] if is_meta else differing(ours, captured)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "autocast", no_autocast))
        stack.enter_context(patch.object(reference, "_tiles", first_tile))
        stack.enter_context(patch.object(running, "_entrants", all_enter))
        stack.enter_context(patch.object(Choices, "differing", differ))
        yield


@contextmanager
def _collector_off() -> Iterator[None]:
    """Count the same each time: what lies in a cycle stays until Python's collector comes by."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def logits_bytes_per_entry() -> float:
    """Most bytes for each entry of a slice of logits `[rows, V]`, scored and differentiated.

    Counted on a head of 2 inputs, where nothing else is of that size.
    """
    num_rows, vocabulary = 64, 4096
    head = nn.Linear(2, vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.zeros(1, num_rows, 2, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1, num_rows, dtype=torch.long)
    cotangents = TokenCotangents(torch.ones(1, num_rows))
    with PeakTensorBytes() as counter:
        anchor = score_anchor(
            lambda x: head(x).float(),
            hidden,
            targets,
            cotangents,
            1.0,
            num_rows,
            [],
            lambda x: None,
        )
        anchor.backward()
    return counter.peak_bytes / (num_rows * vocabulary)
