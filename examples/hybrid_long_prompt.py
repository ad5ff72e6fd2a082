"""One update on a million prompt tokens through a small hybrid of Gated DeltaNet and attention.

    python examples/hybrid_long_prompt.py --prompt_tokens 1048576
    python examples/hybrid_long_prompt.py --prompt_tokens 131072 --exact

Prints the state that was held beside the formula, the peak of all tensors that the update made
beside what a prompt of 16,384 tokens and the formula predict, and the time of each phase. Eight
layers, of which every fourth attends, as in Qwen3.5 and 3.6; the text is the source of Python's
standard library, the weights are random. `torchrun --nproc_per_node 2` divides tokens and heads.
"""

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, HfArgumentParser, Qwen3_5TextConfig

from long_prompt import rewarded
from longstraw import Engine, EngineConfig
from longstraw.audit import PeakTensorBytes
from sequence_parallel import group_of

SHORT = 16_384
"""Tokens of the prompt that says what an update takes beside its state."""


@dataclass
class Arguments:
    """What to run."""

    prompt_tokens: int = field(default=1_048_576, metadata={"help": "Tokens of the prompt."})
    exact: bool = field(default=False, metadata={"help": "The gradient through the prompt too."})
    layers: int = field(default=8, metadata={"help": "Layers; every fourth attends."})
    chunk_size: int = field(default=8192, metadata={"help": "Tokens run at a time."})
    page_size: int = field(default=4096, metadata={"help": "Tokens per page."})


@dataclass(frozen=True)
class Update:
    """What one update took on this rank.

    Attributes:
        state_bytes, formula_bytes: most held of state and cotangents, and what it should be.
        snapshot_bytes: the recurrent part of the formula.
        peak_bytes: most of all tensors that the update made, state included.
    """

    state_bytes: int
    formula_bytes: int
    snapshot_bytes: int
    peak_bytes: int
    seconds: dict[str, float]


def main(args: Arguments) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(hours=2))
    size = dist.get_world_size() if dist.is_initialized() else 1
    config = EngineConfig(
        prompt_gradient="exact" if args.exact else "stopped",
        chunk_size=args.chunk_size,
        page_size=args.page_size,
        page_device="host",
        sp_size=size,
        progress=not dist.is_initialized() or dist.get_rank() == 0,
    )
    short = update(config, make_model(args.layers), SHORT)
    found = update(config, make_model(args.layers), args.prompt_tokens)
    predicted = short.peak_bytes + found.formula_bytes - short.formula_bytes
    print(
        f"{args.prompt_tokens:,} tokens, {config.prompt_gradient}, {size} rank(s)\n"
        f"  state     {found.state_bytes:>15,} bytes, formula {found.formula_bytes:,}, of it "
        f"recurrent {found.snapshot_bytes:,} ({short.snapshot_bytes:,} for {SHORT:,} tokens)\n"
        f"  peak      {found.peak_bytes:>15,} bytes, predicted {predicted:,} "
        f"({found.peak_bytes / predicted - 1:+.2%})\n"
        "  seconds   " + ", ".join(f"{k} {v:.1f}" for k, v in found.seconds.items()),
        flush=True,
    )
    if dist.is_initialized():
        dist.destroy_process_group()


def update(config: EngineConfig, model: nn.Module, prompt_tokens: int) -> Update:
    """The gradient of one group, and what it took."""
    group = group_of(prompt_tokens)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as in every step but the first
    engine = Engine(model, config)
    with PeakTensorBytes() as counter:
        engine.accumulate([group], rewarded)
    engine.finalize()
    decoder, size, is_exact = engine.decoder, config.sp_size, config.prompt_gradient == "exact"
    num_tokens = prompt_tokens - 1
    num_snapshots = -(-num_tokens // config.chunk_size) if is_exact else 1
    snapshots = num_snapshots * decoder.snapshot_bytes(size)
    if is_exact:
        snapshots += decoder.snapshot_bytes(size, of_cotangents=True)
    return Update(
        engine.store.peak_bytes,
        decoder.state_bytes(num_tokens, with_cotangents=is_exact) // size + snapshots,
        snapshots,
        counter.peak_bytes,
        engine.ledger.take_seconds(),
    )


def make_model(num_layers: int) -> nn.Module:
    """A random hybrid, the same on every rank."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        initializer_range=0.2,
        max_position_embeddings=2**21,
    )
    return AutoModelForCausalLM.from_config(config).eval()


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
