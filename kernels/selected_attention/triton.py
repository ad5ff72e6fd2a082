"""Attention over selected rows in Triton: rows are gathered by the program that reads them.

Products are computed in the dtype of the inputs with sums in fp32; results are fp32. No atomics:
equal inputs give equal bits. What queries give to the gradient of a row that several of them read
is written apart, sorted by row and added up in order, for as many queries at a time as fit into
`PARTS_BYTES`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..availability import is_interpreted
from ..launch import power_of_two
from ..page_attention.triton import _parts
from ..specialization import Specialization
from .triton_kernels import (
    _selected_attention_add_kernel,
    _selected_attention_bwd_dq_kernel,
    _selected_attention_bwd_parts_kernel,
    _selected_attention_fwd_kernel,
)

PARTS_BYTES = 2**30
"""Memory for what queries give to rows: 227 queries at a time if each reads 2048 rows of 576."""

KERNELS = {
    "forward": _selected_attention_fwd_kernel,
    "dq": _selected_attention_bwd_dq_kernel,
    "parts": _selected_attention_bwd_parts_kernel,
}


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut.

    Attributes:
        heads, rows: in a tile, at least 16.
        num_warps, num_stages: Triton's launch options.
    """

    heads: int
    rows: int
    num_warps: int
    num_stages: int


ADD_TILES = Tiles(1, 8, 4, 2)
"""Of the kernel that adds up; its rows are parts of one row."""


def tiles_for(kernel: str, dim: int, itemsize: int, num_heads: int) -> Tiles:
    """Tiles of a kernel of `KERNELS`: what registers hold without spilling in a loop.

    Args:
        dim: width of a row.
        itemsize: bytes of an input's element; 4 goes without tensor cores.
        num_heads: fewer than a tile holds make it smaller.
    """
    if is_interpreted() or itemsize == 4:
        chosen = Tiles(16, 16, 4, 1)
    elif dim > 256:
        chosen = {
            "forward": Tiles(64, 32, 8, 2),
            "dq": Tiles(32, 32, 8, 2),
            "parts": Tiles(16, 32, 8, 2),
        }[kernel]
    else:
        chosen = {
            "forward": Tiles(64, 64, 8, 2),
            "dq": Tiles(64, 32, 8, 2),
            "parts": Tiles(32, 32, 8, 2),
        }[kernel]
    heads = min(chosen.heads, max(16, power_of_two(num_heads)))
    return Tiles(heads, chosen.rows, chosen.num_warps, chosen.num_stages)


