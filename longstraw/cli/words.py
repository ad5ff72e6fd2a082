"""Words of a command line: read from one, and written into a record."""

import argparse
import shlex
from collections.abc import Sequence


def positive(text: str) -> int:
    """A whole number of at least 1, for `argparse`."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def command_line(args: argparse.Namespace, positional: Sequence[str] = ()) -> str:
    """The command that `args` were read from, defaults written out.

    Args:
        positional: names of arguments that have no option, in order.
    """
    words = ["longstraw", args.command]
    for name in positional:
        words += _words(getattr(args, name))
    for name, value in vars(args).items():
        if name == "command" or name in positional or value is None or value is False:
            continue
        words += ["--" + name.replace("_", "-"), *([] if value is True else _words(value))]
    return shlex.join(words)


def _words(value: object) -> list[str]:
    return [str(v) for v in (value if isinstance(value, list) else [value])]
