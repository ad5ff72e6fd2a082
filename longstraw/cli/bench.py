"""Time the parts of an update, and the full-sequence step beside them, on this machine.

  longstraw bench                                        the cases, and what each is
  longstraw bench run                                    all of them on a tiny random model
  longstraw bench run capture replay_step --model Qwen/Qwen3-0.6B --dtype bfloat16
                  --prompt-tokens 8192 --group-size 8 --response-tokens 512

Tokens are random: what an update takes depends on how many there are. Reported are the median and
the 20th and 80th percentiles of the repeats, tokens per second, and the most bytes of tensors
beside those that stood before (weights; for a replay and a prompt's backward the captured prompt).
A whole update is capture + replay_step + prompt_backward; the full-sequence step is what it equals,
and `longstraw audit` shows that it does. Stock TRL's trainer beside LongStraw's: `make bench`.
"""

import argparse
import difflib
import json
import sys
from typing import TYPE_CHECKING, Any

from .words import command_line, positive

if TYPE_CHECKING:
    from ..bench import Measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longstraw bench`."""
    add = parser.add_argument
    add("action", nargs="?", choices=("list", "run"), default="list", help="(list)")
    add("cases", nargs="*", metavar="CASE", help="which to run (all); before the options")
    add("--model", metavar="DIR_OR_ID", help="folder or hub id; default: a tiny random Qwen3")
    add("--lora-rank", type=positive, metavar="R", help="train adapters only")
    add("--prompt-tokens", type=positive, default=1024, metavar="P", help="(1024)")
    add("--response-tokens", type=positive, default=64, metavar="R", help="of each reply (64)")
    add("--group-size", type=positive, default=8, metavar="G", help="replies (8)")
    add("--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help="(float32)")
    add("--chunk-size", type=positive, default=512, metavar="C", help="tokens run at a time (512)")
    add("--page-size", type=positive, default=256, metavar="S", help="tokens of a page (256)")
    add("--replay-batch", type=positive, metavar="B", help="replies run together (half a chunk's)")
    add("--repeats", type=positive, default=5, metavar="N", help="timed runs of a case (5)")
    add("--device", help="cpu, cuda, ... (a GPU if there is one)")
    add("--json", action="store_true", help="print the records, for programs")


def run(args: argparse.Namespace) -> int:
    """List the cases, or run them; 0, or 2 if that cannot be done."""
    from ..bench import CASES
    from ..errors import ConfigError, UnsupportedModelError

    if args.action == "list":
        for case in CASES.values():
            print(f"{case.name:<20}{case.what}")
        return 0
    for name in args.cases:
        if name not in CASES:
            near = difflib.get_close_matches(name, CASES, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            known = ", ".join(CASES)
            print(f"longstraw bench: no case {name!r}; there are {known}.{hint}", file=sys.stderr)
            return 2
    try:
        _run_cases(args)
    except (ConfigError, UnsupportedModelError) as error:
        print(f"longstraw bench: {error}", file=sys.stderr)
        return 2
    return 0


def _run_cases(args: argparse.Namespace) -> None:
    import torch
    from tqdm.auto import tqdm

    from ..audit.policy import PolicySource
    from ..audit.receipt import provenance
    from ..bench import CASES, Shape, measure
    from ..config import EngineConfig

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    policy = PolicySource(args.model, args.dtype, args.lora_rank, device)
    config = EngineConfig(
        chunk_size=args.chunk_size, page_size=args.page_size, replay_batch=args.replay_batch
    )
    shape = Shape(args.prompt_tokens, args.response_tokens, args.group_size)
    model = policy.load()
    made_by = provenance(device)
    names = args.cases or list(CASES)
    found = []
    total = len(names) * (1 + args.repeats)
    is_hidden = args.json or not sys.stderr.isatty()
    with tqdm(total=total, leave=False, disable=is_hidden) as bar:
        for name in names:
            bar.set_description(name)
            found.append(measure(CASES[name], model, shape, config, args.repeats, bar.update))
    if args.json:
        command = command_line(args, ("action", "cases"))
        records = [m.to_dict() | {"command": command, "made_by": made_by} for m in found]
        print(json.dumps(records, indent=1))
        return
    print(
        f"{policy.name} in {policy.dtype} on {made_by['device']}, {made_by['threads']} threads\n"
        f"prompt of {args.prompt_tokens:,} tokens, {args.group_size} replies of "
        f"{args.response_tokens:,}; chunks of {args.chunk_size}, {args.repeats} repeats\n"
    )
    print(f"{'case':<20}{'median s':>10}{'20 %':>10}{'80 %':>10}{'tokens/s':>12}{'peak MiB':>12}")
    for measurement in found:
        print(_line(measurement))


def _line(found: "Measurement") -> str:
    low, high = found.percentiles
    speed: Any = found.tokens / found.median
    return (
        f"{found.case:<20}{found.median:>10.3f}{low:>10.3f}{high:>10.3f}"
        f"{speed:>12,.0f}{found.peak_bytes / 2**20:>12,.1f}"
    )
