"""The Triton kernels of attention over selected rows; `triton.py` launches them.

A program gathers a tile of the rows that one query reads, once for a tile of its heads, and uses
them as keys and, their first columns, as values. A width is read in two parts, a power of two and
a rest that is padded to one: 576 = 512 + 64 rather than 1024. Outputs are kept as wide as keys and
stored as wide as values.

`index` is packed: of each query `counts` rows that stand in front. Scores are kept times log2(e),
for exp2. Sources: online softmax, Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867;
backward from lse, Dao 2023, https://arxiv.org/abs/2307.08691.
"""

import triton
import triton.language as tl

from ..page_attention.triton_kernels import LN_2, LOG2_E, _dot, _load, _products, _store

# Numbers that change from call to call: a kernel compiled anew for each would cost more.
VARYING = ["num_selected", "first_query"]


@triton.jit
def _gather(
    rows_ptr, index_ptr, places, count,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
):  # fmt: skip
    """Both parts of the rows at some places of a query's index; behind the last it repeats.

    A repeated row has to be masked in what is computed of it. To mask it here takes more registers,
    and zeros would have to be masked too.
    """
    found = tl.load(index_ptr + tl.minimum(places, count - 1)).to(tl.int64)
    main = _load_columns(rows_ptr + found * D, D, 0, D_MAIN)
    rest = main
    if D_REST > 0:
        rest = _load_columns(rows_ptr + found * D, D, D_MAIN, D_REST)
    return main, rest


