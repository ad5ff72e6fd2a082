"""What a layer's activations are made of: numbers per token, by name.

Every tensor that a layer makes of n tokens has n times one of these, or a sum of some; so what a
layer takes at the moment when it takes most is n times a linear form of them. The form's
coefficients are counted, see `layer_work`.

Knows shapes; knows no coefficients.
"""

from dataclasses import dataclass

from .model_shape import ATTENTION, LATENT, LayerShape, ModelShape
from .options import PlanOptions
from .parameters import expert_numel, projections

DELTA_BLOCK = 64
"""Tokens that a recurrent layer works through together."""
INDEX_TILE, SELECTED_TILE = 2**24, 2**22
"""Numbers that the definitions of index scores and of selected attention make at a time."""
INDEX_BLOCK = 2048
"""Keys that are scored together."""


def layer_kind(layer: LayerShape) -> str:
    """Under which the coefficients of a layer are found."""
    return layer.kind if layer.mlp_width else f"{layer.kind}, experts"


MLP_WIDTHS = ("mlp", "routed hidden", "routed experts", "experts", "shared expert")
"""Of what an MLP alone makes: gone when attention is at work, forwards and backwards."""


@dataclass(frozen=True)
class Run:
    """What a layer is run over, on the rank that has most of it.

    Attributes:
        num_tokens: of all rows of a chunk.
        history_tokens: that this rank owns of what lies before the chunk.
    """

    num_tokens: int
    history_tokens: int


def widths(
    shape: ModelShape, layer: LayerShape, options: PlanOptions, run: Run
) -> dict[str, float]:
    """Of one layer, for one of the tokens of a run."""
    found = {"hidden": float(shape.hidden_size)}
    if layer.kind == ATTENTION:
        found |= _attention(shape, layer, options)
    elif layer.kind == LATENT:
        found |= _latent(shape, options)
        if "index_head_dim" in shape.config:
            found |= _selected(shape, layer, options, run)
    else:
        found |= _recurrent(shape)
    if layer.mlp_width:
        found["mlp"] = layer.mlp_width
    else:
        found |= _experts(shape)
    if not options.lora_rank:
        # Its gradient, before it is added to what there is; divided among the tokens.
        found["weight"] = _largest_weight(shape, layer) / run.num_tokens
    else:
        trained = [p for p in projections(shape, layer) if p.is_trainable]
        found["adapter"] = options.lora_rank * len(trained)
    return found


def _largest_weight(shape: ModelShape, layer: LayerShape) -> int:
    """Numbers of the largest tensor; of routed experts two of three projections are one."""
    return max(
        expert_numel(shape, layer) * 2 // 3, *(p.weight_numel for p in projections(shape, layer))
    )


def _all_ranks(options: PlanOptions, width: float) -> float:
    """Of the queries of all ranks that share a prompt, which come to each of them."""
    return width * options.engine.sp_size if options.engine.sp_size > 1 else 0.0


def _attention(shape: ModelShape, layer: LayerShape, options: PlanOptions) -> dict[str, float]:
    queries = shape.num_heads * shape.head_dim
    is_defined = layer.window is not None or "attn_logit_softcapping" in shape.config
    sp_size = options.engine.sp_size
    scores = shape.num_heads * sp_size * options.page_tokens
    return {
        "queries": queries,
        "gathered queries": _all_ranks(options, queries),
        "keys": shape.num_kv_heads * shape.head_dim,
        "heads": shape.num_heads * sp_size,
        "scores": scores if is_defined and not options.has_kernels else 0.0,
    }


def _latent(shape: ModelShape, options: PlanOptions) -> dict[str, float]:
    heads, latent, sp_size = shape.num_heads, shape.num_latent_dims, options.engine.sp_size
    plain, rotary = shape["qk_nope_head_dim"], shape["qk_rope_head_dim"]
    selects = "index_head_dim" in shape.config
    scores = heads * sp_size * options.page_tokens
    return {
        "queries": heads * (plain + rotary),
        "values": heads * shape["v_head_dim"],
        "latent queries": heads * latent,
        "gathered queries": _all_ranks(options, heads * latent),
        "latents": latent,
        "query rank": shape.get("q_lora_rank", 0),
        "heads": heads * sp_size,
        "scores": 0.0 if options.has_kernels or selects else scores,
    }


def _selected(
    shape: ModelShape, layer: LayerShape, options: PlanOptions, run: Run
) -> dict[str, float]:
    """Of attention to selected tokens, which reads the history as one table."""
    sp_size, latent, top = options.engine.sp_size, shape.num_latent_dims, shape["index_topk"]
    dim = shape["index_n_heads"] * shape["index_head_dim"] if layer.has_indexer else 0
    keys = min(max(run.history_tokens, run.num_tokens), INDEX_BLOCK)
    scores = keys * sp_size if layer.has_indexer else 0
    index_tile = min(run.num_tokens * scores * shape["index_n_heads"], INDEX_TILE)
    tile = min(run.num_tokens * sp_size * top * latent, SELECTED_TILE)
    return {
        "table": (run.history_tokens / run.num_tokens + 1) * latent,
        "selected": top * sp_size,
        "index queries": dim,
        "gathered index queries": _all_ranks(options, dim),
        "index scores": scores,
        "index tile": 0.0 if options.has_kernels else index_tile / run.num_tokens,
        "selected tile": 0.0 if options.has_kernels else tile / run.num_tokens,
    }


def _recurrent(shape: ModelShape) -> dict[str, float]:
    heads = shape["linear_num_value_heads"]
    keys, values = shape["linear_key_head_dim"], shape["linear_value_head_dim"]
    return {
        "channels": shape.num_channels,
        "recurrent keys": heads * keys,
        "recurrent values": heads * values,
        "recurrent heads": heads * DELTA_BLOCK,
        "recurrent states": heads * keys * values / DELTA_BLOCK,
    }


def _experts(shape: ModelShape) -> dict[str, float]:
    per_token = shape["num_experts_per_tok"]
    shared = 0
    if shape.family.shared_expert == "gated":
        shared = shape["shared_expert_intermediate_size"]
    elif shape.family.shared_expert == "plain":
        shared = shape["moe_intermediate_size"] * shape.get("n_shared_experts", 1)
    return {
        "routed hidden": per_token * shape.hidden_size,
        "routed experts": per_token * shape.expert_width,
        "experts": shape.num_experts,
        "shared expert": shared,
    }
