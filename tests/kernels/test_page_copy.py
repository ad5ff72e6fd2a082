"""Pages into a table and back: both implementations, to the bit."""

import pytest
import torch
from torch import Tensor

from longstraw_kernels.availability import is_triton_installed
from longstraw_kernels.page_copy import gather_pages, scatter_add_pages

needs_triton = pytest.mark.skipif(not is_triton_installed(), reason="Triton is not installed")
IMPLEMENTATIONS = ["reference", pytest.param("triton", marks=needs_triton)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (rows of each page, width): whole tiles, parts of one, an empty page; a width in two blocks.
SHAPES = [([8, 8, 8], 64), ([130, 1, 0, 7], 40), ([3], 576), ([5, 9], 1), ([2, 70], 512)]


def pages_of(sizes: list[int], width: int, dtype: torch.dtype) -> list[Tensor]:
    """Each in a wider tensor of its own, NaN around it."""
    pages = []
    for size in sizes:
        around = torch.full((size + 2, width + 16), torch.nan, device=DEVICE, dtype=dtype)
        page = around[1 : size + 1, 16 : 16 + width]
        page.copy_(torch.randn(size, width))
        pages.append(page)
    return pages


def places_of(sizes: list[int]) -> list[int]:
    """One free row before each page."""
    return [sum(sizes[:i]) + i + 1 for i in range(len(sizes))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "width"), SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_pages_stand_in_the_table_and_nothing_else_is_touched(impl, sizes, width, dtype) -> None:
    pages, places = pages_of(sizes, width, dtype), places_of(sizes)
    table = torch.full((sum(sizes) + len(sizes) + 1, width + 3), torch.nan, device=DEVICE)
    table = table.to(dtype)
    into = table[:, :width]
    gather_pages(pages, places, into, impl=impl)
    for page, place in zip(pages, places, strict=True):
        assert torch.equal(into[place : place + len(page)], page)
    assert int(table.isnan().sum()) == table.numel() - sum(p.numel() for p in pages)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "width"), SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rows_are_added_to_pages_and_nothing_else_is_touched(impl, sizes, width, dtype) -> None:
    """Pages in fp32 and in half precision take an fp32 row with one rounding.

    Triton's interpreter cuts what is cast to bf16 instead of rounding it, which is off by at most
    one number.
    """
    is_cut = impl == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16
    pages, places = pages_of(sizes, width, dtype), places_of(sizes)
    table = torch.randn(sum(sizes) + len(sizes) + 1, width, device=DEVICE)
    before = [page.clone() for page in pages]
    around = [page._base.isnan().sum() for page in pages]
    scatter_add_pages(table, places, pages, impl=impl)
    for page, old, place, number in zip(pages, before, places, around, strict=True):
        rows = table[place : place + len(page)]
        expected = (old.float() + rows).to(dtype)
        allowed = torch.finfo(dtype).eps * expected.float().abs() if is_cut else 0
        assert ((page.float() - expected.float()).abs() <= allowed).all()
        assert page._base.isnan().sum() == number


@needs_triton
def test_all_pages_take_one_launch(monkeypatch) -> None:
    """A page of a prompt's state passes in less time than a launch takes."""
    from longstraw_kernels.page_copy import triton

    launches = []
    kernel = triton._page_copy_kernel

    class Counting:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton, "_page_copy_kernel", Counting())
    pages = [torch.randn(4, 8, device=DEVICE) for _ in range(5)]
    gather_pages(pages, range(0, 20, 4), torch.empty(20, 8, device=DEVICE), impl="triton")
    assert [grid[0] for grid in launches] == [5]


@pytest.mark.parametrize(
    ("pages", "places", "table", "word"),
    [
        ([torch.zeros(2, 4)], [3], torch.zeros(4, 4), "does not lie in a table of 4 rows"),
        ([torch.zeros(2, 4)], [-1], torch.zeros(4, 4), "does not lie"),
        ([torch.zeros(2, 3)], [0], torch.zeros(4, 4), "needed are"),
        ([torch.zeros(2, 4)], [0, 2], torch.zeros(4, 4), "1 pages and 2 places"),
        ([torch.zeros(2, 4).half()], [0], torch.zeros(4, 4), "cast one"),
    ],
)
def test_pages_that_do_not_fit_are_refused(pages, places, table, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        gather_pages(pages, places, table)


@needs_triton
def test_a_requested_kernel_runs_or_raises() -> None:
    """And "auto" is the definition where the kernel cannot be."""
    columns, page = torch.zeros(4, 6, device=DEVICE).T, torch.ones(2, 4, device=DEVICE)
    with pytest.raises(ValueError, match="last stride is 1"):
        gather_pages([page], [1], columns, impl="triton")
    gather_pages([page], [1], columns, impl="auto")
    assert columns.sum() == 8
    with pytest.raises(ValueError, match="float64"):
        gather_pages([page.double()], [1], columns.double(), impl="triton")
