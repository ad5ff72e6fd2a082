"""Compare LongStraw's gradient with the plain full-sequence step, on your model and data.

For each prompt length one update is made both ways: by LongStraw, and by the step that it claims to
equal, one graph over prompt and reply. Their difference is held against a budget, by family of
parameters, in the four levels of the LongStraw paper:

  1 execution           replies have the log-probs of the full sequence
  2 response operator   prompt_gradient="stopped" is the full-sequence step with the prompt's keys
                        and values (latents, recurrent state) detached
  3 distributed update  the same gradient and the same AdamW step by several processes, which share
                        the prompt, and then have members of their own (--ranks 2)
  4 full gradient       prompt_gradient="exact" is the full-sequence step, and one AdamW step from
                        both gradients is the same

and the gap is shown: what the stopped gradient leaves out of the exact one.

  longstraw audit                                          a tiny random model, in a few seconds
  longstraw audit --ranks 2                                with level 3
  longstraw audit --model Qwen/Qwen3-0.6B --data rows.jsonl --prompt-tokens 512 2048 32768

Budgets. In float64 everything rounds below 1e-9, and that is the budget: a mistake is larger by
orders of magnitude. In float32 and bfloat16 the full-sequence step is run twice, in the same dtype
and in float64; the error of the former is what rounding does, and twice that is allowed.

Where the full-sequence graph does not fit, or is not wanted (--definition-tokens), the levels are
"not run" and the gap is still measured: it takes LongStraw's gradients only.

Replies are sampled from the model, advantages are drawn at random. --data takes a .txt file (one
text) or a .jsonl file with "prompt" or "text" in each row; prompts are its first tokens. Without it
a real model reads the Python language reference, which ships with Python.

A JSON receipt holds all numbers, versions, the commit, hashes of the data and the command.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .words import command_line, positive

if TYPE_CHECKING:
    from ..audit.levels import Finding
    from ..audit.receipt import Receipt
    from ..audit.run import AuditOptions, LengthAudit

DTYPES = ("float64", "float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longstraw audit`."""
    add = parser.add_argument
    add("--model", metavar="DIR_OR_ID", help="folder or hub id; default: a tiny random Qwen3")
    add("--data", type=Path, metavar="FILE", help=".txt or .jsonl; see above")
    add("--lora-rank", type=positive, metavar="R", help="train adapters only, on all linear layers")
    add(
        "--prompt-tokens",
        type=positive,
        nargs="+",
        default=[512],
        metavar="P",
        help="prompt lengths, each an audit of its own (512)",
    )
    add("--response-tokens", type=positive, default=16, metavar="R", help="most of a reply (16)")
    add("--group-size", type=positive, default=4, metavar="G", help="replies to a prompt (4)")
    add(
        "--dtype",
        choices=DTYPES,
        help="of weights and work; default: float64 for the tiny model, float32 for others",
    )
    add(
        "--truth",
        choices=DTYPES[:2],
        default="float64",
        help="of the full-sequence step that is taken for true (float64)",
    )
    add("--ranks", type=positive, default=1, metavar="N", help="processes of level 3 (1: not run)")
    add("--chunk-size", type=positive, default=128, metavar="C", help="tokens run at a time (128)")
    add("--page-size", type=positive, default=64, metavar="S", help="tokens of a page (64)")
    add(
        "--definition-tokens",
        type=int,
        metavar="P",
        help="longest prompt for the full-sequence step (as free memory has room)",
    )
    add("--device", default=None, help="cpu, cuda, ... (a GPU if there is one and not float64)")
    add("--seed", type=int, default=0, help="of replies and advantages (0)")
    add("--receipt", type=Path, metavar="FILE", help="default: out/audit-DATE-TIME.json")
    add("--json", action="store_true", help="print the receipt, for programs")


def run(args: argparse.Namespace) -> int:
    """Audit every length; 0 if all that was compared is within its budget, else 1."""
    from ..errors import ConfigError, DataError, UnsupportedModelError

    try:
        receipt = _audit(args)
    except (ConfigError, DataError, UnsupportedModelError) as error:
        print(f"longstraw audit: {error}", file=sys.stderr)
        return 2
    path = args.receipt or Path(time.strftime("out/audit-%Y%m%d-%H%M%S.json"))
    receipt.write(path)
    if args.json:
        print(receipt.to_json())
    else:
        _print_verdict(receipt)
        print(f"receipt: {path}")
    return 0 if receipt.is_ok else 1


