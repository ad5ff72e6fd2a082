"""The log-sum-exp merge in Triton: one pass, where plain torch has six and as many new tensors.

Numbers are added up in fp32. No atomics: equal inputs give equal bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import innermost_contiguous, power_of_two
from ..specialization import Specialization

TILE, NUM_WARPS = 1024, 8
"""Numbers of `out` in a tile; with more, addresses of rows in 64 bits would fill the registers."""

# What changes with the length: a kernel compiled anew for each would cost more. The other strides
# are specialized for whether 16 divides them, without which nothing is loaded 16 bytes at a time.
VARYING = [
    "num_rows", "num_heads", "num_queries",
    "lse_batch", "lse_head", "lse_row", "part_lse_batch", "part_lse_head", "part_lse_row",
]  # fmt: skip


@triton.jit
def _offsets(batch, head, query, stride_batch, stride_head, stride):
    """Of rows, in elements; 64 bits, as `out` of a long chunk has more than 2^31 of them."""
    batch, head, query = batch.to(tl.int64), head.to(tl.int64), query.to(tl.int64)
    return batch * stride_batch + head * stride_head + query * stride


@triton.jit
def _merged_lse(lse, part_lse):
    """The merged one, and the weights of the two parts; a row that is empty in both has none."""
    highest = tl.maximum(lse, part_lse)
    pivot = tl.where(highest == -float("inf"), 0.0, highest)  # no inf - inf
    weight, part_weight = tl.exp(lse - pivot), tl.exp(part_lse - pivot)
    total = weight + part_weight
    total = tl.where(total == 0, 1.0, total)
    # One weight is exactly 1. log(1 + x) of a small x has few digits; this is exact to a rounding,
    # https://docs.oracle.com/cd/E19957-01/806-3568/ncg_goldberg.html (theorem 4).
    other = tl.minimum(weight, part_weight)
    excess = total - 1.0
    log_total = tl.where(
        excess == 0, other, tl.log(total) * (other / tl.where(excess == 0, 1.0, excess))
    )
    return highest + log_total, weight / total, part_weight / total


@triton.jit(do_not_specialize=VARYING)
def _merge_lse_kernel(
    out_ptr, lse_ptr, part_out_ptr, part_lse_ptr,
    num_rows, num_heads, num_queries,
    out_batch, out_head, out_row, lse_batch, lse_head, lse_row,
    part_out_batch, part_out_head, part_out_row, part_lse_batch, part_lse_head, part_lse_row,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of rows with all their columns: another program would find their `lse` changed."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    query, head = rows % num_queries, rows // num_queries % num_heads
    batch = rows // num_queries // num_heads
    lse_ptr += _offsets(batch, head, query, lse_batch, lse_head, lse_row)
    part_lse_ptr += _offsets(batch, head, query, part_lse_batch, part_lse_head, part_lse_row)
    lse = tl.load(lse_ptr, mask=is_row, other=0.0)
    part_lse = tl.load(part_lse_ptr, mask=is_row, other=0.0).to(tl.float32)
    merged, weight, part_weight = _merged_lse(lse, part_lse)
    tl.store(lse_ptr, merged, mask=is_row)

    out_rows = _offsets(batch, head, query, out_batch, out_head, out_row)
    part_rows = _offsets(batch, head, query, part_out_batch, part_out_head, part_out_row)
    for block in range(0, D, BLOCK_D):
        columns = block + tl.arange(0, BLOCK_D)
        exists = is_row[:, None]
        if D % BLOCK_D:
            exists = exists & (columns < D)[None, :]
        pointers = out_ptr + out_rows[:, None] + columns[None, :]
        part_pointers = part_out_ptr + part_rows[:, None] + columns[None, :]
        out = tl.load(pointers, mask=exists, other=0.0)
        part_out = tl.load(part_pointers, mask=exists, other=0.0).to(tl.float32)
        out = out * weight[:, None] + part_out * part_weight[:, None]
        tl.store(pointers, out, mask=exists)


def merge_lse_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """See `longstraw_kernels.lse_merge.merge_lse_`."""
    if lse.numel() == 0:
        return
    part_out = innermost_contiguous(part_out)
    _, num_heads, num_queries = (1, 1, 1, *lse.shape)[-3:]
    strides = {
        "out": _row_strides(out.stride()[:-1], lse),
        "lse": _row_strides(lse.stride(), lse),
        "part_out": _row_strides(part_out.stride()[:-1], lse),
        "part_lse": _row_strides(part_lse.stride(), lse),
    }
    constants = _constants(out.shape[-1])
    with torch.cuda.device_of(out):
        _merge_lse_kernel[(triton.cdiv(lse.numel(), constants["BLOCK_M"]),)](
            out_ptr=out,
            lse_ptr=lse,
            part_out_ptr=part_out,
            part_lse_ptr=part_lse,
            num_rows=lse.numel(),
            num_heads=num_heads,
            num_queries=num_queries,
            **{
                f"{name}_{dim}": stride
                for name, of_dims in strides.items()
                for dim, stride in zip(("batch", "head", "row"), of_dims, strict=True)
            },
            **constants,
            num_warps=NUM_WARPS,
        )


def _row_strides(strides: tuple[int, ...], lse: Tensor) -> tuple[int, int, int]:
    """Of batch, head and row; 0 for a dim that is not there or has one element."""
    used = [s if n > 1 else 0 for s, n in zip(strides, lse.shape, strict=True)]
    batch, head, row = (0, 0, 0, *used)[-3:]
    return batch, head, row


def _constants(dim: int) -> dict[str, int]:
    """Columns are cut so that none is padded where a power of two of at least 64 divides them."""
    columns = min(512, power_of_two(dim), max(64, dim & -dim))
    return {"D": dim, "BLOCK_M": TILE // columns, "BLOCK_D": columns}


STRIDES = tuple(f"{x}_{dim}" for x in ("out", "part_out") for dim in ("batch", "head", "row"))


def specializations() -> list[Specialization]:
    """A part in fp32, as attention gives it, and one that has travelled in bf16."""
    return [
        _specialization(64, "fp32"),
        _specialization(128, "fp32"),
        _specialization(128, "bf16"),
        _specialization(80, "fp32"),
        _specialization(256, "fp32"),
        _specialization(512, "fp32"),
        _specialization(576, "fp32"),
        _specialization(100, "fp32", is_aligned=False),
    ]


def _specialization(dim: int, part: str, is_aligned: bool = True) -> Specialization:
    constants = _constants(dim)
    pointers = {"part_out_ptr": f"*{part}"}
    types = {
        name: pointers.get(name, "*fp32") if name.endswith("_ptr") else "i32"
        for name in _merge_lse_kernel.arg_names
        if name not in constants
    }
    return Specialization(
        name=f"merge, {part}, {dim}",
        kernel=_merge_lse_kernel,
        types=types,
        constants=constants,
        num_warps=NUM_WARPS,
        num_stages=3,
        divisible=STRIDES if is_aligned else (),
    )
