"""The terms of one rank's memory that are a quantized hybrid's, each with its arithmetic."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from math import ceil
from typing import Any

from torch import nn

from examples.dry_run.terms import BF16, FP32, Term, layer_inputs_term, tokens_here
from longstraw import EngineConfig
from longstraw.distributed import most_owned
from longstraw.models import Decoder

NF4_BLOCK, NF4_BLOCKS_PER_CONSTANT = 64, 256
"""Weights that share a constant, and constants that share one of their own (bitsandbytes)."""


# -------------------------------------------------------------------- what does not grow


def slice_of(config: Any, layer_types: Sequence[str]) -> Any:
    """The config with these layers."""
    config = deepcopy(config)
    config.layer_types, config.num_hidden_layers = list(layer_types), len(layer_types)
    return config


def nf4_bytes(numel: int) -> int:
    """Bytes of a weight in NF4 whose constants are quantized again, as bitsandbytes packs it.

    n / 2           4 bits a weight
    n / 64          a constant (absmax) for each 64 weights, in 8 bits
    n / 64 / 256    an fp32 constant for each 256 of these; one fp32 offset for all
    16 + 256        two fp32 tables of what the 4 and the 8 bits stand for
    """
    num_constants = ceil(numel / NF4_BLOCK)
    in_fp32 = ceil(num_constants / NF4_BLOCKS_PER_CONSTANT) + 1 + 16 + 256
    return ceil(numel / 2) + num_constants + in_fp32 * FP32


def quantized_weights(model: Any) -> Iterator[nn.Parameter]:
    """Those that `load_in_4bit` quantizes: of all linear layers but the output embeddings."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear) and module is not head and ".lora_" not in name:
            yield module.weight


def weight_terms(model: nn.Module) -> list[Term]:
    """Of the frozen weights. PEFT's `prepare_model_for_kbit_training` would make those that are not
    quantized fp32; TRL does not call it, and they stay in bf16."""
    packed = {id(weight): weight.numel() for weight in quantized_weights(model)}
    rest = [p for p in model.parameters() if not p.requires_grad and id(p) not in packed]
    numel, tensors = sum(packed.values()), [*rest, *model.buffers()]
    return [
        Term(
            "NF4 weights",
            sum(map(nf4_bytes, packed.values())),
            f"{numel:,} in {len(packed)} projections x (1/2 + 1/64 + 4/64/256) B, and tables",
        ),
        Term(
            "other weights",
            sum(x.nbytes for x in tensors),
            f"{sum(x.numel() for x in tensors):,} x 2 B: embeddings, head, norms, convolutions",
        ),
    ]


# -------------------------------------------------------------------- the prompt's state


def state_terms(decoder: Decoder, engine: EngineConfig, num_tokens: int) -> list[Term]:
    """Of a prompt, on the rank that holds most of it; see `SegmentPasses.state_bytes`."""
    sp_size, is_exact = engine.sp_size, engine.needs_prompt_backward
    owned = most_owned(num_tokens, engine.chunk_size, sp_size, engine.sp_layout)
    pages = decoder.state_bytes(owned, with_cotangents=False)
    cotangents = decoder.state_bytes(owned, with_cotangents=True) - pages
    per_token = decoder.state_bytes(1, with_cotangents=False)
    num_snapshots = ceil(num_tokens / engine.chunk_size) if is_exact else 1
    snapshot, theirs = (
        decoder.snapshot_bytes(sp_size, of_cotangents=is_theirs) for is_theirs in (False, True)
    )
    terms = [Term("keys and values", pages, f"{owned:,} tokens x {per_token:,} B")]
    if is_exact:
        name = engine.cotangent_dtype
        terms += [
            Term("their cotangents", cotangents, f"the same numbers in {name}"),
            Term("cotangents of a snapshot", theirs, "one at a time, in float32"),
        ]
    all_ranks = decoder.snapshot_bytes(1)
    kept = "one per chunk" if is_exact else "behind the last chunk"
    arithmetic = f"{num_snapshots} ({kept}) x {all_ranks:,} B / {sp_size} ranks"
    return [*terms, Term("Gated DeltaNet snapshots", num_snapshots * snapshot, arithmetic)]


# -------------------------------------------------------------------- one pass


def kept_terms(
    decoder: Decoder, engine: EngineConfig, num_rows: int, num_tokens: int
) -> list[Term]:
    """What all layers keep for a backward under gradient checkpointing, of rows of a chunk."""
    config, sp_size, num_layers = decoder.config, engine.sp_size, decoder.num_layers
    here = tokens_here(engine, num_rows, num_tokens)
    num_recurrent = len(decoder.recurrent_layers)
    num_attention = num_layers - num_recurrent
    heads, width = config.num_attention_heads, config.num_attention_heads * config.head_dim
    own = decoder.state_bytes(here, with_cotangents=False)
    terms = [
        layer_inputs_term(decoder, here),
        Term(
            "attention's outputs",
            num_attention * here * (width * BF16 + heads * FP32),
            f"{num_attention} x {here:,} x ({width:,} x 2 B + {heads} log-sum-exps x 4 B)",
        ),
        Term(
            "the chunk's keys and values", 2 * own, f"2 x {own:,} B, with what comes back to them"
        ),
    ]
    if decoder.recurrence is None:
        return terms
    recurrent, conv = decoder.recurrence.snapshot_numel(sp_size)
    many = f"{num_recurrent} x " if num_rows == 1 else f"{num_recurrent} x {num_rows} x "
    return [
        *terms,
        Term(
            "the chunk's recurrent states",
            2 * num_recurrent * num_rows * (recurrent * FP32 + conv * BF16),
            f"2 x {many}({recurrent:,} x 4 B + {conv:,} x 2 B), with what comes back to them",
        ),
    ]


def unkept_bytes(decoder: Decoder, engine: EngineConfig, num_rows: int, num_tokens: int) -> int:
    """What all layers hold of their state in a pass without a graph, until it is in pages."""
    here = tokens_here(engine, num_rows, num_tokens)
    held = decoder.state_bytes(here, with_cotangents=False)
    if decoder.recurrence is None:
        return held
    recurrent, conv = decoder.recurrence.snapshot_numel(engine.sp_size)
    num_states = num_rows * len(decoder.recurrent_layers)
    return held + num_states * (recurrent * FP32 + conv * BF16)
