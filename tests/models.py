"""Tiny random models that keep each family's structure, and the precision their tests need."""

import torch
import transformers as hf
from torch import nn

from longstraw.audit import Float64Islands as Float64Islands

VOCAB = 97

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 4096,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_GATED_DELTANET = {
    "full_attention_interval": 2,  # every other layer is recurrent, the one at the bottom first
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_SPARSE = {**_LATENT, "index_topk": 12, "index_head_dim": 16, "index_n_heads": 4}
_FAMILIES = {
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
    "smollm2": (hf.LlamaConfig, hf.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": 24}),
    "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {}),
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {}),
    "smollm3": (hf.SmolLM3Config, hf.SmolLM3ForCausalLM, {"no_rope_layer_interval": 4}),
    "gemma2": (
        hf.Gemma2Config,
        hf.Gemma2ForCausalLM,
        {
            "sliding_window": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": (
        hf.Gemma3TextConfig,
        hf.Gemma3ForCausalLM,
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "gpt_oss": (
        hf.GptOssConfig,
        hf.GptOssForCausalLM,
        {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        hf.Qwen3MoeForCausalLM,
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_5": (hf.Qwen3_5TextConfig, hf.Qwen3_5ForCausalLM, _GATED_DELTANET),
    "qwen3_5_moe": (
        hf.Qwen3_5MoeTextConfig,
        hf.Qwen3_5MoeForCausalLM,
        {**_GATED_DELTANET, **_EXPERTS},
    ),
    "qwen3_next": (
        hf.Qwen3NextConfig,
        hf.Qwen3NextForCausalLM,
        {**_GATED_DELTANET, **_EXPERTS, "decoder_sparse_step": 1},
    ),
    "deepseek_v3": (hf.DeepseekV3Config, hf.DeepseekV3ForCausalLM, _LATENT),
    "deepseek_v32": (hf.DeepseekV32Config, hf.DeepseekV32ForCausalLM, _SPARSE),
    "glm_moe_dsa": (
        hf.GlmMoeDsaConfig,
        hf.GlmMoeDsaForCausalLM,
        # Indexers on layers 0, 2 and 4; the others share, as does the last.
        {**_SPARSE, "num_hidden_layers": 6, "index_topk_pattern": "FSFSFS"},
    ),
    "gpt2": (hf.GPT2Config, hf.GPT2LMHeadModel, None),
}
FAMILIES = tuple(_FAMILIES)


def tiny_model(family: str, seed: int = 0, **changes: object) -> hf.PreTrainedModel:
    """A random model of `family` with sharp attention, in fp32 and eval mode."""
    config_class, model_class, special = _FAMILIES[family]
    options = _GPT2 if special is None else {**_COMMON, **special}
    config = config_class(**{**options, **changes})
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    torch.manual_seed(seed)
    return _randomize(model_class(config), seed).eval()


def _randomize(model: nn.Module, seed: int) -> nn.Module:
    """Weights large enough that softmaxes are sharp and every parameter matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                gain = 0.5 if "embed" in name or "wte" in name or "wpe" in name else 3.0
                fan = (
                    1 if "embed" in name or "wte" in name or "wpe" in name else parameter.shape[-1]
                )
                parameter.copy_(noise * gain / fan**0.5)
            elif "A_log" in name:  # decays of which some forget within a few tokens
                parameter.copy_(torch.log(torch.rand(parameter.shape, generator=generator) + 0.05))
            elif "sinks" in name or "bias" in name:
                parameter.copy_(noise * 0.3)
            else:
                parameter.add_(noise * 0.1)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.02)
    return model
