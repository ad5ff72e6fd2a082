"""Index scores in Triton: products of all heads are weighted and added up in registers.

Of a tile of queries and keys nothing but its scores is written: products of all heads, which the
definition writes and reads, are as many numbers as 32 to 64 such tiles.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..availability import is_interpreted
from ..page_attention.triton import _parts
from ..page_attention.triton_kernels import _load, _products
from ..specialization import Specialization


@dataclass(frozen=True)
class Tiles:
    """How the kernel is cut.

    Attributes:
        queries, keys: in a tile, at least 16.
        num_warps, num_stages: Triton's launch options.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def tiles_for(dim: int, itemsize: int) -> Tiles:
    """What registers hold without spilling; an item of 4 bytes goes without tensor cores."""
    if is_interpreted():
        return Tiles(16, 16, 4, 1)
    if itemsize == 4:
        return Tiles(32, 32, 4, 1)
    return Tiles(128, 128, 8, 3) if dim <= 128 else Tiles(64, 64, 4, 2)


def scores(
    q: Tensor, k: Tensor, weights: Tensor, softmax_scale: float, tiles: Tiles | None = None
) -> Tensor:
    """See `index_scores`; `tiles` if not those of `tiles_for`."""
    dtype = torch.promote_types(q.dtype, k.dtype)  # a tensor core multiplies equal dtypes
    q, k, weights = q.to(dtype).contiguous(), k.to(dtype).contiguous(), weights.contiguous()
    num_rows, num_queries, num_heads, dim = q.shape
    num_keys = k.shape[1]
    tiles = tiles or tiles_for(dim, q.element_size())
    out = q.new_empty(num_rows, num_queries, num_keys, dtype=torch.float32)
    # Programs that follow each other read the same queries, which are the larger operand.
    grid = (-(-num_keys // tiles.keys), -(-num_queries // tiles.queries), num_rows)
    with torch.cuda.device_of(q):
        _index_scores_kernel[grid](
            q_ptr=q,
            k_ptr=k,
            weights_ptr=weights,
            out_ptr=out,
            num_queries=num_queries,
            num_keys=num_keys,
            scale=float(softmax_scale),
            **_constants(num_heads, dim, tiles),
            IS_SHARED=k.shape[0] == 1,
            UPCAST=is_interpreted() and dtype == torch.bfloat16,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out


def specializations() -> list[Specialization]:
    """bf16, with weights in bf16: the sizes of DeepSeek's and GLM's indexers."""
    return [
        _specialization(num_heads, dim, num_rows)
        for num_heads, dim, num_rows in ((32, 128, 1), (64, 128, 1), (64, 128, 8), (16, 192, 1))
    ]


def _specialization(num_heads: int, dim: int, num_rows: int) -> Specialization:
    tiles = tiles_for(dim, 2)
    return Specialization(
        name=f"scores, bf16, {num_heads} heads of {dim}" + (", a batch" if num_rows > 1 else ""),
        kernel=_index_scores_kernel,
        types={
            "q_ptr": "*bf16",
            "k_ptr": "*bf16",
            "weights_ptr": "*bf16",
            "out_ptr": "*fp32",
            "num_queries": "i32",
            "num_keys": "i32",
            "scale": "fp32",
        },
        constants={
            **_constants(num_heads, dim, tiles),
            "IS_SHARED": num_rows == 1,
            "UPCAST": False,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _constants(num_heads: int, dim: int, tiles: Tiles) -> dict[str, Any]:
    main, rest = _parts(dim)
    return {
        "H": num_heads,
        "D": dim,
        "D_MAIN": main,
        "D_REST": rest,
        "BLOCK_T": tiles.queries,
        "BLOCK_S": tiles.keys,
    }


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _index_scores_kernel(
    q_ptr, k_ptr, weights_ptr, out_ptr, num_queries, num_keys, scale,
    H: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, IS_SHARED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of keys for a tile of queries."""
    row = tl.program_id(2).to(tl.int64)
    queries = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    keys = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    first_query = row * num_queries
    if not IS_SHARED:
        k_ptr += row * num_keys * D
    k, k_rest = _load(k_ptr, D, keys, num_keys, D, D_MAIN, D_REST)
    q_ptr += first_query * H * D
    weights_ptr += first_query * H
    acc = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    for head in range(H):
        q, q_rest = _load(q_ptr + head * D, H * D, queries, num_queries, D, D_MAIN, D_REST)
        weight = tl.load(
            weights_ptr + queries.to(tl.int64) * H + head, mask=queries < num_queries, other=0.0
        )
        products = _products(q, q_rest, k, k_rest, D_REST, UPCAST) * scale
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        acc += weight.to(tl.float32)[:, None] * products
    out = out_ptr + (first_query + queries.to(tl.int64))[:, None] * num_keys + keys[None, :]
    tl.store(out, acc, mask=(queries < num_queries)[:, None] & (keys < num_keys)[None, :])
