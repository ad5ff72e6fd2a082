"""What `run.sh` takes on each GPU, from the shapes alone: no weights, no GPU, no network.

    python -m examples.glm52.dry_run [--device_gib 139.7] [options as given to run.sh]

Reads the options in `run.sh` with the run's own parser and checks, builds the model of
`config.json` on the meta device, and prints every term of a rank's memory. Exits with 1 if the run
does not fit, and 2 if an option is wrong.

The shapes in `config.json` are put together from published descriptions of the model and the
defaults of transformers; no checkpoint was read.
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
from examples.dry_run.table import DEVICE_GIB, Plan, report, room_bytes, rows_and_tokens
from examples.dry_run.terms import BF16, Term, tokens_here, total
from examples.glm52.terms import (
    EXCHANGES,
    adapter_terms,
    expert_bytes_per_row,
    kept_terms,
    slice_of,
    state_terms,
    unkept_bytes,
    weight_terms,
)
from examples.glm52.train import make_parser
from longstraw import ConfigError, LongStrawError
from longstraw.models import Decoder
from trl_integration.deepspeed_checks import check_divided_experts

FOLDER = Path(__file__).parent
PROMPT_TOKENS = 2**21
PAPER = (
    "paper: 5.8125 GiB of state per rank, 186 GiB in all, in host memory; 112.6 to 145.1 GB "
    "allocated\n  per GPU in the capture, 32 H20, group of 2, response-only gradient"
)
PROMPT_GRADIENTS = ("exact", "stopped")
LAUNCHER = ["--machine_rank", "--main_process_ip", "--main_process_port"]


def read_run(options: list[str]) -> Run:
    """The options of `run.sh` and those given behind them, see `examples.dry_run.launch`.

    Raises:
        ConfigError: an option, or the launch, cannot be honoured.
        SystemExit, ValueError: an option is unknown.
    """
    run, model_args = read_launch(FOLDER, make_parser(), options, LAUNCHER)
    if run.zero_stage != 0:
        raise ConfigError(f"the launch is ZeRO-{run.zero_stage}: the table is that of ZeRO-0.")
    if model_args.load_in_4bit or model_args.load_in_8bit or model_args.dtype != "bfloat16":
        raise ConfigError("the table is that of weights in bf16: --dtype bfloat16 alone.")
    return run


def expert_parallel_size(run: Run) -> int:
    """Ranks that routed experts are divided over."""
    section = run.deepspeed.get("expert_parallel", {})
    return section.get("autoep_size", 1) if section.get("enabled") else 1


def check_experts(config: Any, run: Run) -> None:
    """Raise `ConfigError` if experts cannot be divided as the launch says."""
    ep_size, num_experts = expert_parallel_size(run), config.n_routed_experts
    if num_experts % ep_size or run.world_size % ep_size:
        raise ConfigError(
            f"autoep_size={ep_size} with {num_experts} experts on {run.world_size} processes: it "
            "has to divide both."
        )
    if run.engine.sp_size % ep_size:
        raise ConfigError(
            f"longstraw_sp_size={run.engine.sp_size} with autoep_size={ep_size}: processes that "
            "decode different tokens need all experts on each, which fit none. Make it a multiple."
        )


class Work:
    """What exists for one layer, or one slice of logits, at a time: counted on the meta device.

    Of layers that select, which have all that those have that share a selection; of the last one a
    prompt needs the state alone. They have one rank's experts, each of which every token of this
    rank is sent to: as many rows as come from all ranks when these choose experts evenly.

    Attributes:
        bytes_per_row: of a token at one of its experts, on its way there and back too.
    """

    def __init__(self, config: Any, run: Run, prompt_tokens: int) -> None:
        self.engine, self.config = run.engine, config
        self.prompt_tokens = prompt_tokens
        here = max(config.n_routed_experts // expert_parallel_size(run), config.num_experts_per_tok)
        self.first, self.layers = (
            decoder_on_meta(slice_of(config, kinds, here), run.lora, self.engine)
            for kinds in (["full"], ["full", "full", "shared"])
        )
        self.bytes_per_logit = logits_bytes_per_entry()
        self.bytes_per_row = (
            expert_bytes_per_row(self.first) + EXCHANGES * config.hidden_size * BF16
        )
        self._counts: dict[tuple[int, int], tuple[int, int]] = {}

    def _count(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """Of a capture and of a backward at the end of the prompt, beside what layers before the
        one at work keep."""
        chunk = self.engine, num_rows, num_tokens
        if chunk[1:] not in self._counts:
            counts = count_passes(self.layers, *chunk, self.prompt_tokens)
            self._counts[chunk[1:]] = counts
        capture, backward = self._counts[chunk[1:]]
        kept = total(kept_terms(self.first, *chunk))
        return capture - unkept_bytes(self.first, *chunk), backward - kept

    def even_rows(self, num_rows: int, num_tokens: int) -> int:
        """Tokens at experts of this rank when all tokens choose evenly."""
        return tokens_here(self.engine, num_rows, num_tokens) * self.config.num_experts_per_tok

    def capture(self, decoder: Decoder) -> Term:
        """Of a chunk of the prompt, without a graph; all layers of `decoder` hold their state."""
        size = self.engine.chunk_size
        num_bytes, _ = self._count(1, size)
        held = unkept_bytes(decoder, self.engine, 1, size)
        return Term(
            "a capture",
            num_bytes + held,
            f"{size:,} tokens without a graph, of which {held:,} B for pages",
        )

    def terms(self, num_rows: int, num_tokens: int) -> list[Term]:
        """Of a backward of rows of a chunk."""
        engine, vocabulary = self.engine, self.config.vocab_size
        _, layer = self._count(num_rows, num_tokens)
        routed = self.even_rows(num_rows, num_tokens)
        slice_rows = engine.logprob_chunk_size
        return [
            Term(
                "a layer",
                layer,
                f"{num_rows * num_tokens:,} queries of all ranks, and a table of "
                f"{self.prompt_tokens // engine.sp_size:,} tokens' state",
            ),
            Term(
                "its routed experts",
                routed * self.bytes_per_row,
                f"{routed:,} rows x {self.bytes_per_row:,} B, when tokens choose evenly",
            ),
            Term(
                "a slice of logits",
                int(self.bytes_per_logit * slice_rows * vocabulary),
                f"{slice_rows} x {vocabulary:,} x {self.bytes_per_logit:.0f} B",
            ),
        ]


def rollout_term(decoder: Decoder, run: Run) -> Term:
    """Of the responses that are decoded, in place of cotangents and graph."""
    rows, tokens = run.args.num_generations or 1, run.args.max_completion_length or 1
    room = 1 << (tokens - 1).bit_length()  # buffers double
    num_bytes = decoder.state_bytes(rows * room, with_cotangents=False)
    return Term("decoding", num_bytes, f"{rows} x {room:,} tokens on every rank")


def make_plan(run: Run, work: Work, decoder: Decoder, prompt_tokens: int) -> Plan:
    """Count everything."""
    engine, (rows, tokens) = run.engine, rows_and_tokens(run)
    ep_size, model = expert_parallel_size(run), decoder.model
    page = decoder.state_bytes(engine.page_size, with_cotangents=True) // decoder.num_layers
    return Plan(
        fixed=[*weight_terms(model, ep_size), *adapter_terms(model, ep_size)],
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
    check_groups(run)
    check_experts(config, run)
    decoder = decoder_on_meta(config, run.lora, run.engine)
    check_divided_experts(run.deepspeed, decoder.model, run.args)
    decoder.check_positions(prompt_tokens + (run.args.max_completion_length or 0))
    return decoder


def make_plans(run: Run, work: Work, decoder: Decoder, prompt_tokens: int) -> dict[str, Plan]:
    """Of both gradients."""
    plans = {}
    for gradient in PROMPT_GRADIENTS:
        one = replace(run, engine=replace(run.engine, prompt_gradient=gradient))
        plans[gradient] = make_plan(one, work, decoder, prompt_tokens)
    return plans


def show_rows(work: Work, plan: Plan, run: Run, device_gib: float) -> None:
    """Print how unevenly tokens may choose experts: the rows that a rank has room for."""
    rows, tokens = rows_and_tokens(run)
    held = plan.device_bytes(run.engine.page_device) - max(term.num_bytes for term in plan.work)
    fitting = max(0, room_bytes(device_gib) - held) // work.bytes_per_row
    most = rows * tokens * work.config.num_experts_per_tok
    print(
        f"routed rows of a rank: {work.even_rows(rows, tokens):,} when tokens choose evenly, "
        f"{min(fitting, most):,} fit, {most:,} if all\n  tokens of a chunk choose its experts"
    )


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
    work = Work(config, run, own.prompt_tokens)
    plans = make_plans(run, work, decoder, own.prompt_tokens)
    status = report(plans, run, own, PAPER)
    show_rows(work, plans[run.engine.prompt_gradient], run, own.device_gib)
    return status


if __name__ == "__main__":
    sys.exit(main())
