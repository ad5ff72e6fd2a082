"""Tensors of more than 2^31 elements: offsets of 32 bits would point elsewhere.

Rows lie so far apart that the last one is past that, in memory of which only these rows are ever
touched; a GPU has to hold all of it. Results are those of the same rows side by side, to the bit.
"""

from collections.abc import Callable

import psutil
import pytest
import torch
from torch import Tensor

from longstraw_kernels.availability import is_triton_installed
from longstraw_kernels.lse_merge import merge_lse_
from longstraw_kernels.page_attention import PageParams, page_attention, page_attention_backward
from longstraw_kernels.page_copy import gather_pages, scatter_add_pages
from longstraw_kernels.selected_attention import selected_attention, selected_attention_backward

pytestmark = pytest.mark.skipif(not is_triton_installed(), reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH, STRIDE = 18, 16, 2**27
LARGEST_BYTES = 4 * ROWS * STRIDE


def free_bytes() -> int:
    if DEVICE == "cuda":
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available


@pytest.fixture(autouse=True)
def enough_memory() -> None:
    """Two such tensors at a time; on a CPU it is asked for and hardly used."""
    needed = 2 * LARGEST_BYTES if DEVICE == "cuda" else LARGEST_BYTES
    if free_bytes() < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free memory on {DEVICE}")


def far_apart(rows: Tensor) -> Tensor:
    """The rows `[.., n, WIDTH]` with the last one past 2^31 elements."""
    assert rows.shape[-2:] == (ROWS, WIDTH) and (ROWS - 1) * STRIDE > 2**31
    memory = torch.empty((ROWS - 1) * STRIDE + WIDTH, dtype=rows.dtype, device=DEVICE)
    apart = memory.as_strided(rows.shape, (*(0 for _ in rows.shape[:-2]), STRIDE, 1))
    apart.copy_(rows)
    return apart


def check(compute: Callable[[Tensor], list[Tensor]], rows: Tensor) -> None:
    for ours, expected in zip(compute(far_apart(rows)), compute(rows), strict=True):
        assert not ours.isnan().any() and torch.equal(ours, expected)


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def test_attention_reads_far_keys() -> None:
    """Forward and backward, keys and values."""
    q, other = random(1, 2, 3, WIDTH), random(1, 1, ROWS, WIDTH).flip(2)
    params = PageParams(0.3, ROWS, 3)

    def attend(key: Tensor, value: Tensor) -> list[Tensor]:
        pages = [key], [value], [0]
        out, lse = page_attention(q, *pages, params, impl="triton")
        sums = tuple(torch.zeros(1, 1, ROWS, WIDTH, device=DEVICE) for _ in range(2))
        dq = page_attention_backward(
            q, q, *pages, out.half(), lse, params, into=[sums], impl="triton"
        )
        return [out, lse, dq, *sums]

    check(lambda rows: attend(rows, other), random(1, 1, ROWS, WIDTH))
    check(lambda rows: attend(other, rows), random(1, 1, ROWS, WIDTH))


@pytest.mark.parametrize("which", [0, 1])
def test_attention_adds_to_far_gradients(which: int) -> None:
    q, key = random(1, 2, 3, WIDTH), random(1, 1, ROWS, WIDTH)
    pages, params = ([key], [key], [0]), PageParams(0.3, ROWS, 3)
    out, lse = page_attention(q, *pages, params, impl="triton")

    def add(rows: Tensor) -> list[Tensor]:
        sums = [torch.zeros(1, 1, ROWS, WIDTH, device=DEVICE) for _ in range(2)]
        sums[which] = rows
        into = [(sums[0], sums[1])]
        page_attention_backward(q, q, *pages, out.half(), lse, params, into=into, impl="triton")
        return sums

    check(lambda rows: [x.clone() for x in add(rows)], random(1, 1, ROWS, WIDTH).float())


def test_a_merge_writes_far_rows() -> None:
    part, lses = random(ROWS, WIDTH).float(), random(2, ROWS).float()

    def merge(rows: Tensor) -> list[Tensor]:
        lse = lses[0].clone()
        merge_lse_(rows, lse, part, lses[1], impl="triton")
        return [rows.clone(), lse]

    check(merge, random(ROWS, WIDTH).float().flip(0))


def test_pages_are_copied_to_and_from_far_rows() -> None:
    page = random(2, WIDTH)

    def copy(rows: Tensor) -> list[Tensor]:
        gather_pages([page], [ROWS - 2], rows, impl="triton")
        sums = [torch.ones(3, WIDTH, device=DEVICE, dtype=torch.float16)]
        scatter_add_pages(rows, [ROWS - 3], sums, impl="triton")
        return [rows.clone(), *sums]

    check(copy, random(ROWS, WIDTH))


def test_selected_rows_are_read_where_they_are_far() -> None:
    q, index = random(2, 3, WIDTH), torch.tensor([[0, ROWS - 1, 5], [ROWS - 1, -1, 2]])
    index = index.to(DEVICE)

    def attend(rows: Tensor) -> list[Tensor]:
        out, lse = selected_attention(q, rows, index, 0.3, WIDTH, impl="triton")
        gradients = selected_attention_backward(
            q, q, rows, index, out.half(), lse, 0.3, impl="triton"
        )
        return [out, lse, *gradients]

    check(attend, random(ROWS, WIDTH))
