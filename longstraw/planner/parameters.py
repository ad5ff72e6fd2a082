"""A model's parameters, counted from its shape: projections, experts, and what is neither.

adapter of rank r on a projection of n inputs and m outputs:    r (n + m) parameters
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .model_shape import ATTENTION, LATENT, LayerShape, ModelShape


@dataclass(frozen=True)
class Projection:
    """A linear layer.

    Attributes:
        name: as in the model's code.
        inputs, outputs: features.
        has_bias: whether a bias is added.
        is_trainable: False for what selects tokens, which has no gradient.
    """

    name: str
    inputs: int
    outputs: int
    has_bias: bool = False
    is_trainable: bool = True

    @property
    def weight_numel(self) -> int:
        return self.inputs * self.outputs

    @property
    def numel(self) -> int:
        return self.weight_numel + (self.outputs if self.has_bias else 0)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by what becomes of them.

    Attributes:
        projections: weights of linear layers other than the head, which NF4 packs.
        num_projections: how many linear layers.
        experts: routed experts', which expert parallelism divides.
        routers: routers', in fp32 in DeepSeek's families.
        embeddings: input embeddings, and the head if it is not the same.
        others: norms, biases, convolutions, sinks.
        indexers: of all these, those that have no gradient.
        largest_layer: of one layer, which ZeRO-3 gathers.
    """

    projections: int
    num_projections: int
    experts: int
    routers: int
    embeddings: int
    others: int
    indexers: int
    largest_layer: int

    @property
    def total(self) -> int:
        parts = self.projections + self.experts + self.routers + self.embeddings
        return parts + self.others


def count_parameters(shape: ModelShape) -> ParameterCount:
    """All of a model's."""
    linears = [p for layer in shape.layers for p in projections(shape, layer)]
    experts = [expert_numel(shape, layer) for layer in shape.layers]
    routers = sum(router_numel(shape, layer) for layer in shape.layers)
    others = sum(_other_numel(shape, layer) for layer in shape.layers) + shape.hidden_size
    biases = sum(p.numel - p.weight_numel for p in linears)
    sizes = [layer_numel(shape, layer) for layer in shape.layers]
    selecting = sum(p.numel for p in linears if not p.is_trainable)
    selecting += 2 * shape.get("index_head_dim", 0) * shape.num_indexers
    vocabulary = shape["vocab_size"] * shape.hidden_size
    return ParameterCount(
        projections=sum(p.weight_numel for p in linears),
        num_projections=len(linears),
        experts=sum(experts),
        routers=routers,
        embeddings=vocabulary if shape.is_tied else 2 * vocabulary,
        others=others + biases,
        indexers=selecting,
        largest_layer=max(sizes),
    )


def adapter_numel(shape: ModelShape, rank: int) -> int:
    """Trained parameters of adapters of `rank` on every projection of the layers.

    Those on indexers have no gradient and do not count; routed experts have none.
    """
    linears = [p for layer in shape.layers for p in projections(shape, layer)]
    return rank * sum(p.inputs + p.outputs for p in linears if p.is_trainable)


def layer_numel(shape: ModelShape, layer: LayerShape) -> int:
    """All parameters of one layer."""
    total = sum(p.numel for p in projections(shape, layer)) + expert_numel(shape, layer)
    return total + router_numel(shape, layer) + _other_numel(shape, layer)


def projections(shape: ModelShape, layer: LayerShape) -> list[Projection]:
    """The linear layers of one layer, in the order of its forward."""
    if layer.kind == ATTENTION:
        found = list(_attention(shape))
    elif layer.kind == LATENT:
        found = list(_latent(shape, layer))
    else:
        found = list(_recurrent(shape))
    return [*found, *_mlp(shape, layer)]


def _attention(shape: ModelShape) -> Iterator[Projection]:
    hidden, dim = shape.hidden_size, shape.head_dim
    query, state = shape.num_heads * dim, shape.num_kv_heads * dim
    bias = shape.family.bias
    if "attention_bias" in shape.config and bias != "qkv":
        bias = "qkvo" if shape.config["attention_bias"] else ""
    gate = query if shape.family.gated_query else 0
    yield Projection("q_proj", hidden, query + gate, "q" in bias)
    yield Projection("k_proj", hidden, state, "k" in bias)
    yield Projection("v_proj", hidden, state, "v" in bias)
    yield Projection("o_proj", query, hidden, "o" in bias)


