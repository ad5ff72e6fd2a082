"""One update on a long prompt through a small GLM with sparse attention.

    python examples/sparse_long_prompt.py --prompt_tokens 131072
    python examples/sparse_long_prompt.py --prompt_tokens 32768 --exact

Prints the state that was held beside the formula, and what the update made beside its state: at
most that of a prompt of 8,192 tokens, and one layer's state with its gradients for each token more.
With pages on the host this is what a device holds. Five layers of latent attention as in GLM-5.2,
two of which select the 64 tokens that attention reads; the text is the source of Python's standard
library, the weights are random.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig, HfArgumentParser

from hybrid_long_prompt import update
from longstraw import EngineConfig

SHORT = 8192
"""Tokens of the prompt that says what an update takes beside its state."""

LATENT, ROTARY = 16, 8
"""Dimensions of a token's latent and rotary key."""


@dataclass
class Arguments:
    """What to run."""

    prompt_tokens: int = field(default=131_072, metadata={"help": "Tokens of the prompt."})
    exact: bool = field(default=False, metadata={"help": "The gradient through the prompt too."})
    chunk_size: int = field(default=2048, metadata={"help": "Tokens run at a time."})
    page_size: int = field(default=2048, metadata={"help": "Tokens per page."})


def main(args: Arguments) -> None:
    config = EngineConfig(
        prompt_gradient="exact" if args.exact else "stopped",
        chunk_size=args.chunk_size,
        page_size=args.page_size,
        page_device="host",
        progress=True,
    )
    short = update(config, make_model(), SHORT)
    found = update(config, make_model(), args.prompt_tokens)
    beside = found.peak_bytes - found.state_bytes
    # One layer's rows on the device, and in a backward as much again for their gradients.
    per_token = 2 * (LATENT + ROTARY) * 4
    most = short.peak_bytes - short.state_bytes + (args.prompt_tokens - SHORT) * per_token
    print(
        f"{args.prompt_tokens:,} tokens, {config.prompt_gradient}\n"
        f"  state       {found.state_bytes:>13,} bytes, formula {found.formula_bytes:,}\n"
        f"  beside it   {beside:>13,} bytes, of at most {most:,}\n"
        "  seconds     " + ", ".join(f"{k} {v:.1f}" for k, v in found.seconds.items()),
        flush=True,
    )


def make_model() -> nn.Module:
    """A random GLM; indexers on the first and the fourth layer."""
    torch.manual_seed(0)
    config = GlmMoeDsaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=5,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=LATENT,
        q_lora_rank=16,
        qk_rope_head_dim=ROTARY,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_topk=64,
        index_head_dim=16,
        index_n_heads=2,
        index_topk_pattern="FSSFS",
        initializer_range=0.2,
        max_position_embeddings=2**21,
    )
    return AutoModelForCausalLM.from_config(config).eval()


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
