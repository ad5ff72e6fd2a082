"""Copies between pages and a table, in plain torch: a copy for each page."""

from collections.abc import Sequence

from torch import Tensor


def gather_pages(pages: Sequence[Tensor], places: Sequence[int], into: Tensor) -> None:
    """See `longstraw_kernels.page_copy.gather_pages`."""
    for page, place in zip(pages, places, strict=True):
        into[place : place + page.shape[0]] = page


def scatter_add_pages(table: Tensor, places: Sequence[int], into: Sequence[Tensor]) -> None:
    """See `longstraw_kernels.page_copy.scatter_add_pages`."""
    for page, place in zip(into, places, strict=True):
        page += table[place : place + page.shape[0]]
