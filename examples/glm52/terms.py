"""The terms of one rank's memory that are those of latent and sparse attention with divided
experts, each with its arithmetic."""

from collections.abc import Sequence
from copy import deepcopy
from math import ceil
from typing import Any

import torch

from examples.dry_run.terms import BF16, FP32, Term, layer_inputs_term, tokens_here
from longstraw import EngineConfig
from longstraw.audit import PeakTensorBytes
from longstraw.distributed import most_owned
from longstraw.models import Decoder
from longstraw.models.mla_dsa import LatentShape

INT32 = 4
ROUTED = ".mlp.experts."
"""In the name of every parameter of a routed expert, adapters too."""
EXCHANGES = 6
"""Tensors of routed rows that AutoEP makes beside the experts' own work: rows sent and received, in
the order of experts and back in that of ranks, sent back, and weighted in the order of tokens."""


def slice_of(config: Any, indexer_types: Sequence[str], num_experts: int) -> Any:
    """The config with layers of these kinds, each with some of the experts."""
    config = deepcopy(config)
    config.num_hidden_layers = len(indexer_types)
    config.indexer_types = list(indexer_types)
    config.layer_types = ["indexed_attention"] * len(indexer_types)
    config.mlp_layer_types = ["sparse"] * len(indexer_types)
    config.n_routed_experts = num_experts
    return config


def shape_of(decoder: Decoder) -> LatentShape:
    """The sizes of its latent attention."""
    assert decoder.latent is not None, "the model has latent attention"
    return decoder.latent


# -------------------------------------------------------------------- what does not grow


def weight_terms(model: Any, ep_size: int) -> list[Term]:
    """Of the frozen weights: routed experts are divided over `ep_size` ranks, the rest is not."""
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    routed = sum(p.numel() for name, p in frozen if ROUTED in name)
    rest = [p for name, p in frozen if ROUTED not in name] + list(model.buffers())
    numel = sum(p.numel() for p in rest)
    num_fp32 = sum(p.numel() for p in rest if p.itemsize == FP32)
    return [
        Term(
            "routed experts", ceil(routed * BF16 / ep_size), f"{routed:,} x 2 B / {ep_size} ranks"
        ),
        Term(
            "other weights",
            sum(p.nbytes for p in rest),
            f"{numel:,} x 2 B, on every rank; {num_fp32:,} of them, routers, in fp32",
        ),
    ]


def adapter_terms(model: Any, ep_size: int) -> list[Term]:
    """Of what is trained, under ZeRO-0: alike on every rank, but for an expert's adapter, which is
    where the expert is."""
    trained = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    routed = sum(numel for name, numel in trained if ROUTED in name)
    rest = sum(numel for _, numel in trained) - routed
    here = rest + ceil(routed / ep_size)
    parts = f"({rest:,} + {routed:,} / {ep_size})" if routed else f"{rest:,}"
    return [
        Term("adapters", here * BF16, f"{parts} x 2 B, bf16 as DeepSpeed makes them"),
        Term("their gradients", here * FP32, f"{parts} x 4 B, added up in fp32"),
        Term(
            "optimizer (ZeRO-0)",
            here * 3 * FP32,
            f"{parts} x 12 B: fp32 weights and Adam's two moments",
        ),
    ]


# -------------------------------------------------------------------- the prompt's state


def state_terms(decoder: Decoder, engine: EngineConfig, num_tokens: int) -> list[Term]:
    """Of a prompt, on the rank that holds most of it; see `LatentShape.token_bytes`."""
    shape, num_layers = shape_of(decoder), decoder.num_layers
    owned = most_owned(num_tokens, engine.chunk_size, engine.sp_size, engine.sp_layout)
    width, num_indexers = shape.latent_dim + shape.rotary_dim, len(shape.index_layers)
    index_keys = owned * num_indexers * shape.index_dim * BF16
    state = decoder.state_bytes(owned, with_cotangents=False)
    terms = [
        Term(
            "latents and rotary keys",
            state - index_keys,
            f"{owned:,} tokens x {num_layers} x ({shape.latent_dim} + {shape.rotary_dim}) x 2 B",
        ),
        Term(
            "index keys",
            index_keys,
            f"{owned:,} tokens x {num_indexers} x {shape.index_dim} x 2 B, without cotangents",
        ),
    ]
    if engine.needs_prompt_backward:
        cotangents = decoder.state_bytes(owned, with_cotangents=True) - state
        arithmetic = f"{owned:,} tokens x {num_layers} x {width} in {engine.cotangent_dtype}"
        terms.append(Term("cotangents of latents", cotangents, arithmetic))
    return terms


# -------------------------------------------------------------------- one pass


def kept_terms(
    decoder: Decoder, engine: EngineConfig, num_rows: int, num_tokens: int
) -> list[Term]:
    """What all layers keep for a backward under gradient checkpointing, of rows of a chunk."""
    config, shape, num_layers = decoder.config, shape_of(decoder), decoder.num_layers
    here = tokens_here(engine, num_rows, num_tokens)
    heads, num_indexers = config.num_attention_heads, len(shape.index_layers)
    latents = here * num_layers * (shape.latent_dim + shape.rotary_dim) * BF16
    index_keys = here * num_indexers * shape.index_dim * BF16
    return [
        layer_inputs_term(decoder, here),
        Term(
            "attention's outputs",
            num_layers * here * heads * (shape.latent_dim * BF16 + FP32),
            f"{num_layers} x {here:,} x {heads} x ({shape.latent_dim} x 2 B + a log-sum-exp x 4 B)",
        ),
        Term(
            "selections",
            num_indexers * num_rows * num_tokens * config.index_topk * INT32,
            f"{num_indexers} x {num_rows * num_tokens:,} queries of all ranks x "
            f"{config.index_topk:,} x 4 B",
        ),
        Term(
            "the chunk's state",
            2 * latents + index_keys,
            f"2 x {latents:,} B, with what comes back to latents, and {index_keys:,} B",
        ),
    ]


def unkept_bytes(decoder: Decoder, engine: EngineConfig, num_rows: int, num_tokens: int) -> int:
    """What all layers hold of their state in a pass without a graph, until it is in pages."""
    here = tokens_here(engine, num_rows, num_tokens)
    return decoder.state_bytes(here, with_cotangents=False)


def expert_bytes_per_row(layers: Decoder) -> int:
    """Most bytes for each token at an expert, forwards and backwards.

    Counted on the first layer's experts, as transformers runs them with `grouped_mm`.
    """
    experts, num_rows = layers.decoder.get_submodule("layers.0.mlp.experts"), 1024
    options = {"dtype": torch.bfloat16, "device": layers.device, "requires_grad": True}
    hidden = torch.zeros(num_rows, layers.config.hidden_size, **options)
    weights = torch.zeros(num_rows, 1, **options)
    chosen = torch.zeros(num_rows, 1, dtype=torch.long, device=layers.device)
    with PeakTensorBytes() as counter:
        out = experts(hidden, chosen, weights)
        out.backward(torch.zeros_like(out))
    return counter.peak_bytes // num_rows
