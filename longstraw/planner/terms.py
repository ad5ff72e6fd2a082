"""Bytes that one rank holds, term by term, each with the product that it is.

Knows shapes and bytes; knows nothing of what exists for a moment only.
"""

from dataclasses import dataclass
from math import ceil

from .model_shape import ATTENTION, LATENT, RECURRENT, ModelShape
from .options import FEW_TRAINABLE, PlanOptions
from .parameters import ParameterCount, adapter_numel, count_parameters
from .sizes import gib

FP32 = 4
NF4_BLOCK, NF4_BLOCKS_PER_CONSTANT = 64, 256
"""Weights that share a constant, and constants that share one of their own (bitsandbytes)."""

GRADIENTS = "gradients"


@dataclass(frozen=True)
class Term:
    """A line of the plan.

    Attributes:
        name: what it is.
        num_bytes: on one rank.
        arithmetic: how they come about.
        grows: whether it grows with the prompt.
    """

    name: str
    num_bytes: int
    arithmetic: str
    grows: bool = False

    def __str__(self) -> str:
        return f"{self.name:<34} {gib(self.num_bytes):>9}   {self.arithmetic}"


def total(terms: list[Term]) -> int:
    """Bytes of all of them."""
    return sum(term.num_bytes for term in terms)


# -------------------------------------------------------------------- what does not grow


def trained_numel(shape: ModelShape, options: PlanOptions) -> int:
    """Parameters that have a gradient."""
    if options.lora_rank:
        return adapter_numel(shape, options.lora_rank)
    count = count_parameters(shape)
    return count.total - count.indexers


def is_partitioned(shape: ModelShape, options: PlanOptions) -> bool:
    """Whether gradients go to their owners at every backward; see `DeepSpeedBackend`."""
    trained = trained_numel(shape, options)
    return options.zero_stage >= 2 and trained > FEW_TRAINABLE * count_parameters(shape).total


def runs_whole_model(shape: ModelShape, options: PlanOptions) -> bool:
    """Whether chunks of the prompt run the last layer and the head too, for the collectives there.

    See `DeepSpeedBackend.needs_anchor`; else they end when the last layer has its state.
    """
    return options.zero_stage == 3 or options.ep_size > 1 or is_partitioned(shape, options)


def fixed_terms(shape: ModelShape, options: PlanOptions, with_gradients: bool = True) -> list[Term]:
    """Weights, adapters, gradients and optimizer: alike for every prompt.

    Args:
        with_gradients: whether there are any; the first capture of a step comes before them.
    """
    training = _training_terms(shape, options)
    if not with_gradients:
        training = [term for term in training if term.name != GRADIENTS]
    return [*_weight_terms(shape, count_parameters(shape), options), *training]


def _weight_terms(shape: ModelShape, count: ParameterCount, options: PlanOptions) -> list[Term]:
    divide, by = (options.ranks, f" / {options.ranks}") if options.zero_stage == 3 else (1, "")
    size, terms = options.itemsize, []
    plain = count.total - count.experts
    if options.is_nf4:
        plain -= count.projections
        packed = nf4_bytes(count.projections, count.num_projections)
        arithmetic = f"{count.projections:,} x (1/2 + 1/64 + 4/64/256) B, and tables{by}"
        terms.append(Term("NF4 weights", ceil(packed / divide), arithmetic))
    terms.append(Term("weights", ceil(plain * size / divide), f"{plain:,} x {size} B{by}"))
    if count.experts:
        parts = max(options.ep_size, divide)
        arithmetic = f"{count.experts:,} x {size} B / {parts} ranks"
        terms.append(Term("routed experts", ceil(count.experts * size / parts), arithmetic))
    in_fp32 = count.routers if shape.count(LATENT) and size < FP32 else 0
    if in_fp32:
        extra = in_fp32 * (FP32 - size)
        arithmetic = f"{in_fp32:,} routers' in fp32: {FP32 - size} B more{by}"
        terms.append(Term("routers", ceil(extra / divide), arithmetic))
    if options.zero_stage == 3:
        terms.append(_gathered_term(shape, options))
    return terms


