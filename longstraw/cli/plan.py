"""Tell what an update takes on each rank, from a model's config.json: no weights, no GPU.

Every line shows its arithmetic; the phase that takes most is shown. Sizes take units: 2Mi is
2,097,152, 8Ki is 8,192. Seconds are estimates from the rates that are given. Exits with 1 if the
update does not fit.

  longstraw plan --model examples/qwen36_27b --prompt-tokens 2Mi --sp 8 --lora-rank 16 --nf4 \\
      --device-gib 141 --chunk-size 32Ki --page-size 1Ki
  longstraw plan --model Qwen/Qwen3-8B --prompt-tokens 128Ki --ranks 8 --write zero.json
  longstraw plan --model Qwen/Qwen3-8B --prompt-tokens 128Ki --measure
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import COTANGENT_DTYPES, PAGE_DEVICES, PROMPT_GRADIENTS, EngineConfig
from ..errors import ConfigError, LongStrawError
from ..planner.config_file import read_config
from ..planner.deepspeed_config import deepspeed_config
from ..planner.memory import RESERVED_PART, MemoryPlan, choose_stage, longest_prompt
from ..planner.model_shape import ModelShape
from ..planner.options import PlanOptions
from ..planner.sizes import gib, parse_count
from ..planner.small import small_config, small_options
from ..planner.times import PhaseTime, Rates, phase_times

STAGES = ("auto", "0", "1", "2", "3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longstraw plan`."""
    _add_update(parser)
    _add_memory(parser)
    _add_rates(parser)
    parser.add_argument("--all", action="store_true", help="show the terms of every phase")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the DeepSpeed config of the plan"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run a small update like it here, on the CPU, and compare; needs torch",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_update(parser: argparse.ArgumentParser) -> None:
    default = EngineConfig()
    group = parser.add_argument_group("the update")
    group.add_argument(
        "--model", required=True, help="a folder, a config.json, or a hub id such as Qwen/Qwen3-8B"
    )
    add = group.add_argument
    add("--prompt-tokens", type=_count, required=True, metavar="P")
    add("--response-tokens", type=_count, default=8192, metavar="R", help="8Ki unless given")
    add("--group-size", type=_count, default=8, metavar="G", help="responses; 8 unless given")
    add("--prompt-gradient", choices=PROMPT_GRADIENTS, default=default.prompt_gradient)
    add("--chunk-size", type=_count, default=default.chunk_size, help="tokens run at a time")
    add("--page-size", type=_count, default=default.page_size, help="tokens of a page of state")
    add("--page-device", choices=PAGE_DEVICES, default=default.page_device)
    add("--cotangent-dtype", choices=COTANGENT_DTYPES, default=default.cotangent_dtype)
    add("--replay-batch", type=_count, help="responses replayed together")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the ranks")
    add = group.add_argument
    add("--sp", type=_count, default=1, help="ranks that share a prompt")
    add("--ranks", type=_count, help="processes in all; as --sp unless given")
    add(
        "--zero",
        choices=STAGES,
        default="auto",
        help="stage of DeepSpeed's ZeRO; auto: the lowest that fits, 0 on one rank",
    )
    add("--ep", type=_count, default=1, help="ranks that routed experts are divided over")
    add("--lora-rank", type=int, default=0, help="adapters on all projections; 0 trains everything")
    add("--nf4", action="store_true", help="frozen projections in 4 bits")
    add("--device-gib", type=float, default=80.0, help="memory of a rank's device")
    add("--host-gib", type=float, help="memory of a host, for all ranks; for pages on it")


