"""A small update like a planned one, that any machine can run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .options import PlanOptions

NUM_LAYERS = 4
MOST = {
    "hidden_size": 256,
    "vocab_size": 2048,
    "num_attention_heads": 8,
    "head_dim": 64,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_head_dim": 64,
    "index_n_heads": 4,
    "index_topk": 64,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 256,
}
"""Sizes that are cut down to these."""
SCALED = {
    "intermediate_size": "hidden_size",
    "moe_intermediate_size": "hidden_size",
    "shared_expert_intermediate_size": "hidden_size",
    "num_key_value_heads": "num_attention_heads",
    "linear_num_value_heads": "linear_num_key_heads",
}
"""Sizes that keep their ratio to another."""
PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")


def small_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of the same family with few and narrow layers, in the same proportions."""
    small = dict(config.get("text_config") or config)
    small.setdefault("model_type", config.get("model_type"))
    for name, most in MOST.items():
        if isinstance(small.get(name), int):
            small[name] = min(small[name], most)
    original = config.get("text_config") or config
    for name, like in SCALED.items():
        if isinstance(original.get(name), int) and isinstance(original.get(like), int):
            size = original[name] * small[like] / original[like]
            small[name] = (
                max(1, int(size)) if name.endswith("heads") else max(16, int(size) // 16 * 16)
            )
    small["num_hidden_layers"] = min(NUM_LAYERS, original["num_hidden_layers"])
    for name in PER_LAYER:
        if isinstance(small.get(name), list):
            # The end of a pattern has all of its kinds: the last layers.
            small[name] = small[name][-small["num_hidden_layers"] :]
    for name in ("index_topk_pattern", "rope_scaling", "quantization_config", "architectures"):
        small.pop(name, None)
    rope = dict(small.get("rope_parameters") or {})
    if "rope_type" in rope:
        kept = ("rope_theta", "partial_rotary_factor")
        small["rope_parameters"] = {"rope_type": "default"} | {
            k: rope[k] for k in kept if k in rope
        }
    if "qk_rope_head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]
    return small | {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


def small_options(options: PlanOptions) -> PlanOptions:
    """The same modes on at most two ranks of a CPU, in bf16, over a short prompt."""
    ranks = min(options.ranks, 2)
    engine = replace(
        options.engine,
        sp_size=min(options.engine.sp_size, ranks),
        chunk_size=512,
        page_size=128,
        page_device="model",
        attention="auto",
        allow_extrapolation=True,
    )
    return replace(
        options,
        prompt_tokens=min(options.prompt_tokens, 4096),
        response_tokens=min(options.response_tokens, 128),
        group_size=min(options.group_size, 4),
        lora_rank=min(options.lora_rank, 8),
        ranks=ranks,
        ep_size=1,
        is_nf4=False,
        has_kernels=False,
        decodes=False,
        engine=engine,
    )
