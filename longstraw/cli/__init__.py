"""The command line: `longstraw COMMAND`, or `python -m longstraw COMMAND`.

One module per command, listed in `COMMANDS` under the name that a user types. The first line of
its docstring is its entry in `longstraw --help`, the rest opens `longstraw COMMAND --help`, and
it has two functions:

    add_arguments(parser)    declares the command's options
    run(args) -> int         does the work and returns the exit code

What only one command needs (torch, transformers) is imported where that command runs.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from . import audit, bench, doctor, info, plan, report

__all__ = ["COMMANDS", "entry", "main"]

COMMANDS: dict[str, ModuleType] = {
    "audit": audit,
    "bench": bench,
    "doctor": doctor,
    "info": info,
    "plan": plan,
    "report": report,
}

EXIT_CODES = "exit codes: 0 all is well, 1 a check failed, 2 the command was not understood"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the words after the program's name; `None` takes them from `sys.argv`.

    Returns:
        0 when all is well, 1 when a check failed, 2 when no command was given.

    Raises:
        SystemExit: from argparse, with code 0 after `--help` and 2 after a mistake in `argv`.
    """
    parser = _build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    return COMMANDS[args.command].run(args)


def entry() -> int:
    """`main` as a program, whose reader may stop reading (`longstraw plan .. | head`)."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python would try to flush once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longstraw",
        description="GRPO on very long prompts. `longstraw COMMAND --help` explains a command.",
        epilog=EXIT_CODES,
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary, _, description = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary}\n{description}",
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return parser
