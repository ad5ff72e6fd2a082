"""Which cases of a matrix `make test` runs; `make test-slow` runs the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """`cases` for `parametrize`, marked slow but for those in `kept`.

    Args:
        kept: values, or tuples of them where there are several arguments.

    Raises:
        ValueError: One of `kept` is no case: a mark that went stale would leave nothing to run.
    """
    cases = list(cases)
    if missing := [case for case in kept if case not in cases]:
        raise ValueError(f"{missing} are to be kept, but the cases are {cases}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in kept else [pytest.mark.slow],
        )
        for case in cases
    ]