def _audit(args: argparse.Namespace) -> "Receipt":
    from tqdm.auto import tqdm

    from ..audit.case import TokenSource
    from ..audit.receipt import Receipt, provenance
    from ..audit.run import audit_length

    options = _options(args)
    model = options.policy.load()
    source = TokenSource(options.policy, args.data, max(args.prompt_tokens))
    prompts = [source.prompt(num_tokens) for num_tokens in args.prompt_tokens]
    engine = options.engine
    if not args.json:
        print(f"{options.policy.name} in {options.policy.dtype} on {options.policy.device}")
        print(
            f"prompts of {source.name}, chunks of {engine.chunk_size}, pages of "
            f"{engine.page_size} tokens\n"
        )
    lengths = []
    with tqdm(total=len(prompts), leave=False, disable=not _shows_progress(args)) as bar:
        for prompt in prompts:
            title = f"{prompt.numel():,} tokens"
            found = audit_length(
                model, prompt, options, lambda what, t=title: bar.set_description(f"{t}: {what}")
            )
            lengths.append(found)
            bar.update()
            if not args.json:
                bar.clear()
                _print_length(found, options)
    data = {"source": source.name, "sha256": source.sha256}
    made_by = provenance(options.policy.device)
    return Receipt(command_line(args), made_by, options, data, lengths)


def _options(args: argparse.Namespace) -> "AuditOptions":
    import torch

    from ..audit.policy import PolicySource
    from ..audit.run import AuditOptions
    from ..config import EngineConfig
    from ..errors import ConfigError

    dtype = args.dtype or ("float64" if args.model is None else "float32")
    if args.group_size < 2:
        raise ConfigError(f"--group-size {args.group_size}: GRPO compares at least 2 replies.")
    if args.ranks > args.group_size:
        raise ConfigError(
            f"--ranks {args.ranks} with --group-size {args.group_size}: each rank has members of "
            "its own in one half of level 3. Give at least as many replies as ranks."
        )
    if DTYPES.index(args.truth) > DTYPES.index(dtype):
        raise ConfigError(
            f"--truth {args.truth} with --dtype {dtype}: the truth is at least as precise as what "
            f"is measured against it. Leave --truth out."
        )
    on_gpu = torch.cuda.is_available() and dtype != "float64"
    policy = PolicySource(
        args.model, dtype, args.lora_rank, args.device or ("cuda" if on_gpu else "cpu")
    )
    engine = EngineConfig(
        chunk_size=args.chunk_size, page_size=args.page_size, progress=_shows_progress(args)
    )
    return AuditOptions(
        policy=policy,
        engine=engine,
        truth=args.truth,
        group_size=args.group_size,
        response_tokens=args.response_tokens,
        ranks=args.ranks,
        definition_tokens=args.definition_tokens,
        seed=args.seed,
    )


def _shows_progress(args: argparse.Namespace) -> bool:
    return not args.json and sys.stderr.isatty()


# ---------------------------------------------------------------- text


def _print_length(found: "LengthAudit", options: "AuditOptions") -> None:
    replies = found.response_tokens
    print(
        f"prompt of {found.prompt_tokens:,} tokens, {len(replies)} replies of {min(replies)} to "
        f"{max(replies)}, {found.seconds:.0f} s"
    )
    for level in found.levels:
        text = f"  level {level.number}  {level.name:<20}{level.status:<8}"
        if level.not_run is not None:
            print(f"{text}{level.not_run}")
            continue
        worst = level.tightest
        print(f"{text}nearest to its budget: {worst.what}, {worst.error:.1e} of {worst.budget:.1e}")
        for bad in (f for f in level.findings if not f.is_ok):
            where = "" if bad.worst is None else f", most of it in {bad.worst}"
            print(f"           {bad.what}: {bad.error:.1e}, budget {bad.budget:.1e}{where}")
    print()
    _print_families(found)


def _print_families(found: "LengthAudit") -> None:
    """By family: levels 2 and 4, and the gap."""
    by_level = {
        level.number: {f.what: f for f in level.findings}
        for level in found.levels
        if level.number in (2, 4) and level.findings
    }
    heads = {2: "2 response operator", 4: "4 full gradient"}
    first, second = [f"{'':<18}"], [f"{'family':<18}"]
    for number in by_level:
        first.append(f"{heads[number]:<32}")
        second.append(f"{'cosine':<14}{'rel. L2':<9}{'budget':<9}")
    first.append("gap: stopped seen from exact")
    second.append(f"{'cosine':<9}{'rel. L2':<9}norm ratio")
    print("".join(first).rstrip())
    print("".join(second))
    for family, gap in found.gap.items():
        cells = "".join(_finding(by_level[number].get(family)) for number in by_level)
        print(
            f"{family:<18}{cells}{_number(gap.cosine, '.3f'):<9}{gap.relative:<9.3f}"
            f"{_number(gap.norm_ratio, '.3f')}"
        )
    if step := by_level.get(4, {}).get("AdamW step"):
        print(f"{'AdamW step':<18}{' ' * 32}{_finding(step)}".rstrip())
    print()


def _finding(found: "Finding | None") -> str:
    if found is None:
        return " " * 32
    mark = " " if found.is_ok else "!"
    return f"{_number(found.cosine, '.10f'):<14}{found.error:<9.1e}{found.budget:<8.1e}{mark}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _print_verdict(receipt: "Receipt") -> None:
    for line in receipt.shown():
        print(f"shown:     {line}")
    for line in receipt.not_shown():
        print(f"not shown: {line}")