def forward(
    q: Tensor, rows: Tensor, index: Tensor, softmax_scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """See `selected_attention`."""
    call = _Call(q, rows, index, softmax_scale, value_dim)
    tiles = call.tiles("forward")
    out = q.new_empty(*q.shape[:2], value_dim, dtype=torch.float32)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    with call.on_device():
        _selected_attention_fwd_kernel[call.head_grid(tiles)](
            out_ptr=out, lse_ptr=lse, **call.arguments(), **call.constants(tiles)
        )
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    rows: Tensor,
    index: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """See `selected_attention_backward`."""
    call = _Call(q, rows, index, softmax_scale, out.shape[-1])
    tiles = call.tiles("dq")
    pointers = {
        "grad_ptr": grad_out.to(q.dtype).contiguous(),
        "lse_ptr": lse.float().contiguous(),
        "delta_ptr": q.new_empty(q.shape[:2], dtype=torch.float32),
    }
    dq = q.new_empty(q.shape, dtype=torch.float32)
    drows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    with call.on_device():
        _selected_attention_bwd_dq_kernel[call.head_grid(tiles)](
            out_ptr=out.contiguous(),
            dq_ptr=dq,
            **pointers,
            **call.arguments(),
            **call.constants(tiles),
        )
        _add_gradients_of_rows(drows, call, pointers)
    return dq, drows


def _add_gradients_of_rows(drows: Tensor, call: "_Call", pointers: dict[str, Tensor]) -> None:
    """Add to `drows` what all queries give, one tile of queries after the other."""
    num_queries, num_selected = call.index.shape
    if num_selected == 0:
        return
    tiles, width = call.tiles("parts"), drows.shape[1]
    size = max(1, min(num_queries, PARTS_BYTES // (4 * num_selected * width)))
    parts = drows.new_empty(size * num_selected, width)
    for first in range(0, num_queries, size):
        index = call.index[first : first + size]
        grid = (index.shape[0] * -(-num_selected // tiles.rows),)
        _selected_attention_bwd_parts_kernel[grid](
            parts_ptr=parts,
            first_query=first,
            **pointers,
            **call.arguments(),
            **call.constants(tiles),
        )
        # Those of no row stand in front, and are passed over. Stable: in the order of queries.
        in_order, order = torch.sort(index.flatten(), stable=True)
        _selected_attention_add_kernel[(in_order.numel(),)](
            parts_ptr=parts,
            sorted_ptr=in_order,
            order_ptr=order,
            ends_ptr=torch.searchsorted(in_order, in_order, right=True, out_int32=True),
            drows_ptr=drows,
            num_parts=in_order.numel(),
            **_widths(width),
            BLOCK_N=ADD_TILES.rows,
            num_warps=ADD_TILES.num_warps,
            num_stages=ADD_TILES.num_stages,
        )


class _Call:
    """The operands, and the arguments that the kernels share."""

    def __init__(
        self, q: Tensor, rows: Tensor, index: Tensor, softmax_scale: float, value_dim: int
    ) -> None:
        self.q, self.rows = q.contiguous(), rows.contiguous()
        self.index, self.counts = packed(index)
        self.scale, self.value_dim = float(softmax_scale), value_dim

    def tiles(self, kernel: str) -> Tiles:
        return tiles_for(kernel, self.q.shape[2], self.q.element_size(), self.q.shape[1])

    def on_device(self) -> Any:
        """Triton launches on the current device, which need not be the tensors'."""
        return torch.cuda.device_of(self.q)

    def head_grid(self, tiles: Tiles) -> tuple[int]:
        """One dim, as there may be many queries; tiles of one query, which share rows, in turn."""
        return (self.q.shape[0] * -(-self.q.shape[1] // tiles.heads),)

    def arguments(self) -> dict[str, Any]:
        return {
            "q_ptr": self.q,
            "rows_ptr": self.rows,
            "index_ptr": self.index,
            "counts_ptr": self.counts,
            "num_selected": self.index.shape[1],
            "scale": self.scale,
        }

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        return {
            **_constants(self.q.shape[1], self.q.shape[2], self.value_dim, tiles),
            "UPCAST": is_interpreted() and self.q.dtype == torch.bfloat16,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }


def packed(index: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of each query in front, in their order, and how many they are.

    Of a selection that several ranks share a rank has few rows of each query, anywhere among its
    places: in blocks of all places most of the work would be for none.

    Returns:
        index `[N, K]` and counts `[N]`, int32; -1 behind the last row of a query.
    """
    num_places = index.shape[1]
    is_row = index >= 0
    before = is_row.cumsum(-1)
    behind = before + torch.arange(num_places - 1, -1, -1, device=index.device)
    # Each place once, those of no row too: to one place they would write in any order.
    places = torch.where(is_row, before - 1, behind)
    found = index.new_empty(index.shape, dtype=torch.int32)
    found.scatter_(1, places, index.clamp(min=-1).to(torch.int32))
    return found, is_row.sum(-1, dtype=torch.int32)


def specializations() -> list[Specialization]:
    """bf16: narrow tables, and the latents of DeepSeek and GLM for few, 64 and 128 heads."""
    shapes = ((16, 128, 128), (64, 256, 256), (16, 576, 512), (64, 576, 512), (128, 576, 512))
    attention = [_specialization(kernel, *shape) for shape in shapes for kernel in KERNELS]
    return [*attention, *(_add_specialization(dim) for dim in (576, 128))]


def _specialization(kernel: str, num_heads: int, dim: int, value_dim: int) -> Specialization:
    tiles = tiles_for(kernel, dim, 2, num_heads)
    constants = {**_constants(num_heads, dim, value_dim, tiles), "UPCAST": False}
    pointers = dict.fromkeys(("q_ptr", "rows_ptr", "grad_ptr"), "*bf16")
    pointers |= {"index_ptr": "*i32", "counts_ptr": "*i32"}
    if kernel == "dq":  # the output as its reader has it; the forward writes fp32
        pointers["out_ptr"] = "*bf16"
    types = {
        name: pointers.get(name, "*fp32") if name.endswith("_ptr") else "i32"
        for name in KERNELS[kernel].arg_names
        if name not in constants
    }
    return Specialization(
        name=f"{kernel}, bf16, {num_heads} heads of {dim}/{value_dim}",
        kernel=KERNELS[kernel],
        types=types | {"scale": "fp32"},
        constants=constants,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        # sm_90, 64 heads: two to four numbers, stored before the loop over rows and loaded behind
        # it. Tiles of half the rows do not spill, but scale their sums twice as often.
        may_spill=kernel == "forward" and dim > 256 and tiles.heads == 64,
    )


def _add_specialization(dim: int) -> Specialization:
    return Specialization(
        name=f"add, fp32, {dim}",
        kernel=_selected_attention_add_kernel,
        types={
            "parts_ptr": "*fp32",
            "sorted_ptr": "*i32",
            "order_ptr": "*i64",
            "ends_ptr": "*i32",
            "drows_ptr": "*fp32",
            "num_parts": "i32",
        },
        constants={**_widths(dim), "BLOCK_N": ADD_TILES.rows},
        num_warps=ADD_TILES.num_warps,
        num_stages=ADD_TILES.num_stages,
    )


def _widths(dim: int) -> dict[str, int]:
    main, rest = _parts(dim)
    return {"D": dim, "D_MAIN": main, "D_REST": rest}


def _constants(num_heads: int, dim: int, value_dim: int, tiles: Tiles) -> dict[str, int]:
    widths = _widths(dim)
    return {
        **widths,
        "H": num_heads,
        "DV": value_dim,
        "DV_REST": widths["D_REST"] if value_dim > widths["D_MAIN"] else 0,
        "BLOCK_H": tiles.heads,
        "BLOCK_K": tiles.rows,
    }
