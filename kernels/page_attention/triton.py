"""Attention over a table of pages in Triton: one launch reads every page where it lies.

Products are computed in the dtype of the inputs with sums in fp32; results are fp32. No atomics:
equal inputs give equal bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..availability import is_interpreted
from ..launch import innermost_contiguous, power_of_two, to_device
from ..specialization import Specialization
from .params import Cotangents, PageParams
from .triton_kernels import (
    _page_attention_bwd_dkv_kernel,
    _page_attention_bwd_dq_kernel,
    _page_attention_fwd_kernel,
)

KERNELS = {
    "forward": _page_attention_fwd_kernel,
    "dq": _page_attention_bwd_dq_kernel,
    "dkv": _page_attention_bwd_dkv_kernel,
}


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut.

    Attributes:
        rows: of queries in a tile, at least 16.
        keys: in a tile, at least 16.
        num_warps, num_stages: Triton's launch options.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tiles_for(kernel: str, dim: int, value_dim: int, itemsize: int, num_rows: int) -> Tiles:
    """Tiles of a kernel ("forward", "dq" or "dkv"): what registers hold without spilling.

    Args:
        dim, value_dim: of keys and of values.
        itemsize: bytes of an input's element; 4 goes without tensor cores.
        num_rows: query rows per key head; fewer than a tile holds make it smaller.
    """
    widest = max(dim, value_dim)
    if is_interpreted():
        chosen = Tiles(16, 16, 4, 1)
    elif itemsize == 4:
        chosen = Tiles(16, 16, 4, 1) if widest > 128 else Tiles(32, 32, 4, 1)
    elif widest > 256:
        chosen = {
            "forward": Tiles(32, 32, 8, 1),
            "dq": Tiles(32, 32, 8, 1),
            "dkv": Tiles(32, 16, 8, 1),
        }[kernel]
    elif widest > 128:
        chosen = {
            "forward": Tiles(64, 32, 8, 2),
            # 192 is two parts, 128 and 64, and keeps two of all.
            "dq": Tiles(64, 32, 8, 2) if widest == 256 else Tiles(64, 16, 8, 2),
            "dkv": Tiles(64, 32, 8, 1),
        }[kernel]
    elif widest > 64:
        chosen = {
            "forward": Tiles(128, 64, 8, 2),
            "dq": Tiles(64, 64, 8, 2),
            "dkv": Tiles(32, 64, 8, 2),
        }[kernel]
    else:
        chosen = {
            "forward": Tiles(128, 64, 4, 3),
            "dq": Tiles(64, 64, 4, 2),
            "dkv": Tiles(64, 64, 8, 2),
        }[kernel]
    rows = min(chosen.rows, max(16, power_of_two(num_rows)))
    return Tiles(rows, chosen.keys, chosen.num_warps, chosen.num_stages)


def forward(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    starts: Sequence[int],
    params: PageParams,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """See `page_attention`; `tiles` of the forward, if not those of `tiles_for`."""
    call = _Call(q, keys, values, starts, params, [None] * len(keys))
    tiles = tiles or call.tiles("forward")
    out = q.new_empty(*q.shape[:-1], call.value_dim, dtype=torch.float32)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    with call.on_device():
        _page_attention_fwd_kernel[call.row_grid(tiles)](
            q_ptr=call.q,
            out_ptr=out,
            lse_ptr=lse,
            **call.row_arguments(),
            **call.constants(tiles),
        )
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    starts: Sequence[int],
    out: Tensor,
    lse: Tensor,
    params: PageParams,
    into: Sequence[Cotangents],
    tiles: tuple[Tiles, Tiles] | None = None,
) -> Tensor:
    """See `page_attention_backward`; `tiles` of dq and dkv, if not those of `tiles_for`."""
    call = _Call(q, keys, values, starts, params, into)
    dq_tiles, dkv_tiles = tiles or (call.tiles("dq"), call.tiles("dkv"))
    grad_out = grad_out.to(q.dtype).contiguous()
    pointers = {
        "q_ptr": call.q,
        "grad_ptr": grad_out,
        # Times log2(e), as scores are; exp2 of anything minus inf is the 0 of a row without keys.
        "lse_ptr": (lse.float() / _LN_2).masked_fill(lse == -torch.inf, torch.inf).contiguous(),
        "delta_ptr": (grad_out.float() * out.float().contiguous()).sum(-1),
    }
    dq = q.new_empty(q.shape, dtype=torch.float32)
    with call.on_device():
        _page_attention_bwd_dq_kernel[call.row_grid(dq_tiles)](
            **pointers, dq_ptr=dq, **call.row_arguments(), **call.constants(dq_tiles)
        )
        key_tiles = call.key_tiles(dkv_tiles)
        if key_tiles is not None:
            _page_attention_bwd_dkv_kernel[(len(key_tiles), call.num_heads)](
                **pointers,
                tiles_ptr=key_tiles,
                **call.span_arguments(),
                **call.constants(dkv_tiles),
                IS_ONE_SEQUENCE=params.q_len >= q.shape[2],
            )
    return dq


_LN_2 = 0.6931471805599453


class _Call:
    """Queries, the table of pages, and the arguments that the kernels share."""

    def __init__(
        self,
        q: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        starts: Sequence[int],
        params: PageParams,
        into: Sequence[Cotangents],
    ) -> None:
        # A copy of some queries costs little beside reading all keys, and makes the rows of a key
        # head follow each other. Pages are copied only if their innermost stride is not 1.
        self.q = q.contiguous()
        self.keys = [innermost_contiguous(k) for k in keys]
        self.values = [innermost_contiguous(v) for v in values]
        self.starts, self.params, self.into = list(starts), params, list(into)
        self.dim, self.value_dim = q.shape[-1], values[0].shape[-1]
        self.num_kv_heads = keys[0].shape[1]
        self.num_heads = q.shape[0] * self.num_kv_heads
        self.num_rows = q.shape[1] // self.num_kv_heads * q.shape[2]
        self.is_windowed = any(params.at(start).is_windowed for start in self.starts)
        rows = [self._entry(index) for index in range(len(self.keys))]
        self.is_aligned = self._is_aligned(rows)
        self.table = to_device(torch.tensor(rows, dtype=torch.int64), q.device)

    def tiles(self, kernel: str) -> Tiles:
        return tiles_for(kernel, self.dim, self.value_dim, self.q.element_size(), self.num_rows)

    def on_device(self) -> Any:
        """Triton launches on the current device, which need not be the tensors'."""
        return torch.cuda.device_of(self.q)

    def row_grid(self, tiles: Tiles) -> tuple[int, int]:
        return -(-self.num_rows // tiles.rows), self.num_heads

    def key_tiles(self, tiles: Tiles) -> Tensor | None:
        """`[N, 2]`, page and first key of each tile whose gradient is wanted; None without any."""
        # By tensors: of a long history there are tens of thousands.
        wanted = torch.tensor([i for i, pair in enumerate(self.into) if pair is not None])
        if wanted.numel() == 0:
            return None
        counts = torch.tensor([-(-self.keys[i].shape[2] // tiles.keys) for i in wanted.tolist()])
        before = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        first = (torch.arange(len(before)) - before) * tiles.keys
        found = torch.stack([torch.repeat_interleave(wanted, counts), first], dim=1)
        return to_device(found, self.q.device)

    def row_arguments(self) -> dict[str, Any]:
        """Of a kernel whose programs own rows."""
        return {
            **self._shared_arguments(),
            "num_pages": len(self.keys),
            "num_rows": self.num_rows,
            "num_queries": self.q.shape[2],
        }

    def span_arguments(self) -> dict[str, Any]:
        """Of a kernel that walks over spans of rows, a head's queries each if there is a mask."""
        is_masked = self.params.causal or self.is_windowed
        num_queries = self.q.shape[2] if is_masked else self.num_rows
        return {
            **self._shared_arguments(),
            "num_spans": self.num_rows // max(num_queries, 1),
            "num_queries": num_queries,
        }

    def _shared_arguments(self) -> dict[str, Any]:
        return {
            "table_ptr": self.table,
            "num_kv_heads": self.num_kv_heads,
            "q_start": self.params.q_start,
            "q_len": self.params.q_len,
            "window": self.params.window or 0,
            "scale": float(self.params.softmax_scale),
            "softcap": float(self.params.softcap or 1.0),
        }

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        return {
            **_constants(self.dim, self.value_dim, tiles),
            "IS_CAUSAL": self.params.causal,
            "IS_WINDOWED": self.is_windowed,
            "HAS_SOFTCAP": self.params.softcap is not None,
            "ALIGNED": self.is_aligned,
            "UPCAST": is_interpreted() and self.q.dtype == torch.bfloat16,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }

    def _entry(self, index: int) -> list[int]:
        """A row of the table; see `triton_kernels`."""
        k, v = self.keys[index], self.values[index]
        entry = [self.starts[index], k.shape[2], *_address(k), *_address(v)]
        dk, dv = self.into[index] or (None, None)
        return [*entry, *_address(dk), *_address(dv)]

    def _is_aligned(self, rows: list[list[int]]) -> bool:
        """Whether all addresses and strides allow loads of 16 bytes."""
        return all(number % 16 == 0 for row in rows for number in row[2:])


def _address(x: Tensor | None) -> list[int]:
    if x is None:
        return [0, 0, 0, 0]
    # The stride of a dim of one element may be anything; it is never used.
    strides = [s if n > 1 else 0 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return [x.data_ptr(), *strides]


def _parts(dim: int) -> tuple[int, int]:
    """A head dim in two powers of two, each 0 or at least 16: 576 is 512 and 64, 80 is 64 and 16.

    What is below 16 elements, and a rest that is no power of two, is padded.
    """
    main = max(16, 1 << (dim.bit_length() - 1))
    rest = max(dim - main, 0)
    return main, max(16, power_of_two(rest)) if rest else 0


def _constants(dim: int, value_dim: int, tiles: Tiles) -> dict[str, int]:
    (main, rest), (value_main, value_rest) = _parts(dim), _parts(value_dim)
    return {
        "D": dim,
        "D_MAIN": main,
        "D_REST": rest,
        "DV": value_dim,
        "DV_MAIN": value_main,
        "DV_REST": value_rest,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.keys,
    }


def specializations() -> list[Specialization]:
    """bf16, over history without a mask and over own keys under one; 576/512 are MLA's latents."""
    return [
        _specialization(kernel, dim, value_dim, is_causal)
        for dim, value_dim in ((64, 64), (128, 128), (192, 128), (256, 256), (576, 512))
        for kernel in KERNELS
        for is_causal in (False, True)
    ]


def _specialization(kernel: str, dim: int, value_dim: int, is_causal: bool) -> Specialization:
    tiles = tiles_for(kernel, dim, value_dim, 2, 4096)
    flags = {
        "IS_CAUSAL": is_causal,
        "IS_WINDOWED": False,
        "HAS_SOFTCAP": False,
        "IS_ONE_SEQUENCE": True,
        "ALIGNED": True,
        "UPCAST": False,
    }
    constants = {**_constants(dim, value_dim, tiles), **flags}
    pointers = {"q_ptr": "*bf16", "grad_ptr": "*bf16", "table_ptr": "*i64", "tiles_ptr": "*i64"}
    numbers = {"scale": "fp32", "softcap": "fp32"}
    names = KERNELS[kernel].arg_names
    types = {
        name: pointers.get(name, "*fp32") if name.endswith("_ptr") else numbers.get(name, "i32")
        for name in names
        if name not in constants
    }
    return Specialization(
        name=f"{kernel}, bf16, {dim}/{value_dim}{', causal' if is_causal else ''}",
        kernel=KERNELS[kernel],
        types=types,
        constants={name: value for name, value in constants.items() if name in names},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
