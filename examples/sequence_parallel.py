"""One update on a prompt that several ranks share: bytes, times and what travels between them.

    torchrun --standalone --nproc_per_node 2 examples/sequence_parallel.py --prompt_tokens 262144

Every rank owns a part of each chunk's tokens and keeps their state, here in host memory. Prints for
each rank the state it held beside the formula, the peak of all tensors beside what a short prompt
predicts, the bytes it received beside the formula, and the time of each phase. `--compare` makes
the update once more with the whole prompt on every rank, and compares the gradients (in fp32).

The text is the source of Python's standard library; the model a small random Llama, so that a long
prompt takes minutes on two cores.
"""

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig

from long_prompt import rewarded, standard_library
from longstraw import Engine, EngineConfig, PromptGroup
from longstraw.audit import PeakTensorBytes

SHORT = 8192
"""Tokens of the prompt that says what an update takes beside its state."""


@dataclass
class Arguments:
    """What to run."""

    prompt_tokens: int = field(default=262_144, metadata={"help": "Tokens of the prompt."})
    chunk_size: int = field(default=4096, metadata={"help": "Tokens run at a time, by all ranks."})
    page_size: int = field(default=2048, metadata={"help": "Tokens per page."})
    layout: str = field(
        default="block_cyclic", metadata={"help": "How chunks are divided: or zigzag."}
    )
    stopped: bool = field(default=False, metadata={"help": "Hold the prompt's state constant."})
    compare: bool = field(default=False, metadata={"help": "Once more unshared, and compare."})


@dataclass(frozen=True)
class Update:
    """One update, as a rank saw it.

    Attributes:
        state_bytes, formula_bytes: most held of pages and cotangents, and what they should be.
        peak_bytes: most of all tensors that the update made, state included.
        received_bytes: from other ranks.
        seconds: of each phase.
    """

    gradients: dict[str, torch.Tensor]
    state_bytes: int
    formula_bytes: int
    peak_bytes: int
    received_bytes: int
    seconds: dict[str, float]


def main(args: Arguments) -> None:
    dist.init_process_group("gloo", timeout=timedelta(hours=2))
    rank, size = dist.get_rank(), dist.get_world_size()
    config = EngineConfig(
        prompt_gradient="stopped" if args.stopped else "exact",
        chunk_size=args.chunk_size,
        page_size=args.page_size,
        page_device="host",
        sp_size=size,
        sp_layout=args.layout,  # type: ignore[arg-type]  (checked there)
        progress=rank == 0,
    )
    short = update(config, SHORT)
    if rank == 0:
        print(f"{args.prompt_tokens:,} tokens shared by {size} ranks, {config.prompt_gradient}")
    found = update(config, args.prompt_tokens)
    expected = short.peak_bytes + found.formula_bytes - short.formula_bytes
    lines = [
        f"rank {rank}",
        f"  state         {found.state_bytes:>15,} bytes, formula {found.formula_bytes:,}",
        f"  peak          {found.peak_bytes:>15,} bytes, predicted {expected:,} "
        f"({found.peak_bytes / expected - 1:+.2%})",
        f"  received      {found.received_bytes:>15,} bytes, "
        f"for the prompt by the formula {received_for_prompt(config, args.prompt_tokens - 1):,}",
        "  seconds       " + ", ".join(f"{k} {v:.1f}" for k, v in found.seconds.items()),
    ]
    every: list[str] = [""] * size
    dist.all_gather_object(every, "\n".join(lines))
    if rank == 0:
        print("\n".join(every))
    if args.compare:
        # Every rank runs the whole prompt; the mean of equal gradients is each of them.
        alone = update(replace(config, sp_size=1), args.prompt_tokens)
        for name, gradient in alone.gradients.items() if rank == 0 else ():
            error = (found.gradients[name] - gradient).norm() / gradient.norm()
            print(f"{name:>50} {error:.1e}")
    dist.destroy_process_group()


def update(config: EngineConfig, prompt_tokens: int) -> Update:
    """The gradient of one group, and what it took."""
    model, group = make_model(), group_of(prompt_tokens)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as in every step but the first
    engine = Engine(model, config)
    sequence = engine.axes.sequence
    before = sequence.received_bytes
    with PeakTensorBytes() as counter:
        engine.accumulate([group], rewarded)
    engine.finalize()
    with_cotangents = config.prompt_gradient == "exact"
    state_bytes = engine.decoder.state_bytes(group.prompt_len - 1, with_cotangents)
    return Update(
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        engine.store.peak_bytes,
        state_bytes // sequence.size,
        counter.peak_bytes,
        sequence.received_bytes - before,
        engine.ledger.take_seconds(),
    )


def received_for_prompt(config: EngineConfig, num_tokens: int) -> int:
    """What a rank gets from others for the prompt, from the table in `distributed/travel.py`.

    Of the last layer a prompt needs keys and values only, so its queries do not travel.
    """
    model = make_model().config
    heads, dim, layers = model.num_attention_heads, model.head_dim, model.num_hidden_layers - 1
    forward, backward = dim * 4 + 4 * (dim + 1), 3 * dim * 4 + 4 + 4 * dim
    passes = 2 * forward + backward if config.prompt_gradient == "exact" else forward
    starts = range(0, num_tokens, config.chunk_size)
    chunks = [min(config.chunk_size, num_tokens - start) for start in starts]
    widths = sum(-(-chunk // config.sp_size) for chunk in chunks)
    return (config.sp_size - 1) * heads * widths * passes * layers


def group_of(prompt_tokens: int) -> PromptGroup:
    """A prompt, and two responses to it."""
    text = standard_library(characters=prompt_tokens + 96)
    ids = torch.tensor(list(text.encode()))[: prompt_tokens + 80]
    return PromptGroup(ids[:prompt_tokens], [ids[-80:-32], ids[-32:]])


def make_model() -> nn.Module:
    """Two random Llama layers, the same on every rank."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            initializer_range=0.2,
            max_position_embeddings=2**20,
        )
    ).eval()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit(
            "Start it on several ranks: torchrun --standalone --nproc_per_node 2 "
            "examples/sequence_parallel.py"
        )
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