def _latent(shape: ModelShape, layer: LayerShape) -> Iterator[Projection]:
    hidden, heads, rank = shape.hidden_size, shape.num_heads, shape["kv_lora_rank"]
    rotary, plain, values = (
        shape[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    bias, query = bool(shape.config.get("attention_bias")), heads * (plain + rotary)
    query_rank = shape.get("q_lora_rank", 0)
    if query_rank:
        yield Projection("q_a_proj", hidden, query_rank, bias)
        yield Projection("q_b_proj", query_rank, query)
    else:
        yield Projection("q_proj", hidden, query)
    yield Projection("kv_a_proj_with_mqa", hidden, rank + rotary, bias)
    yield Projection("kv_b_proj", rank, heads * (plain + values))
    yield Projection("o_proj", heads * values, hidden, bias)
    if layer.has_indexer:
        dim, index_heads = shape["index_head_dim"], shape["index_n_heads"]
        yield Projection("indexer.wq_b", query_rank, index_heads * dim, is_trainable=False)
        yield Projection("indexer.wk", hidden, dim, is_trainable=False)
        yield Projection("indexer.weights_proj", hidden, index_heads, is_trainable=False)


def _recurrent(shape: ModelShape) -> Iterator[Projection]:
    hidden, heads = shape.hidden_size, shape["linear_num_value_heads"]
    values = heads * shape["linear_value_head_dim"]
    if shape.family.packed:
        yield Projection("in_proj_qkvz", hidden, shape.num_channels + values)
        yield Projection("in_proj_ba", hidden, 2 * heads)
    else:
        yield Projection("in_proj_qkv", hidden, shape.num_channels)
        yield Projection("in_proj_z", hidden, values)
        yield Projection("in_proj_b", hidden, heads)
        yield Projection("in_proj_a", hidden, heads)
    yield Projection("out_proj", values, hidden)


def _mlp(shape: ModelShape, layer: LayerShape) -> Iterator[Projection]:
    hidden, kind = shape.hidden_size, shape.family.shared_expert
    width, prefix = layer.mlp_width, ""
    if not width and kind is None:
        return
    if not width and kind == "gated":
        width, prefix = shape["shared_expert_intermediate_size"], "shared_expert."
        yield Projection("shared_expert_gate", hidden, 1)
    elif not width:
        width = shape["moe_intermediate_size"] * shape.get("n_shared_experts", 1)
        prefix = "shared_experts."
    bias = bool(shape.config.get("mlp_bias"))
    yield Projection(f"{prefix}gate_proj", hidden, width, bias)
    yield Projection(f"{prefix}up_proj", hidden, width, bias)
    yield Projection(f"{prefix}down_proj", width, hidden, bias)


def expert_numel(shape: ModelShape, layer: LayerShape) -> int:
    """Parameters of one layer's routed experts."""
    if layer.mlp_width:
        return 0
    hidden, width = shape.hidden_size, shape.expert_width
    each = 3 * hidden * width
    if shape.family.sinks:
        each += 2 * width + hidden  # biases
    return shape.num_experts * each


def router_numel(shape: ModelShape, layer: LayerShape) -> int:
    """Parameters of one layer's router."""
    if layer.mlp_width:
        return 0
    return shape.num_experts * (shape.hidden_size + (1 if shape.family.sinks else 0))


def _other_numel(shape: ModelShape, layer: LayerShape) -> int:
    """Norms, and what else of a layer is no projection, expert or router."""
    family, total = shape.family, (4 if shape.family.sandwich else 2) * shape.hidden_size
    if layer.kind == ATTENTION:
        total += 2 * shape.head_dim if family.qk_norm else 0
        return total + (shape.num_heads if family.sinks else 0)
    if layer.kind == LATENT:
        total += shape.get("q_lora_rank", 0) + shape["kv_lora_rank"]
        return total + (2 * shape["index_head_dim"] if layer.has_indexer else 0)
    total += shape.num_channels * shape["linear_conv_kernel_dim"]
    return total + 2 * shape["linear_num_value_heads"] + shape["linear_value_head_dim"]
