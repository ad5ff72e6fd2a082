"""What `longstraw doctor` asks of the trainer: TRL's shape, and launch configurations.

Registered as an entry point of `longstraw.checks` (setup.cfg), because the engine and its command
line know nothing of TRL.
"""

import os
import re
import warnings
from collections.abc import Iterator, Sequence

import trl

from longstraw import ConfigError

from .launch_files import check_launch_file
from .seams import SUPPORTED_TRL, check_seams

Line = tuple[str, str, str]
"""Status (`ok`, `warn`, `fail`, `-`), what was found, what to change."""


def check_trainer(shipped: Sequence[str], given: Sequence[str]) -> Iterator[Line]:
    """TRL's methods that the trainer leans on, then launch configurations.

    Args:
        shipped: files that share a line where nothing is wrong with them.
        given: files that the user asks about, each with a line of its own.
    """
    try:
        check_seams()
        yield "ok", f"trl {trl.__version__} has what the trainer leans on ({SUPPORTED_TRL})", ""
    except ConfigError as error:
        yield "fail", *_split(str(error))
    findings = {file: _look_at(file) for file in [*shipped, *given]}
    num_sound = 0
    for file, lines in findings.items():
        if file in given or lines[0][0] != "ok":
            yield from lines
        else:
            num_sound += 1
    if num_sound:
        folder = os.path.commonpath(shipped)
        yield "ok", f"launch configurations: {num_sound} of {len(shipped)} files in {folder}", ""
    if not findings:
        yield "-", "launch configurations: no folder ds_configs here, and no --config", ""


def _look_at(file: str) -> list[Line]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            what = check_launch_file(file)
        except ConfigError as error:
            found, fix = _split(str(error))
            return [("fail", found if found.startswith(file) else f"{file}: {found}", fix)]
    warned = [_split(text) for text in dict.fromkeys(str(item.message) for item in caught)]
    return [("warn", f"{file}: {found}", fix) for found, fix in warned] or [
        ("ok", f"{file}: {what}", "")
    ]


def _split(message: str) -> tuple[str, str]:
    """An error's first sentence, and the rest: what to change."""
    found, *rest = re.split(r"(?:(?<=\?)|\.) (?=[A-Z])", message, maxsplit=1)
    return found, rest[0] if rest else ""
