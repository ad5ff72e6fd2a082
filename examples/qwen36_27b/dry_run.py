"""What `run.sh` takes on each GPU, from the shapes alone: no weights, no GPU, no network.

    python -m examples.qwen36_27b.dry_run [--device_gib 139.7] [options as given to run.sh]

Reads the options in `run.sh` with the run's own parser and checks, builds the model of
`config.json` on the meta device, and prints every term of a rank's memory. Exits with 1 if the run
does not fit, and 2 if an option is wrong.

The shapes in `config.json` are put together from published descriptions of the model; no checkpoint
was read. With them every text projection at rank 16 has 116,727,808 trained parameters.
"""

import argparse
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from peft import LoraConfig
from transformers import AutoConfig
from trl import ModelConfig, get_peft_config

from examples.qwen36_27b.meta_run import (
    count_passes,
    decoder_on_meta,
    logits_bytes_per_entry,
    slice_of,
)
from examples.qwen36_27b.terms import (
    BF16,
    GIB,
    Term,
    adapter_terms,
    kept_terms,
    state_terms,
    total,
    unkept_bytes,
    weight_terms,
)
from examples.qwen36_27b.train import make_parser
from longstraw import ConfigError, EngineConfig, LongStrawError
from longstraw.models import Decoder
from longstraw.models.gated_deltanet import DeltaNetShape
from trl_integration import LongStrawGRPOConfig
from trl_integration.checks import check_config
from trl_integration.deepspeed_checks import check_deepspeed_config

FOLDER = Path(__file__).parent
PROMPT_TOKENS = 2**21
DEVICE_GIB = 139.7
"""What torch finds on a GPU sold with 141 GB."""
RESERVED_PART = 20
"""One part in this many is for CUDA, NCCL and the allocator's rounding, which are not counted."""
PAPER_GB = 97.5
"""Peak allocated per GPU in the LongStraw paper, response-only gradient, group of 2, 8 GPUs."""
PROMPT_GRADIENTS = ("exact", "stopped")
PLACEHOLDERS = ["--dataset_name", "-", "--reward_funcs", "-", "--output_dir", "out"]


@dataclass(frozen=True)
class Run:
    """What is to be run.

    Attributes:
        args: the trainer's options; those of one process, see `read_run`.
        engine: what they say to the engine, for `engine.sp_size` ranks.
        lora: the adapters.
        world_size: processes.
    """

    args: LongStrawGRPOConfig
    engine: EngineConfig
    lora: LoraConfig
    world_size: int


# -------------------------------------------------------------------- the options


def launch_words() -> tuple[list[str], list[str]]:
    """The words of `run.sh`: the launcher's, and the run's own options."""
    text = (FOLDER / "run.sh").read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("accelerate launch ")]
    words = shlex.split(line)[:-1]  # the last stands for the user's
    script = words.index("--module") + 2
    return words[2:script], words[script:]


def read_run(options: list[str]) -> Run:
    """Parse and check the options of `run.sh` and those given behind them.

    The trainer's config counts the processes it runs in, and here is one: it is made as for a rank
    by itself, and what concerns several is checked for those of the run.

    Raises:
        ConfigError: an option, or the launch, cannot be honoured.
        SystemExit, ValueError: an option is unknown.
    """
    launcher, own = launch_words()
    launched = argparse.ArgumentParser()
    launched.add_argument("--config_file", type=Path, required=True)
    launched.add_argument("--num_processes", type=int, required=True)
    launched.add_argument("--module", required=True)
    launch = launched.parse_args(launcher)
    words = [*PLACEHOLDERS, *own, *options]
    sp_size = make_parser().parse_known_args(words)[0].longstraw_sp_size
    alone = ["--longstraw_sp_size", "1", "--use_cpu", "true"]
    _, args, model_args = make_parser().parse_args_and_config([*words, *alone])
    engine = replace(args.to_engine_config(), sp_size=sp_size)
    args.longstraw_sp_size = sp_size
    check_config(args)
    _check_launch(launch.config_file, args)
    return Run(args, engine, _lora(model_args), launch.num_processes)


