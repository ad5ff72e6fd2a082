"""Rows of many pages into one table, and rows of a table added to many pages.

Knows rows of numbers and where they stand, and nothing of tokens or layers.
"""

from collections.abc import Sequence

from torch import Tensor

from ..availability import choose
from ..launch import is_innermost_contiguous
from . import reference

IMPLEMENTATIONS = ("auto", "reference", "triton")

__all__ = ["IMPLEMENTATIONS", "gather_pages", "scatter_add_pages"]


def gather_pages(
    pages: Sequence[Tensor], places: Sequence[int], into: Tensor, *, impl: str = "auto"
) -> None:
    """Copy pages into a table: `into[place : place + n] = page` for each.

    Args:
        pages: `[n, D]` each, of any n and strides, in the dtype of `into`.
        places: per page, its first row in `into`. Pages may not overlap there.
        into: `[M, D]`, written to; rows that no page covers are left alone.
        impl: one of `IMPLEMENTATIONS`. "triton" needs one launch for all pages.

    Raises:
        ValueError: pages that do not fit, or a requested implementation that cannot run.
    """
    _check(pages, places, into)
    for page in pages:
        if page.dtype != into.dtype:
            raise ValueError(f"a page is {page.dtype} and the table {into.dtype}; cast one first.")
    if _choose(impl, [into], pages) == "triton":
        from . import triton

        triton.gather_pages(pages, places, into)
    else:
        reference.gather_pages(pages, places, into)


def scatter_add_pages(
    table: Tensor, places: Sequence[int], into: Sequence[Tensor], *, impl: str = "auto"
) -> None:
    """Add rows of a table to pages: `page += table[place : place + n]` for each.

    The sum is computed in the wider of the two dtypes (fp32 for half precision) and rounded to the
    page's.

    Args:
        table: `[M, D]`.
        places: per page, its first row in `table`.
        into: `[n, D]` each, written to. No two may share memory, so that no order matters.
        impl: as in `gather_pages`.

    Raises:
        ValueError: as in `gather_pages`.
    """
    _check(into, places, table)
    if len({page.dtype for page in into}) > 1:
        raise ValueError(f"pages are of several dtypes: {sorted({str(p.dtype) for p in into})}.")
    if _choose(impl, into, [table]) == "triton":
        from . import triton

        triton.scatter_add_pages(table, places, into)
    else:
        reference.scatter_add_pages(table, places, into)


def _check(pages: Sequence[Tensor], places: Sequence[int], table: Tensor) -> None:
    if len(pages) != len(places):
        raise ValueError(f"{len(pages)} pages and {len(places)} places; each page has one.")
    for page, place in zip(pages, places, strict=True):
        if page.dim() != 2 or table.dim() != 2 or page.shape[1] != table.shape[1]:
            raise ValueError(
                f"a page is {tuple(page.shape)} and the table {tuple(table.shape)}; needed are "
                "[n, D] and [M, D]."
            )
        if not 0 <= place <= place + page.shape[0] <= table.shape[0]:
            raise ValueError(
                f"a page of {page.shape[0]} rows at {place} does not lie in a table of "
                f"{table.shape[0]} rows."
            )
        if page.device != table.device:
            raise ValueError(
                f"a page is on {page.device} and the table on {table.device}; one launch reads "
                "and writes one device."
            )


def _choose(impl: str, written: Sequence[Tensor], read: Sequence[Tensor]) -> str:
    # Of pages, the first stands for all: they are alike.
    chosen = choose(impl, IMPLEMENTATIONS, *written[:1], *read[:1])
    if chosen == "reference" or all(is_innermost_contiguous(x) for x in written):
        return chosen
    if impl == "auto":
        return "reference"
    raise ValueError(
        "impl='triton' writes to rows whose last stride is 1, and one has another. Use "
        "impl='auto' (takes it where it can) or impl='reference'."
    )
