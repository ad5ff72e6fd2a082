"""The memory of one rank, term by term, each with its arithmetic.

Knows models, shapes and bytes; knows nothing of options or of what fits where.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import nn

from longstraw import EngineConfig
from longstraw.distributed import Ownership, most_owned
from longstraw.models import Decoder

GIB = 2**30
BF16, FP32 = 2, 4
NF4_BLOCK, NF4_BLOCKS_PER_CONSTANT = 64, 256
"""Weights that share a constant, and constants that share one of their own (bitsandbytes)."""


@dataclass(frozen=True)
class Term:
    """A line of the table.

    Attributes:
        name: what it is.
        num_bytes: on one rank.
        arithmetic: how they come about.
    """

    name: str
    num_bytes: int
    arithmetic: str

    def __str__(self) -> str:
        return f"{self.name:<34} {self.num_bytes / GIB:8.2f}   {self.arithmetic}"


# -------------------------------------------------------------------- what does not grow


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


def adapter_terms(num_trained: int, world_size: int) -> list[Term]:
    """Under ZeRO-1, which divides the optimizer over all ranks."""
    return [
        Term("adapters", num_trained * BF16, f"{num_trained:,} x 2 B, bf16 as TRL makes them"),
        Term("their gradients", num_trained * FP32, f"{num_trained:,} x 4 B, added up in fp32"),
        Term(
            "optimizer (ZeRO-1)",
            ceil(num_trained * 3 * FP32 / world_size),
            f"{num_trained:,} x 12 B / {world_size} ranks: fp32 weights and Adam's two moments",
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
    here = num_rows * Ownership(num_tokens, sp_size, engine.sp_layout).width
    num_recurrent = len(decoder.recurrent_layers)
    num_attention = num_layers - num_recurrent
    heads, width = config.num_attention_heads, config.num_attention_heads * config.head_dim
    own = decoder.state_bytes(here, with_cotangents=False)
    terms = [
        Term(
            "layer inputs",
            num_layers * here * config.hidden_size * BF16,
            f"{num_layers} x {here:,} tokens x {config.hidden_size:,} x 2 B",
        ),
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
    here = num_rows * Ownership(num_tokens, engine.sp_size, engine.sp_layout).width
    held = decoder.state_bytes(here, with_cotangents=False)
    if decoder.recurrence is None:
        return held
    recurrent, conv = decoder.recurrence.snapshot_numel(engine.sp_size)
    num_states = num_rows * len(decoder.recurrent_layers)
    return held + num_states * (recurrent * FP32 + conv * BF16)


def total(terms: list[Term]) -> int:
    """Bytes of all of them."""
    return sum(term.num_bytes for term in terms)