def _check_launch(config_file: Path, args: LongStrawGRPOConfig) -> None:
    root = FOLDER.parents[1]
    config = yaml.safe_load((root / config_file).read_text())
    deepspeed = yaml.safe_load(
        (root / config["deepspeed_config"]["deepspeed_config_file"]).read_text()
    )
    check_deepspeed_config(deepspeed, args)
    stage = deepspeed["zero_optimization"]["stage"]
    if stage != 1:
        raise ConfigError(f"{config_file} is ZeRO-{stage}: the table is that of ZeRO-1.")


def _lora(model_args: ModelConfig) -> LoraConfig:
    lora = get_peft_config(model_args)
    nested = model_args.load_in_4bit and model_args.use_bnb_nested_quant
    if lora is None or not nested or model_args.dtype != "bfloat16":
        raise ConfigError(
            "the table is that of QLoRA with constants quantized again and bf16 arithmetic: "
            "--use_peft --load_in_4bit --use_bnb_nested_quant --dtype bfloat16."
        )
    return lora


def check_shapes(config: Any, run: Run) -> None:
    """The engine's own checks of a hybrid that needs no weights.

    Raises:
        ConfigError: heads cannot be divided over the ranks, or kernels cannot index a chunk.
    """
    engine, shape = run.engine, DeltaNetShape.from_config(config)
    assert shape is not None, "the model has Gated DeltaNet layers"
    shape.check_ranks(engine.sp_size)
    shape.check_chunk(engine.chunk_size, engine.replay_batch or 1, engine.sp_size)
    if run.world_size % engine.sp_size:
        raise ConfigError(
            f"longstraw_sp_size={engine.sp_size} with --num_processes {run.world_size}: the number "
            "of processes is a multiple of the ranks that share a prompt."
        )


# -------------------------------------------------------------------- the terms


class Work:
    """What exists for one layer, or one slice of logits, at a time: counted on the meta device."""

    def __init__(self, config: Any, run: Run) -> None:
        self.engine = engine = run.engine
        self.vocabulary = config.vocab_size
        self.unpacked = config.hidden_size * config.intermediate_size * BF16
        layers = slice_of(config, ["full_attention"] * 2)
        self.attention = decoder_on_meta(layers, run.lora, engine)
        # A scan of many steps, and linear in its tokens: two short ones say all.
        layers = slice_of(config, ["linear_attention", "full_attention"])
        recurrent = decoder_on_meta(layers, run.lora, engine)
        self.few = 64 * engine.sp_size
        short, longer = (self._backward(recurrent, 1, n * self.few) for n in (1, 2))
        self.first, self.per_few = short, longer - short
        self.bytes_per_logit = logits_bytes_per_entry()

    def _backward(self, layers: Decoder, num_rows: int, num_tokens: int) -> int:
        """Of a backward, beside what all layers keep."""
        _, backward = count_passes(layers, self.engine, num_rows, num_tokens)
        return backward - total(kept_terms(layers, self.engine, num_rows, num_tokens))

    def capture(self, decoder: Decoder) -> Term:
        """Of a chunk of the prompt, without a graph; all layers of `decoder` hold their state."""
        size = self.engine.chunk_size
        num_bytes, _ = count_passes(self.attention, self.engine, 1, size)
        of_two, of_all = (
            unkept_bytes(layers, self.engine, 1, size) for layers in (self.attention, decoder)
        )
        return Term(
            "a capture",
            num_bytes - of_two + of_all + self.unpacked,
            f"{size:,} tokens without a graph, of which {of_all:,} B for pages and snapshots",
        )

    def terms(self, num_rows: int, num_tokens: int) -> list[Term]:
        """Of a backward of rows of a chunk, with the largest weight unpacked from NF4."""
        num_queries, engine = num_rows * num_tokens, self.engine
        attention = self._backward(self.attention, num_rows, num_tokens)
        recurrence = self.first + self.per_few * (num_queries - self.few) // self.few
        slice_rows = engine.logprob_chunk_size
        tile = num_queries * engine.page_size
        heads = self.attention.config.num_attention_heads
        return [
            Term(
                "an attention layer",
                attention + self.unpacked,
                f"{num_queries:,} queries of all ranks; tiles of {heads} x {tile:,} scores in fp32",
            ),
            Term(
                "a Gated DeltaNet layer",
                recurrence + self.unpacked,
                f"{num_queries:,} tokens of 1/{engine.sp_size} of the heads, and the MLP",
            ),
            Term(
                "a slice of logits",
                int(self.bytes_per_logit * slice_rows * self.vocabulary),
                f"{slice_rows} x {self.vocabulary:,} x {self.bytes_per_logit:.0f} B",
            ),
        ]