def _gathered_term(shape: ModelShape, options: PlanOptions) -> Term:
    """The module at work, and the embedding or head beside it while a gradient arrives."""
    vocabulary = shape["vocab_size"] * shape.hidden_size
    experts = count_parameters(shape).experts and max(
        shape.num_experts // options.ep_size * 3 * shape.hidden_size * shape.expert_width, 0
    )
    largest = max(vocabulary, experts)
    arithmetic = f"({largest:,} + {vocabulary:,}) x {options.itemsize} B: a module, and the head"
    return Term("weights gathered", (largest + vocabulary) * options.itemsize, arithmetic)


def nf4_bytes(numel: int, num_weights: int) -> int:
    """Bytes of weights in NF4 whose constants are quantized again, as bitsandbytes packs them.

    n / 2           4 bits a weight
    n / 64          a constant (absmax) for each 64 weights, in 8 bits
    n / 64 / 256    an fp32 constant for each 256 of these; one fp32 offset for all
    16 + 256        two fp32 tables per weight of what the 4 and the 8 bits stand for
    """
    num_constants = ceil(numel / NF4_BLOCK)
    in_fp32 = ceil(num_constants / NF4_BLOCKS_PER_CONSTANT) + num_weights * (1 + 16 + 256)
    return ceil(numel / 2) + num_constants + in_fp32 * FP32


def _training_terms(shape: ModelShape, options: PlanOptions) -> list[Term]:
    trained, ranks, stage = trained_numel(shape, options), options.ranks, options.zero_stage
    terms, size = [], options.itemsize
    if options.lora_rank:
        here = ceil(trained / ranks) if stage == 3 else trained
        by = f" / {ranks} ranks" if stage == 3 else ""
        arithmetic = f"{trained:,} x {size} B{by}: rank {options.lora_rank} on all projections"
        terms.append(Term("adapters", here * size, arithmetic))
    parts = ranks if is_partitioned(shape, options) else 1
    by = f" / {parts} ranks" if parts > 1 else ""
    arithmetic = f"{trained:,} x 4 B{by}, added up in fp32"
    terms.append(Term(GRADIENTS, ceil(trained * FP32 / parts), arithmetic))
    parts = ranks if stage >= 1 else 1
    each = 3 * FP32 if size < FP32 else 2 * FP32
    what = "fp32 weights and Adam's two moments" if size < FP32 else "Adam's two moments"
    by = f" / {parts} ranks" if parts > 1 else ""
    arithmetic = f"{trained:,} x {each} B{by}: {what}"
    return [*terms, Term("optimizer", ceil(trained * each / parts), arithmetic)]


# -------------------------------------------------------------------- the prompt's state


def token_numel(shape: ModelShape) -> tuple[int, int]:
    """Numbers of one token's state in all layers: those with cotangents, and index keys."""
    heads = 2 * shape.num_kv_heads * shape.head_dim * shape.count(ATTENTION)
    if shape.count(LATENT):
        heads += shape.num_latent_dims * shape.count(LATENT)
    return heads, shape.num_indexers * shape.get("index_head_dim", 0)


def token_bytes(shape: ModelShape, itemsize: int) -> int:
    """Bytes of one token's state, see `Decoder.state_bytes`."""
    return sum(token_numel(shape)) * itemsize


def snapshot_bytes(shape: ModelShape, options: PlanOptions, of_cotangents: bool = False) -> int:
    """Bytes of one snapshot of all recurrent layers on each rank, see `Decoder.snapshot_bytes`."""
    if not shape.count(RECURRENT):
        return 0
    sp_size = options.engine.sp_size
    size = FP32 if of_cotangents else options.itemsize
    recurrent, conv = shape.recurrent_numel // sp_size, shape.conv_numel // sp_size
    return shape.count(RECURRENT) * (recurrent * FP32 + conv * size)


def page_bytes(shape: ModelShape, options: PlanOptions) -> int:
    """Of one layer's full page, with cotangents."""
    each, _ = token_numel(shape)
    layers = len(shape.layers) - shape.count(RECURRENT)
    size = options.itemsize + options.cotangent_itemsize * options.is_exact
    return options.page_tokens * each // max(layers, 1) * size


