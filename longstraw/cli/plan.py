"""Tell what an update takes on each rank, from a model's config.json: no weights, no GPU.

Every line shows its arithmetic. Sizes take units: 2Mi is 2,097,152, 8Ki is 8,192. Exits with 1 if
the update does not fit.

  longstraw plan --model examples/qwen36_27b --prompt-tokens 2Mi --sp 8 --zero 1 --lora-rank 16 \\
      --nf4 --device-gib 141 --chunk-size 32Ki --page-size 1Ki
"""

import argparse
import json
import sys

from ..config import COTANGENT_DTYPES, PAGE_DEVICES, PROMPT_GRADIENTS, EngineConfig
from ..errors import LongStrawError
from ..planner.config_file import read_config
from ..planner.memory import MemoryPlan, longest_prompt
from ..planner.model_shape import ModelShape
from ..planner.options import PlanOptions
from ..planner.sizes import gib, parse_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longstraw plan`."""
    _add_update(parser)
    _add_memory(parser)
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
    add("--zero", type=int, default=0, help="stage of DeepSpeed's ZeRO, 0 to 3")
    add("--ep", type=_count, default=1, help="ranks that routed experts are divided over")
    add("--lora-rank", type=int, default=0, help="adapters on all projections; 0 trains everything")
    add("--nf4", action="store_true", help="frozen projections in 4 bits")
    add("--device-gib", type=float, default=80.0, help="memory of a rank's device")
    add("--host-gib", type=float, help="memory of a host, for all ranks; for pages on it")


def _count(text: str) -> int:
    try:
        return parse_count(text)
    except LongStrawError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 if it fits, 1 if not, 2 if the options cannot be planned."""
    try:
        shape = ModelShape.from_config(read_config(args.model))
        options = read_options(args)
        plan = MemoryPlan.of(shape, options)
    except LongStrawError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    longest = longest_prompt(shape, options)
    if args.json:
        print(json.dumps(plan.to_dict() | {"longest_prompt": longest[0], "limit": longest[1]}))
    else:
        print("\n".join(_lines(plan, options, longest)))
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
        zero_stage=args.zero,
        ep_size=args.ep,
        lora_rank=args.lora_rank,
        is_nf4=args.nf4,
        device_gib=args.device_gib,
        host_gib=args.host_gib,
        engine=engine,
    )


def _lines(plan: MemoryPlan, options: PlanOptions, longest: tuple[int, str]) -> list[str]:
    title = f"per rank, {options.ranks} ranks"
    lines = [f"{title:<34} {'GiB':>9}   from", *map(str, plan.terms)]
    room = f"{gib(plan.room_bytes)} GiB of {options.device_gib:g}, less one part in 20"
    verdict = "fits" if plan.fits else "does not fit"
    lines.append(f"{plan.name:<34} {gib(plan.device_bytes):>9}   {verdict}: {room}")
    if options.engine.page_device == "host":
        lines.append(f"{'of the host, all ranks':<34} {gib(plan.host_bytes):>9}")
    tokens, limit = longest
    lines.append(f"longest prompt that fits: {tokens:,} tokens (limit: {limit})")
    return lines