def _add_rates(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what a device really does, for the seconds")
    rates = Rates()
    for name, what in (
        ("tflops", "TFLOP/s of products in bf16"),
        ("bandwidth", "TB/s of its memory"),
        ("network", "GB/s between ranks that share a prompt"),
    ):
        default = getattr(rates, name)
        group.add_argument(f"--{name}", type=float, default=default, help=f"{what}; {default:g}")


def _count(text: str) -> int:
    try:
        return parse_count(text)
    except LongStrawError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 if it fits, 1 if not, 2 if it cannot be made, written or measured."""
    try:
        config = read_config(args.model)
        shape = ModelShape.from_config(config)
        rates = Rates(args.tflops, args.bandwidth, args.network)
        asked = read_options(args)
        is_open = args.zero == "auto" and asked.ranks > 1
        stages = (1, 2, 3) if is_open else (asked.zero_stage,)
        plan, options = choose_stage(shape, asked, stages)
        longest = longest_prompt(shape, asked, stages)
        times = phase_times(shape, options, rates)
        if args.write is not None:
            _write(args.write, options)
        measured = _measure(config, options) if args.measure else None
    except LongStrawError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if args.json:
        found = plan.to_dict() | {"longest_prompt": longest[0], "limit": longest[1]}
        found |= {"zero_stage": options.zero_stage, "times": [asdict(time) for time in times]}
        print(json.dumps(found | ({"measured": measured} if measured else {})))
    else:
        print("\n".join(_lines(plan, options, longest, times, args)))
        if measured:
            print(_measured_line(measured))
    return 0 if plan.fits else 1


def read_options(args: argparse.Namespace) -> PlanOptions:
    """The command's options as what is to be planned.

    Raises:
        ConfigError: they do not go together.
    """
    engine = EngineConfig(
        prompt_gradient=args.prompt_gradient,
        chunk_size=args.chunk_size,
        page_size=args.page_size,
        page_device=args.page_device,
        cotangent_dtype=args.cotangent_dtype,
        replay_batch=args.replay_batch,
        sp_size=args.sp,
    )
    return PlanOptions(
        prompt_tokens=args.prompt_tokens,
        response_tokens=args.response_tokens,
        group_size=args.group_size,
        ranks=args.ranks or args.sp,
        zero_stage=0 if args.zero == "auto" else int(args.zero),
        ep_size=args.ep,
        lora_rank=args.lora_rank,
        is_nf4=args.nf4,
        device_gib=args.device_gib,
        host_gib=args.host_gib,
        engine=engine,
    )


def _write(path: Path, options: PlanOptions) -> None:
    try:
        path.write_text(json.dumps(deepspeed_config(options), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {path}: {error.strerror}. Give a file in a folder.") from None
    print(f"wrote {path}: ZeRO-{options.zero_stage}, for --deepspeed {path}", file=sys.stderr)


def _measure(config: dict[str, Any], options: PlanOptions) -> dict[str, Any]:
    """A small update: what is said of it, and what its tensors take."""
    from ..planner.measured import measure

    small, few = small_config(config), small_options(options)
    said = MemoryPlan.of(ModelShape.from_config(small), few).device_bytes
    print(
        f"measuring: {small['num_hidden_layers']} layers of width {small['hidden_size']}, "
        f"{few.prompt_tokens:,} prompt tokens, {few.ranks} ranks of this CPU ..",
        file=sys.stderr,
    )
    found = max(measure(small, few))
    return {"predicted_bytes": said, "measured_bytes": found, "error": said / found - 1}


def _measured_line(measured: dict[str, Any]) -> str:
    said, found = measured["predicted_bytes"], measured["measured_bytes"]
    return (
        f"a small update like it, with these layers: predicted {said:,} B, measured {found:,} B "
        f"({measured['error']:+.1%})"
    )


def _lines(
    plan: MemoryPlan,
    options: PlanOptions,
    longest: tuple[int, str],
    times: list[PhaseTime],
    args: argparse.Namespace,
) -> Iterator[str]:
    largest = plan.largest
    yield f"{f'per rank of {options.ranks}, ZeRO-{options.zero_stage}':<34} {'GiB':>9}   from"
    for phase in plan.phases if args.all else [largest]:
        if args.all:
            yield f"-- {phase.name}"
        yield from map(str, phase.terms)
    yield "most in each phase"
    for phase in plan.phases:
        mark = "  <- the most" if phase is largest else ""
        yield f"  {phase.name:<32} {gib(phase.device_bytes(plan.page_device)):>9}{mark}"
    verdict = "fits" if plan.fits else "does not fit"
    room = f"{gib(plan.room_bytes)} of {options.device_gib:g} GiB, less one part in {RESERVED_PART}"
    yield f"{verdict}: {gib(plan.device_bytes)} GiB of {room}"
    if plan.page_device == "host":
        yield f"{'host memory, all ranks':<34} {gib(plan.host_bytes):>9}"
    tokens, limit = longest
    yield f"longest prompt that fits: {tokens:,} tokens (limit: {limit})"
    yield f"{'about, at the rates given':<34} {'seconds':>9}   from"
    yield from map(str, times)
    total = sum(time.seconds for time in times)
    rates = f"{args.tflops:g} TFLOP/s, {args.bandwidth:g} TB/s, {args.network:g} GB/s"
    yield f"{'one update':<34} {total:>9,.1f}   {rates}"
