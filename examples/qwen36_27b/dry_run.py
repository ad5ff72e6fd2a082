"""What `run.sh` takes on each GPU, from the shapes alone: no weights, no GPU, no network.

    python -m examples.qwen36_27b.dry_run [--device_gib 139.7] [options as given to run.sh]

Reads the options in `run.sh` with the run's own parser and checks, builds the model of
`config.json` on the meta device, and prints every term of a rank's memory. Exits with 1 if the run
does not fit, and 2 if an option is wrong.

The shapes in `config.json` are put together from published descriptions of the model; no checkpoint
was read. With them every text projection at rank 16 has 116,727,808 trained parameters.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from examples.dry_run.launch import Run, check_groups
from examples.dry_run.launch import read_run as read_launch
from examples.dry_run.meta_run import count_passes, decoder_on_meta, logits_bytes_per_entry
from examples.dry_run.table import DEVICE_GIB, Plan, report, rows_and_tokens
from examples.dry_run.terms import BF16, Term, adapter_terms, total
from examples.qwen36_27b.terms import (
    kept_terms,
    slice_of,
    state_terms,
    unkept_bytes,
    weight_terms,
)
from examples.qwen36_27b.train import make_parser
from longstraw import ConfigError, LongStrawError
from longstraw.models import Decoder
from longstraw.models.gated_deltanet import DeltaNetShape

FOLDER = Path(__file__).parent
PROMPT_TOKENS = 2**21
PAPER = "paper: 97.5 GB allocated per GPU, 8 H20, group of 2, response-only gradient"
PROMPT_GRADIENTS = ("exact", "stopped")


def read_run(options: list[str]) -> Run:
    """The options of `run.sh` and those given behind them, see `examples.dry_run.launch`.

    Raises:
        ConfigError: an option, or the launch, cannot be honoured.
        SystemExit, ValueError: an option is unknown.
    """
    run, model_args = read_launch(FOLDER, make_parser(), options)
    if run.zero_stage != 1:
        raise ConfigError(f"the launch is ZeRO-{run.zero_stage}: the table is that of ZeRO-1.")
    nested = model_args.load_in_4bit and model_args.use_bnb_nested_quant
    if not nested or model_args.dtype != "bfloat16":
        raise ConfigError(
            "the table is that of QLoRA with constants quantized again and bf16 arithmetic: "
            "--use_peft --load_in_4bit --use_bnb_nested_quant --dtype bfloat16."
        )
    return run


def check_shapes(config: Any, run: Run) -> None:
    """The engine's own checks of a hybrid that needs no weights.

    Raises:
        ConfigError: heads cannot be divided over the ranks, or kernels cannot index a chunk.
    """
    engine, shape = run.engine, DeltaNetShape.from_config(config)
    assert shape is not None, "the model has Gated DeltaNet layers"
    shape.check_ranks(engine.sp_size)
    shape.check_chunk(engine.chunk_size, engine.replay_batch or 1, engine.sp_size)


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


def make_plan(run: Run, work: Work, decoder: Decoder, prompt_tokens: int) -> Plan:
    """Count everything."""
    engine, (rows, tokens) = run.engine, rows_and_tokens(run)
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


def build(run: Run, config: Any, prompt_tokens: int) -> Decoder:
    """The model of the run on the meta device.

    Raises:
        ConfigError, DataError: the engine refuses the run.
    """
    check_shapes(config, run)
    check_groups(run)
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
    return report(make_plans(run, decoder, own.prompt_tokens), run, own, PAPER)


if __name__ == "__main__":
    sys.exit(main())