def rollout_term(decoder: Decoder, run: Run) -> Term:
    """Of the responses that are decoded, in place of cotangents and graph."""
    rows, tokens = run.args.num_generations or 1, run.args.max_completion_length or 1
    room = 1 << (tokens - 1).bit_length()  # buffers double
    num_bytes = decoder.state_bytes(rows * room, with_cotangents=False)
    num_bytes += 2 * rows * decoder.snapshot_bytes(run.engine.sp_size)
    arithmetic = f"{rows} x {room:,} tokens on every rank, and two states of each"
    return Term("decoding", num_bytes, arithmetic)


@dataclass(frozen=True)
class Plan:
    """One rank's memory for one of the two gradients.

    Attributes:
        fixed: weights, adapters, optimizer.
        state: of the prompt.
        kept: by all layers for a backward.
        work: beside it, one at a time.
        others: other passes, in place of a backward.
        staged: pages on their way, if they are on the host.
    """

    fixed: list[Term]
    state: list[Term]
    kept: list[Term]
    work: list[Term]
    others: list[Term]
    staged: Term

    def device_bytes(self, page_device: str) -> int:
        """The most that is held at a time."""
        backward = total(self.kept) + max(term.num_bytes for term in self.work)
        largest = max(backward, *(term.num_bytes for term in self.others))
        held = total(self.state) if page_device == "model" else self.staged.num_bytes
        return total(self.fixed) + held + largest


