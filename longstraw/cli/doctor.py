"""Look for what would stop a run on this machine, or change it without a sign, and say the fix.

One line per finding:

  ok     fine
  warn   works, but not as it could: read it
  fail   has to be mended; the fix stands below
  -      was not looked at, for the reason that is given

What is looked at, in this order: versions, PyTorch and the driver; which packages the names
`kernels` and `longstraw_kernels` mean; which implementation each operation takes here; the methods
of TRL that the trainer leans on; launch configurations (of the folder ds_configs, and those of
`--config`); whether two processes can form a group and add up (gloo, and NCCL with two GPUs).

Run it once after an installation, and with the files of a launch before a long run:

  longstraw doctor --config my_deepspeed.json my_accelerate.yaml

Files are judged beside the trainer's defaults, since the script's own options are not known here.
A path inside a YAML is relative to where the launcher is started: start this command there too.
"""

import argparse
import json
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from .checks import Finding, run_check

GROUP = "longstraw.checks"
"""Entry points that packages above the engine register their checks under. Each is a function of
paths of launch configurations, those that LongStraw ships and those that the user gives, and yields
`(status, found, fix)`."""

_INDENT = " " * 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longstraw doctor`."""
    parser.add_argument(
        "--config",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="DeepSpeed JSON and accelerate YAML files to look at as well",
    )
    parser.add_argument("--no-ranks", action="store_true", help="start no processes")
    parser.add_argument(
        "--rank-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="how long two processes may take to join and add up (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print each finding as it is made; 1 if one is a failure."""
    if not args.rank_seconds > 0:
        print(f"--rank-seconds is {args.rank_seconds:g}; give a number of seconds above 0.")
        return 2
    findings = []
    for finding in find_problems(args):
        findings.append(finding)
        if not args.json:
            print(f"{finding.status:<6}{finding.found}", flush=True)
            if finding.fix and finding.status != "ok":
                print(f"{_INDENT}{finding.fix}", flush=True)
    num_failed = sum(finding.status == "fail" for finding in findings)
    if args.json:
        report = {"ok": num_failed == 0, "findings": [item._asdict() for item in findings]}
        print(json.dumps(report, indent=2))
    else:
        num_warned = sum(finding.status == "warn" for finding in findings)
        print(f"\n{num_failed} to mend, {num_warned} to read")
    return 1 if num_failed else 0


def find_problems(args: argparse.Namespace) -> Iterator[Finding]:
    """All findings, in the order of the command's help."""
    from .checks import implementations, names, ranks, versions

    yield from run_check("versions", versions.check_versions())
    yield from run_check("torch", versions.check_torch())
    yield from run_check("names", names.check_names())
    yield from run_check("implementations", implementations.check_implementations())
    yield from _registered_checks(shipped_configs(), args.config)
    if args.no_ranks:
        yield Finding("-", "gloo and nccl: not run, because of --no-ranks")
    else:
        yield from run_check("ranks", ranks.check_ranks(args.rank_seconds))


def shipped_configs() -> list[str]:
    """The launch configurations here, or beside a LongStraw installed from its folder."""
    import longstraw

    for root in (Path.cwd(), Path(longstraw.__file__).resolve().parents[1]):
        folder = root / "ds_configs"
        if folder.is_dir():
            found = sorted([*folder.rglob("*.json"), *folder.rglob("*.yaml")])
            return [os.path.relpath(file) for file in found]
    return []


def _registered_checks(shipped: list[str], given: list[str]) -> Iterator[Finding]:
    entries = sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name)
    if not entries:
        yield Finding(
            "warn",
            f"the trainer's checks (TRL, launch configurations) are not registered as {GROUP!r}",
            "Install LongStraw again, from its folder: pip install -c constraints.txt -e .",
        )
    for entry in entries:
        try:
            check = entry.load()
        except Exception as error:
            yield Finding(
                "fail",
                f"{entry.value.partition(':')[0]} cannot be imported: "
                f"{type(error).__name__}: {error}",
                "Install the versions that were tested: pip install -c constraints.txt -e . (in "
                "LongStraw's folder)",
            )
            continue
        yield from run_check(entry.name, (Finding(*item) for item in check(shipped, given)))
