"""What `longstraw doctor` looks at, one noun per file.

Each check is a generator of findings. It reads and measures; it changes nothing.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["STATUSES", "Finding", "run_check"]

STATUSES = ("ok", "warn", "fail", "-")
"""Fine; works, but read it; has to be mended; was not looked at, for the reason that is given."""


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        status: one of `STATUSES`.
        found: what was found, in one sentence, with the names and numbers that belong to it.
        fix: what to change. Every `fail` has one; others may.
    """

    status: str
    found: str
    fix: str = ""


def run_check(name: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings of one check; an error inside it is a finding too, so that others still run."""
    try:
        yield from findings
    except Exception as error:
        yield Finding(
            "fail",
            f"{name}: the check itself failed with {type(error).__name__}: {error}",
            "Mend what the message names; with the versions that `longstraw info` prints, it is a "
            "bug to report.",
        )
