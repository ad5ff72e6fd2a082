"""One update on a long prompt whose state does not fit host memory: the rest goes to files.

    python examples/long_prompt.py --prompt_tokens 131072

makes the update twice, with all pages in host memory and with the memory for pages limited to a
quarter of the state (`--host_gib` names another limit), and prints whether the gradients are the
same bit for bit, the bytes in memory and in files beside what they should be, and the times. The
text is the source of Python's standard library. The model is a small random Llama, so that a long
prompt takes minutes on one core; `--model` takes any other.
"""

import sysconfig
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, LlamaConfig

from longstraw import Engine, EngineConfig, GroupScores, PromptGroup
from longstraw.state.spill import NUM_PASSING
from smollm2 import DEFAULT_CACHE_DIR, FOLDER


@dataclass
class Arguments:
    """What to run."""

    prompt_tokens: int = field(default=131_072, metadata={"help": "Tokens of the prompt."})
    host_gib: float | None = field(
        default=None, metadata={"help": "GiB of memory for pages in the second run; a quarter."}
    )
    spill_dir: str = field(
        default=tempfile.gettempdir(), metadata={"help": "Folder for the files of pages."}
    )
    model: str | None = field(
        default=None, metadata={"help": "A causal LM; unset: two random Llama layers."}
    )
    page_size: int = field(default=512, metadata={"help": "Tokens per page."})
    chunk_size: int = field(default=2048, metadata={"help": "Tokens run at a time."})
    bf16_cotangents: bool = field(
        default=False, metadata={"help": "A third run, in memory, with bfloat16 cotangents."}
    )


@dataclass(frozen=True)
class Run:
    """One update.

    Attributes:
        state_bytes: of the prompt's pages and cotangents, by the formula.
        page_bytes: of one page and its cotangents.
        memory_bytes, disk_bytes: most of them in host memory and in files.
    """

    gradients: dict[str, Tensor]
    seconds: float
    cpu_seconds: float
    state_bytes: int
    page_bytes: int
    memory_bytes: int
    disk_bytes: int


def main(args: Arguments) -> None:
    name = args.model or str(DEFAULT_CACHE_DIR.expanduser() / FOLDER)
    text = standard_library(characters=16 * args.prompt_tokens)
    tokenizer = AutoTokenizer.from_pretrained(name) if Path(name).exists() or args.model else None
    ids = torch.tensor(tokenizer(text)["input_ids"] if tokenizer else list(text.encode()))
    prompt, rest = ids[: args.prompt_tokens], ids[args.prompt_tokens :]
    group = PromptGroup(prompt, [rest[:48], rest[48:80]])
    vocabulary = len(tokenizer) if tokenizer else 256
    config = EngineConfig(
        page_device="host",
        page_size=args.page_size,
        chunk_size=args.chunk_size,
        allow_extrapolation=True,
        progress=True,
    )
    print(f"{args.prompt_tokens:,} tokens, {'tokenizer of ' + name if tokenizer else 'bytes'}")
    whole = update(args.model, vocabulary, group, config)
    limit = int(args.host_gib * 2**30) if args.host_gib else whole.state_bytes // 4
    limited = replace(config, state_budget_bytes=limit, spill_dir=args.spill_dir)
    spilled = update(args.model, vocabulary, group, limited)
    staying = limit - NUM_PASSING * whole.page_bytes  # and up to a page less, as pages are whole
    rows = [
        ("", "in memory", "formula", "with files", "formula"),
        ("host memory, bytes", whole.memory_bytes, whole.state_bytes, spilled.memory_bytes, limit),
        ("files, bytes", whole.disk_bytes, 0, spilled.disk_bytes, whole.state_bytes - staying),
        ("seconds", f"{whole.seconds:.1f}", "", f"{spilled.seconds:.1f}", ""),
        ("seconds of CPU", f"{whole.cpu_seconds:.1f}", "", f"{spilled.cpu_seconds:.1f}", ""),
    ]
    for row in rows:
        print("".join(f"{f'{cell:,}' if isinstance(cell, int) else cell:>20}" for cell in row))
    same = all(torch.equal(whole.gradients[n], spilled.gradients[n]) for n in whole.gradients)
    print(f"gradients are {'the same bit for bit' if same else 'NOT THE SAME'}")
    print(f"slowdown {spilled.seconds / whole.seconds:.2f}")
    if args.bf16_cotangents:
        rounded = update(args.model, vocabulary, group, replace(config, cotangent_dtype="bfloat16"))
        print(f"bfloat16 cotangents: {rounded.memory_bytes:,} bytes, {rounded.seconds:.1f} seconds")
        for name, grad in whole.gradients.items():
            error = (rounded.gradients[name] - grad).norm() / grad.norm()
            print(f"{name:>50} {error:.1e}")


def update(
    model_name: str | None, vocabulary: int, group: PromptGroup, config: EngineConfig
) -> Run:
    """The exact gradient of one group under one config."""
    torch.manual_seed(0)
    if model_name is None:
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                initializer_range=0.2,
            )
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    engine = Engine(model.eval(), config)
    print(engine.describe())
    start, cpu_start = time.perf_counter(), time.process_time()
    engine.accumulate([group], rewarded)
    engine.finalize()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    state_bytes = engine.decoder.state_bytes(group.prompt_len - 1, with_cotangents=True)
    page_bytes = engine.decoder.state_bytes(config.page_size, with_cotangents=True)
    store = engine.store
    return Run(
        gradients,
        seconds,
        cpu_seconds,
        state_bytes,
        page_bytes // engine.decoder.num_layers,
        store.peak_memory_bytes,
        store.peak_disk_bytes,
    )


def rewarded(scores: list[GroupScores]) -> Tensor:
    """The first response is better than the second."""
    better, worse = scores[0].logps
    return (worse.sum() - better.sum()) / 32


def standard_library(characters: int) -> str:
    """The beginning of Python's standard library, file by file."""
    texts, found = [], 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(file.read_text(encoding="utf-8", errors="replace"))
        found += len(texts[-1])
        if found >= characters:
            break
    return "".join(texts)


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