def state_terms(
    shape: ModelShape,
    options: PlanOptions,
    num_tokens: int,
    *,
    with_cotangents: bool = True,
    name: str = "prompt state",
    rows: int = 1,
) -> list[Term]:
    """Of a run of tokens, on the rank that owns most of it: keys and values, snapshots, cotangents.

    Args:
        with_cotangents: of an exact gradient; those of responses there are always.
        rows: runs side by side.
    """
    if not num_tokens:
        return []
    owned, sp_size, size = options.owned(num_tokens), options.engine.sp_size, options.itemsize
    many = f"{rows} x " if rows > 1 else ""
    where = f"{many}{num_tokens:,} tokens" + (f" / {sp_size}" if sp_size > 1 else "")
    num_bytes = rows * owned * token_bytes(shape, size)
    terms = [Term(name, num_bytes, _state_arithmetic(shape, size, where), True)]
    has_backward = options.is_exact or name != "prompt state"
    if shape.count(RECURRENT):
        terms.append(_snapshot_term(shape, options, num_tokens, rows, has_backward))
    if with_cotangents and has_backward:
        terms += _cotangent_terms(shape, options, num_tokens, where, rows)
    return terms


def _state_arithmetic(shape: ModelShape, size: int, where: str) -> str:
    per_token = f"{token_bytes(shape, size):,} B x {where}"
    if shape.count(LATENT):
        dims = f"{shape['kv_lora_rank']} + {shape['qk_rope_head_dim']}"
        layers = f"{shape.count(LATENT)} layers x ({dims})"
        if shape.num_indexers:
            layers += f" + {shape.num_indexers} x {shape['index_head_dim']} index keys"
        return f"{per_token}: ({layers}) x {size} B"
    heads, dim = shape.num_kv_heads, shape.head_dim
    return f"{per_token}: {shape.count(ATTENTION)} layers x 2 x {heads} x {dim} x {size} B"


def _snapshot_term(
    shape: ModelShape, options: PlanOptions, num_tokens: int, rows: int, has_backward: bool
) -> Term:
    num = rows * (ceil(num_tokens / options.engine.chunk_size) if has_backward else 1)
    each = snapshot_bytes(shape, options)
    kept = "one per chunk" if has_backward else "behind the last chunk"
    layers, sp_size = shape.count(RECURRENT), options.engine.sp_size
    arithmetic = (
        f"{num:,} ({kept}) x {layers} layers x ({shape.recurrent_numel:,} x 4 B + "
        f"{shape.conv_numel:,} x {options.itemsize} B) / {sp_size}"
    )
    return Term("snapshots", num * each, arithmetic, has_backward)


def _cotangent_terms(
    shape: ModelShape, options: PlanOptions, num_tokens: int, where: str, rows: int
) -> list[Term]:
    size = options.cotangent_itemsize
    terms, windows = [], [layer.window for layer in shape.layers if layer.kind == ATTENTION]
    each, _ = token_numel(shape)
    per_layer = 2 * shape.num_kv_heads * shape.head_dim
    num_windowed = sum(window is not None for window in windows)
    whole = each - per_layer * num_windowed
    if whole:
        arithmetic = f"{whole:,} numbers x {size} B x {where}"
        num_bytes = rows * options.owned(num_tokens) * whole * size
        terms.append(Term("cotangents", num_bytes, arithmetic, True))
    if num_windowed:
        terms.append(_windowed_term(options, num_tokens, windows, rows * per_layer * size))
    if shape.count(RECURRENT):
        num_bytes = rows * snapshot_bytes(shape, options, of_cotangents=True)
        terms.append(Term("cotangents of a snapshot", num_bytes, "one at a time, in fp32"))
    return terms


def _windowed_term(
    options: PlanOptions, num_tokens: int, windows: list[int | None], per_token: int
) -> Term:
    """A reader leaves cotangents on the pages that its window reaches, and no others.

    Those of a window before the reader's first query, in whole pages; earlier pages get theirs when
    later ones have been used up.
    """
    page = options.engine.page_size
    reach = sum(
        min(ceil((window - 1) / page) * page, num_tokens)
        for window in windows
        if window is not None
    )
    num_bytes = options.owned(reach) * per_token
    arithmetic = f"{reach:,} tokens in reach of a window, all layers together, x {per_token:,} B"
    return Term("cotangents in windows", num_bytes, arithmetic)