def make_plan(run: Run, work: Work, decoder: Decoder, prompt_tokens: int) -> Plan:
    """Count everything.

    The largest graph is that of a chunk of the prompt; if the prompt is held constant, that of the
    responses that are replayed together, which have half of a chunk's tokens.
    """
    engine, args = run.engine, run.args
    rows, tokens = 1, engine.chunk_size
    if not engine.needs_prompt_backward:
        tokens = min(args.max_completion_length or 1, engine.chunk_size)
        rows = engine.replay_batch or max(1, engine.chunk_size // 2 // tokens)
        rows = min(rows, args.num_generations or 1)
    trained = sum(p.numel() for p in decoder.trainable_parameters())
    page = decoder.state_bytes(engine.page_size, with_cotangents=True)
    return Plan(
        fixed=[*weight_terms(decoder.model), *adapter_terms(trained, run.world_size)],
        state=state_terms(decoder, engine, prompt_tokens),
        kept=kept_terms(decoder, engine, rows, tokens),
        work=work.terms(rows, tokens),
        others=[work.capture(decoder), rollout_term(decoder, run)],
        staged=Term("pages on their way", 2 * page, "two pages with cotangents"),
    )


# -------------------------------------------------------------------- the table


def show(plan: Plan, gradient: str, num_ranks: int) -> None:
    """Print every term of a plan; of those under `+`, the largest counts."""
    title = f"{gradient}, one of {num_ranks} ranks"
    print(f"{title:<34} {'GiB':>8}   from")
    for term in [*plan.fixed, *plan.state, *plan.kept]:
        print(term)
    largest = max(plan.work, key=lambda term: term.num_bytes)
    for term in plan.work:
        print(replace(term, name=f"  {'+' if term is largest else ' '} {term.name}"))
    for term in plan.others:
        print(replace(term, name=f"    or {term.name}"))
    host = total(plan.state) * num_ranks / GIB
    notes = {"model": "", "host": f", and {host:,.1f} GiB of host memory for {num_ranks} ranks"}
    for page_device, note in notes.items():
        num_bytes = plan.device_bytes(page_device)
        print(Term(f"total, pages on {page_device}", num_bytes, f"{num_bytes / 1e9:.1f} GB{note}"))
    print()


def ways_out(plan: Plan, run: Run) -> list[str]:
    """What to change for less memory."""
    engine, ways = run.engine, []
    if engine.page_device == "model":
        gib = (total(plan.state) - plan.staged.num_bytes) / GIB
        ways.append(f"--longstraw_page_device host (-{gib:.1f} GiB)")
    if engine.needs_prompt_backward and engine.cotangent_dtype == "float32":
        ways.append("--longstraw_cotangent_dtype bfloat16 (half of their cotangents)")
    half = engine.chunk_size // 2
    ways.append(f"--longstraw_chunk_size {half} (half of the graph, a quarter of the scores)")
    return ways


def build(run: Run, config: Any, prompt_tokens: int) -> Decoder:
    """The model of the run on the meta device.

    Raises:
        ConfigError, DataError: the engine refuses the run.
    """
    check_shapes(config, run)
    decoder = decoder_on_meta(config, run.lora, run.engine)
    decoder.check_positions(prompt_tokens + (run.args.max_completion_length or 0))
    return decoder


def make_plans(run: Run, decoder: Decoder, prompt_tokens: int) -> dict[str, Plan]:
    """Of both gradients."""
    work, plans = Work(decoder.config, run), {}
    for gradient in PROMPT_GRADIENTS:
        one = replace(run, engine=replace(run.engine, prompt_gradient=gradient))
        plans[gradient] = make_plan(one, work, decoder, prompt_tokens)
    return plans


def judge(plan: Plan, run: Run, device_gib: float) -> bool:
    """Say whether the run fits, and if not what would."""
    engine = run.engine
    needed = plan.device_bytes(engine.page_device) / GIB
    room = device_gib * (1 - 1 / RESERVED_PART)
    fits = needed <= room
    print(f"paper: {PAPER_GB} GB allocated per GPU, 8 H20, group of 2, response-only gradient")
    print(
        f"{'fits' if fits else 'does not fit'}: {engine.prompt_gradient}, pages on "
        f"{engine.page_device}, {needed:.1f} GiB of {room:.1f} ({device_gib} less one part in "
        f"{RESERVED_PART} for what is not counted)"
    )
    if not fits:
        print("  change one of: " + "; ".join(ways_out(plan, run)))
    return fits


def main(words: list[str] | None = None) -> int:
    """Exit status: 0 it fits, 1 it does not, 2 an option is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device_gib", type=float, default=DEVICE_GIB, help="memory of a GPU")
    parser.add_argument("--prompt_tokens", type=int, default=PROMPT_TOKENS)
    own, options = parser.parse_known_args(words)
    config = AutoConfig.from_pretrained(FOLDER)
    try:
        run = read_run(options)
        decoder = build(run, config, own.prompt_tokens)
    except (LongStrawError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    plans, engine = make_plans(run, decoder, own.prompt_tokens), run.engine
    print(
        f"{own.prompt_tokens:,} prompt tokens, {run.world_size} ranks, {engine.sp_size} of which "
        f"share it, chunks of {engine.chunk_size:,}\n"
    )
    for gradient, plan in plans.items():
        show(plan, gradient, run.world_size)
    return 0 if judge(plans[engine.prompt_gradient], run, own.device_gib) else 1


if __name__ == "__main__":
    sys.exit(main())
