"""What one pass takes beside what is held: all layers' part of it, one layer's, the logits.

Knows shapes and bytes; knows nothing of what is held or of what fits.
"""

from .layer_work import work_per_token
from .model_shape import ATTENTION, LATENT, RECURRENT, ModelShape
from .options import PlanOptions
from .terms import FP32, Term, token_bytes
from .widths import Run

INT32 = 4
BYTES_PER_LOGIT, BYTES_PER_SCORED_LOGIT = 12, 16
"""Where the definition differentiates tokens' log-probs, and where it scores them, with entropies:
fp32 tensors of a slice of logits that there are at a time."""


def tokens_here(options: PlanOptions, num_rows: int, num_tokens: int) -> int:
    """Of rows of a chunk, those of the rank that has most."""
    return num_rows * options.width(num_tokens)


def kept_terms(
    shape: ModelShape, options: PlanOptions, num_rows: int, num_tokens: int, *, is_read: bool
) -> list[Term]:
    """What all layers keep for a backward under gradient checkpointing, of rows of a chunk.

    Args:
        is_read: whether later chunks read the chunk's state; a response's last chunk is not.
    """
    here, size, num_layers = (
        tokens_here(options, num_rows, num_tokens),
        options.itemsize,
        len(shape.layers),
    )
    width = shape.hidden_size
    terms = [
        Term(
            "layer inputs",
            num_layers * here * width * size,
            f"{num_layers} layers x {here:,} tokens x {width:,} x {size} B",
        )
    ]
    outputs = attention_outputs_term(shape, options, here)
    terms += [outputs] if outputs.num_bytes else []
    if shape.num_indexers:
        chosen = shape.num_indexers * num_rows * num_tokens * shape["index_topk"] * INT32
        arithmetic = (
            f"{shape.num_indexers} x {num_rows * num_tokens:,} queries of all ranks x "
            f"{shape['index_topk']:,} x {INT32} B"
        )
        terms.append(Term("selections", chosen, arithmetic))
    if is_read:
        own = here * token_bytes(shape, size) + recurrent_bytes(shape, options, num_rows)
        terms.append(
            Term("the chunk's own state", 2 * own, f"2 x {own:,} B, with what comes back to it")
        )
    return terms


def attention_outputs_term(shape: ModelShape, options: PlanOptions, here: int) -> Term:
    """Kept of each attention layer, so that its backward need not attend again."""
    is_latent = bool(shape.count(LATENT))
    layers = shape.count(LATENT if is_latent else ATTENTION)
    dim = shape["kv_lora_rank"] if is_latent else shape.head_dim
    each = shape.num_heads * (dim * options.itemsize + FP32)
    arithmetic = (
        f"{layers} x {here:,} x {shape.num_heads} heads x ({dim} x {options.itemsize} B + a "
        f"log-sum-exp x {FP32} B)"
    )
    return Term("attention's outputs", layers * here * each, arithmetic)


def recurrent_bytes(shape: ModelShape, options: PlanOptions, num_rows: int) -> int:
    """Of the states behind the rows of a chunk, in all recurrent layers of one rank."""
    if not shape.count(RECURRENT):
        return 0
    numel = shape.recurrent_numel * FP32 + shape.conv_numel * options.itemsize
    return num_rows * shape.count(RECURRENT) * numel // options.engine.sp_size


def unkept_bytes(shape: ModelShape, options: PlanOptions, num_rows: int, num_tokens: int) -> int:
    """What all layers hold of their state in a pass without a graph, until it is in pages."""
    here = tokens_here(options, num_rows, num_tokens)
    own = here * token_bytes(shape, options.itemsize)
    return own + recurrent_bytes(shape, options, num_rows)


def work_term(
    shape: ModelShape,
    options: PlanOptions,
    which: str,
    num_rows: int,
    num_tokens: int,
    history_tokens: int,
) -> Term:
    """Of the layer at work, in one of `layer_work.PASSES`, behind a history."""
    here = tokens_here(options, num_rows, num_tokens)
    run = Run(here, options.owned(history_tokens))
    each, where = work_per_token(shape, options, which, run)
    return Term("a layer at work", int(each * here), f"{here:,} tokens x {each:,.0f} B: {where}")