@triton.jit
def _load_columns(pointers, D: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """Columns FIRST to FIRST + SIZE of rows that begin at `pointers`, zero behind the last."""
    columns = FIRST + tl.arange(0, SIZE)
    if FIRST + SIZE > D:
        mask = (columns < D)[None, :]
        return tl.load(pointers[:, None] + columns[None, :], mask=mask, other=0.0)
    else:
        return tl.load(pointers[:, None] + columns[None, :])


@triton.jit
def _load_heads(
    ptr, query, heads,
    H: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Both parts of some heads of a query."""
    return _load(ptr + query * H * DIM, DIM, heads, H, DIM, MAIN, REST)


@triton.jit
def _load_lse(lse_ptr, query, heads, H: tl.constexpr):
    """Times log2(e); exp2 of anything minus inf is the 0 of a query without rows."""
    lse = tl.load(lse_ptr + query * H + heads, mask=heads < H, other=float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E)


@triton.jit(do_not_specialize=VARYING)
def _selected_attention_fwd_kernel(
    q_ptr, rows_ptr, index_ptr, counts_ptr, out_ptr, lse_ptr, num_selected, scale,
    H: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_REST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile of one query's heads over all of its rows."""
    query = (tl.program_id(0) // tl.cdiv(H, BLOCK_H)).to(tl.int64)
    heads = tl.program_id(0) % tl.cdiv(H, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    count = tl.load(counts_ptr + query)
    index_ptr += query * num_selected
    q, q_rest = _load_heads(q_ptr, query, heads, H, D, D_MAIN, D_REST)
    highest = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, D_MAIN], tl.float32)
    acc_rest = acc
    if DV_REST > 0:
        acc_rest = tl.zeros([BLOCK_H, DV_REST], tl.float32)

    for block in range(0, count, BLOCK_K):
        places = block + tl.arange(0, BLOCK_K)
        k, k_rest = _gather(rows_ptr, index_ptr, places, count, D, D_MAIN, D_REST)
        scores = _products(q, q_rest, k, k_rest, D_REST, UPCAST) * (scale * LOG2_E)
        scores = tl.where((places < count)[None, :], scores, -float("inf"))
        new = tl.maximum(highest, tl.max(scores, 1))  # a block has a row: never -inf
        decay = tl.exp2(highest - new)
        p = tl.exp2(scores - new[:, None])
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None] + _dot(p, k, UPCAST)
        if DV_REST > 0:
            acc_rest = acc_rest * decay[:, None] + _dot(p, k_rest, UPCAST)
        highest = new

    divisor = tl.where(total == 0, 1.0, total)
    lse = (highest + tl.log2(divisor)) * LN_2
    tl.store(lse_ptr + query * H + heads, lse, mask=heads < H)
    factor = (1.0 / divisor)[:, None]
    _store(
        out_ptr + query * H * DV, DV, heads, H, acc * factor, acc_rest * factor,
        DV, D_MAIN, DV_REST, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _selected_attention_bwd_dq_kernel(
    q_ptr, rows_ptr, index_ptr, counts_ptr, grad_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr,
    num_selected, scale,
    H: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_REST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of one query's heads; and `delta`, grad out, for the other kernel."""
    query = (tl.program_id(0) // tl.cdiv(H, BLOCK_H)).to(tl.int64)
    heads = tl.program_id(0) % tl.cdiv(H, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    count = tl.load(counts_ptr + query)
    index_ptr += query * num_selected
    grad, grad_rest = _load_heads(grad_ptr, query, heads, H, DV, D_MAIN, DV_REST)
    out, out_rest = _load_heads(out_ptr, query, heads, H, DV, D_MAIN, DV_REST)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    if DV_REST > 0:
        delta += tl.sum(grad_rest.to(tl.float32) * out_rest.to(tl.float32), 1)
    tl.store(delta_ptr + query * H + heads, delta, mask=heads < H)
    q, q_rest = _load_heads(q_ptr, query, heads, H, D, D_MAIN, D_REST)
    lse = _load_lse(lse_ptr, query, heads, H)
    acc = tl.zeros([BLOCK_H, D_MAIN], tl.float32)
    acc_rest = acc
    if D_REST > 0:
        acc_rest = tl.zeros([BLOCK_H, D_REST], tl.float32)

    for block in range(0, count, BLOCK_K):
        places = block + tl.arange(0, BLOCK_K)
        k, k_rest = _gather(rows_ptr, index_ptr, places, count, D, D_MAIN, D_REST)
        scores = _products(q, q_rest, k, k_rest, D_REST, UPCAST) * (scale * LOG2_E)
        scores = tl.where((places < count)[None, :], scores, -float("inf"))
        products = _products(grad, grad_rest, k, k_rest, DV_REST, UPCAST)
        ds = tl.exp2(scores - lse[:, None]) * (products - delta[:, None])
        acc += _dot(ds, k, UPCAST)
        if D_REST > 0:
            acc_rest += _dot(ds, k_rest, UPCAST)

    _store(
        dq_ptr + query * H * D, D, heads, H, acc * scale, acc_rest * scale,
        D, D_MAIN, D_REST, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _selected_attention_bwd_parts_kernel(
    q_ptr, rows_ptr, index_ptr, counts_ptr, grad_ptr, lse_ptr, delta_ptr, parts_ptr,
    first_query, num_selected, scale,
    H: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_REST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """What one query gives to the gradients of a tile of its rows: keys' and values' in one sum.

    `parts` is `[queries from first_query on, num_selected, D]`; what no row stands for is left as
    it is. Scores stand on their side, `[BLOCK_K, BLOCK_H]`.
    """
    num_tiles = tl.cdiv(num_selected, BLOCK_K)
    of_tile = (tl.program_id(0) // num_tiles).to(tl.int64)
    query = first_query + of_tile
    count = tl.load(counts_ptr + query)
    first = tl.program_id(0) % num_tiles * BLOCK_K
    if first >= count:
        return
    places = first + tl.arange(0, BLOCK_K)
    k, k_rest = _gather(
        rows_ptr, index_ptr + query * num_selected, places, count, D, D_MAIN, D_REST
    )  # fmt: skip
    acc = tl.zeros([BLOCK_K, D_MAIN], tl.float32)
    acc_rest = acc
    if D_REST > 0:
        acc_rest = tl.zeros([BLOCK_K, D_REST], tl.float32)

    for block in range(0, H, BLOCK_H):
        heads = block + tl.arange(0, BLOCK_H)
        q, q_rest = _load_heads(q_ptr, query, heads, H, D, D_MAIN, D_REST)
        grad, grad_rest = _load_heads(grad_ptr, query, heads, H, DV, D_MAIN, DV_REST)
        lse = _load_lse(lse_ptr, query, heads, H)
        delta = tl.load(delta_ptr + query * H + heads, mask=heads < H, other=0.0)
        products = _products(k, k_rest, q, q_rest, D_REST, UPCAST)
        p = tl.exp2(products * (scale * LOG2_E) - lse[None, :])
        products = _products(k, k_rest, grad, grad_rest, DV_REST, UPCAST)
        # With the scale: to this sum p is added without one.
        ds = p * (products - delta[None, :]) * scale
        acc += _dot(ds, q, UPCAST)
        acc += _dot(p, grad, UPCAST)
        if D_REST > 0:
            acc_rest += _dot(ds, q_rest, UPCAST)
        if DV_REST > 0:
            acc_rest += _dot(p, grad_rest, UPCAST)

    _store(
        parts_ptr + of_tile * num_selected * D, D, places, count, acc, acc_rest,
        D, D_MAIN, D_REST, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_parts"])
def _selected_attention_add_kernel(
    parts_ptr, sorted_ptr, order_ptr, ends_ptr, drows_ptr, num_parts,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add up the parts of one row, in the order of queries, to the row's gradient.

    Parts are sorted by row. A program stands at each, and the first of a row adds all of it: to
    let one stand at each row would take as many as the table has rows, most of them without parts.
    """
    first = tl.program_id(0)
    row = tl.load(sorted_ptr + first).to(tl.int64)
    before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1)
    if (row < 0) | (row == before):
        return
    end = tl.load(ends_ptr + first)
    acc = tl.zeros([D_MAIN], tl.float32)
    acc_rest = acc
    if D_REST > 0:
        acc_rest = tl.zeros([D_REST], tl.float32)
    for block in range(first, end, BLOCK_N):
        numbers = block + tl.arange(0, BLOCK_N)
        of_order = tl.load(order_ptr + numbers, mask=numbers < end, other=num_parts)
        part, part_rest = _load(parts_ptr, D, of_order, num_parts, D, D_MAIN, D_REST)
        acc += tl.sum(part, 0)
        if D_REST > 0:
            acc_rest += tl.sum(part_rest, 0)
    row_of_one = row + tl.arange(0, 1)
    _store(
        drows_ptr, D, row_of_one, row + 1, acc[None, :], acc_rest[None, :],
        D, D_MAIN, D_REST, True,
    )  # fmt: skip
