"""Copies between pages and a table in Triton: one launch for all pages.

A launch for each page costs more than its bytes: a page of 512 rows of 512 numbers in bf16 passes
in a quarter of a microsecond, and a launch takes several.

A page is a row of a list, in int64: its address, the stride of its rows, how many it has, and its
first row in the table. Sums are made in fp32. No atomics: no two pages share memory.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import innermost_contiguous, power_of_two, to_device
from ..specialization import Specialization

TILE, NUM_WARPS = 4096, 4
"""Numbers in a tile."""

COLUMNS = tl.constexpr(4)


@triton.jit
def _page_copy_kernel(
    list_ptr, like_ptr, table_ptr, table_stride,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    ADD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one page: into the table, or with ADD from the table added to the page."""
    entry = list_ptr + tl.program_id(0).to(tl.int64) * COLUMNS
    base = tl.load(entry).to(like_ptr.dtype)
    stride = tl.load(entry + 1)
    if ALIGNED:  # an address from memory has no known alignment
        base, stride = tl.multiple_of(base, 16), tl.multiple_of(stride, 16)
    num_rows, place = tl.load(entry + 2), tl.load(entry + 3)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_page = rows.to(tl.int64)[:, None] * stride
    in_table = (place + rows)[:, None] * table_stride.to(tl.int64)
    for block in range(0, D, BLOCK_D):
        columns = block + tl.arange(0, BLOCK_D)
        exists = (rows < num_rows)[:, None]
        if D % BLOCK_D:
            exists = exists & (columns < D)[None, :]
        of_page = base + in_page + columns[None, :]
        of_table = table_ptr + in_table + columns[None, :]
        if ADD:
            total = tl.load(of_page, mask=exists, other=0.0).to(tl.float32)
            total += tl.load(of_table, mask=exists, other=0.0).to(tl.float32)
            tl.store(of_page, total.to(like_ptr.dtype.element_ty), mask=exists)
        else:
            tl.store(of_table, tl.load(of_page, mask=exists, other=0.0), mask=exists)


def gather_pages(pages: Sequence[Tensor], places: Sequence[int], into: Tensor) -> None:
    """See `longstraw_kernels.page_copy.gather_pages`."""
    _launch([innermost_contiguous(page) for page in pages], places, into, is_add=False)


def scatter_add_pages(table: Tensor, places: Sequence[int], into: Sequence[Tensor]) -> None:
    """See `longstraw_kernels.page_copy.scatter_add_pages`."""
    _launch(into, places, innermost_contiguous(table), is_add=True)


def _launch(pages: Sequence[Tensor], places: Sequence[int], table: Tensor, *, is_add: bool) -> None:
    most_rows = max((page.shape[0] for page in pages), default=0)
    if most_rows == 0 or table.shape[1] == 0:
        return
    rows = [
        [page.data_ptr(), page.stride(0), page.shape[0], place]
        for page, place in zip(pages, places, strict=True)
    ]
    constants = _constants(table.shape[1])
    with torch.cuda.device_of(table):
        listed = to_device(torch.tensor(rows, dtype=torch.int64), table.device)
        grid = len(pages), triton.cdiv(most_rows, constants["BLOCK_M"])
        _page_copy_kernel[grid](
            listed,
            pages[0],
            table,
            table.stride(0),
            **constants,
            ADD=is_add,
            ALIGNED=all(x % 16 == 0 for row in rows for x in row[:2]),
            num_warps=NUM_WARPS,
        )


def _constants(dim: int) -> dict[str, int]:
    columns = min(512, power_of_two(dim), max(64, dim & -dim))
    return {"D": dim, "BLOCK_M": TILE // columns, "BLOCK_D": columns}


def specializations() -> list[Specialization]:
    """Latents and rotary keys in bf16 into a table; their gradients, fp32, onto pages."""
    return [
        _specialization(dim, dtype, is_add)
        for dim in (64, 512)
        for dtype, is_add in (("bf16", False), ("fp32", True))
    ]


def _specialization(dim: int, dtype: str, is_add: bool) -> Specialization:
    types = {"list_ptr": "*i64", "like_ptr": f"*{dtype}", "table_ptr": f"*{dtype}"}
    return Specialization(
        name=f"{'scatter-add' if is_add else 'gather'}, {dtype}, {dim}",
        kernel=_page_copy_kernel,
        types=types | {"table_stride": "i32"},
        constants={**_constants(dim), "ADD": is_add, "ALIGNED": True},
        num_warps=NUM_WARPS,
        num_stages=3,
        divisible=("table_stride",),
    )
