"""The Triton kernels of attention over a table of pages; `triton.py` launches them.

Queries of the G heads that read one key head lie side by side as G*T rows, row r being query
`r % T`, so that one query per head (decoding) still fills a tile. A head dim is read in two parts,
a power of two and a rest that is padded to one: 576 = 512 + 64 rather than 1024.

A page is a row of the table, COLUMNS numbers in int64: start, length, and for each of K, V, dK, dV
an address and the strides of batch, head and key, in elements.

Scores are kept times log2(e), for exp2. Sources: online softmax, Milakov & Gimelshein 2018,
https://arxiv.org/abs/1805.02867; backward from lse, Dao 2023, https://arxiv.org/abs/2307.08691.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
COLUMNS = tl.constexpr(18)
K_COLUMN = tl.constexpr(2)
V_COLUMN = tl.constexpr(6)
DK_COLUMN = tl.constexpr(10)
DV_COLUMN = tl.constexpr(14)

# Numbers that change from call to call: a kernel compiled anew for each would cost more.
VARYING = ["num_pages", "num_rows", "num_queries", "num_spans", "q_start", "q_len", "window"]


@triton.jit
def _operand(entry, FIRST: tl.constexpr, batch, kv_head, like_ptr, ALIGNED: tl.constexpr):
    """Pointer to one head of a page's tensor, typed as `like_ptr`, and the stride of its keys."""
    base = tl.load(entry + FIRST).to(like_ptr.dtype)
    stride_batch = tl.load(entry + FIRST + 1)
    stride_head = tl.load(entry + FIRST + 2)
    stride = tl.load(entry + FIRST + 3)
    if ALIGNED:  # unlike an argument's, an address from memory has no known alignment
        base = tl.multiple_of(base, 16)
        stride_batch = tl.multiple_of(stride_batch, 16)
        stride_head = tl.multiple_of(stride_head, 16)
        stride = tl.multiple_of(stride, 16)
    return base + batch * stride_batch + kv_head * stride_head, stride


@triton.jit
def _tile(ptr, stride, rows, end, DIM: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """Pointers to columns FIRST to FIRST + SIZE of `rows`, `[rows, SIZE]`, and which exist."""
    columns = FIRST + tl.arange(0, SIZE)
    exists = (rows < end)[:, None]
    if FIRST + SIZE > DIM:
        exists = exists & (columns < DIM)[None, :]
    return ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], exists


@triton.jit
def _load(
    ptr, stride, rows, end, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """Both parts of some rows, zero where there is nothing; without a rest the first twice."""
    pointers, exists = _tile(ptr, stride, rows, end, DIM, 0, MAIN)
    main = tl.load(pointers, mask=exists, other=0.0)
    rest = main
    if REST > 0:
        pointers, exists = _tile(ptr, stride, rows, end, DIM, MAIN, REST)
        rest = tl.load(pointers, mask=exists, other=0.0)
    return main, rest


@triton.jit
def _store(
    ptr, stride, rows, end, main, rest,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write both parts of some rows, or add them to what is there."""
    pointers, exists = _tile(ptr, stride, rows, end, DIM, 0, MAIN)
    if ADD:
        main += tl.load(pointers, mask=exists, other=0.0)
    tl.store(pointers, main, mask=exists)
    if REST > 0:
        pointers, exists = _tile(ptr, stride, rows, end, DIM, MAIN, REST)
        if ADD:
            rest += tl.load(pointers, mask=exists, other=0.0)
        tl.store(pointers, rest, mask=exists)


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    """`a b` in fp32; `a` is rounded to the dtype of `b`, for tensor cores."""
    if UPCAST:  # the interpreter multiplies bf16 wrongly
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a.to(b.dtype), b, input_precision="ieee")


@triton.jit
def _products(a, a_rest, b, b_rest, REST: tl.constexpr, UPCAST: tl.constexpr):
    """`a b^T` over both parts, `[rows of a, rows of b]`."""
    result = _dot(a, tl.trans(b), UPCAST)
    if REST > 0:
        result += _dot(a_rest, tl.trans(b_rest), UPCAST)
    return result


@triton.jit
def _tanh(x):
    """Accurate to a rounding: near zero `1 - exp(-2|x|)` would leave few digits."""
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    series = x * (
        1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    )
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -far, far))


@triton.jit
def _scores(products, visible, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores times log2(e); -inf where a key is not visible."""
    if HAS_SOFTCAP:
        scores = _tanh(products * (scale / softcap)) * (softcap * LOG2_E)
    else:
        scores = products * (scale * LOG2_E)
    return tl.where(visible, scores, -float("inf"))


@triton.jit
def _visible(
    distance, exists, window, IS_CAUSAL: tl.constexpr, IS_WINDOWED: tl.constexpr
):  # fmt: skip
    """Where a key `distance` positions before a query is seen by it."""
    visible = exists
    if IS_CAUSAL:
        visible = visible & (distance >= 0)
    if IS_WINDOWED:
        visible = visible & (distance < window)
    return visible


@triton.jit
def _score_gradients(
    scores, lse, products, delta, visible, softcap, HAS_SOFTCAP: tl.constexpr
):  # fmt: skip
    """Probabilities, and the gradients of the scores; `products` are those of dO and V."""
    p = tl.exp2(scores - lse)
    ds = p * (products - delta)
    if HAS_SOFTCAP:
        capped = tl.where(visible, scores, 0.0) / (softcap * LOG2_E)
        ds = ds * (1 - capped * capped)
    return p, ds


@triton.jit
def _key_range(
    position, start, length, window,
    BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr, IS_WINDOWED: tl.constexpr,
):  # fmt: skip
    """First and one past the last of a page's keys that some query of a tile may see."""
    first = length * 0
    if IS_WINDOWED:
        first = tl.maximum(tl.min(position, 0) - window + 1 - start, 0) // BLOCK_N * BLOCK_N
    if IS_CAUSAL:
        length = tl.minimum(length, tl.max(position, 0) - start + 1)
    return first, length


@triton.jit(do_not_specialize=VARYING)
def _page_attention_fwd_kernel(
    q_ptr, out_ptr, lse_ptr, table_ptr,
    num_pages, num_rows, num_queries, num_kv_heads, q_start, q_len, window, scale, softcap,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_MAIN: tl.constexpr, DV_REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, IS_WINDOWED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile of rows over all pages."""
    batch, kv_head = tl.program_id(1) // num_kv_heads, tl.program_id(1) % num_kv_heads
    first_row = tl.program_id(1).to(tl.int64) * num_rows
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    position = q_start + rows % num_queries % q_len
    q, q_rest = _load(q_ptr + first_row * D, D, rows, num_rows, D, D_MAIN, D_REST)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_MAIN], tl.float32)
    if DV_REST > 0:
        acc_rest = tl.zeros([BLOCK_M, DV_REST], tl.float32)
    else:
        acc_rest = acc

    for page in range(num_pages):
        entry = table_ptr + page * COLUMNS
        start, length = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
        k_ptr, k_stride = _operand(entry, K_COLUMN, batch, kv_head, q_ptr, ALIGNED)
        v_ptr, v_stride = _operand(entry, V_COLUMN, batch, kv_head, q_ptr, ALIGNED)
        first, end = _key_range(
            position, start, length, window, BLOCK_N, IS_CAUSAL, IS_WINDOWED
        )  # fmt: skip
        for block in range(first, end, BLOCK_N):
            keys = block + tl.arange(0, BLOCK_N)
            k, k_rest = _load(k_ptr, k_stride, keys, length, D, D_MAIN, D_REST)
            distance = position[:, None] - (start + keys)[None, :]
            visible = _visible(
                distance, (keys < length)[None, :], window, IS_CAUSAL, IS_WINDOWED
            )  # fmt: skip
            products = _products(q, q_rest, k, k_rest, D_REST, UPCAST)
            scores = _scores(products, visible, scale, softcap, HAS_SOFTCAP)
            new = tl.maximum(highest, tl.max(scores, 1))
            pivot = tl.where(new == -float("inf"), 0.0, new)  # a row without keys: no inf - inf
            decay = tl.exp2(highest - pivot)
            p = tl.exp2(scores - pivot[:, None])
            total = total * decay + tl.sum(p, 1)
            v, v_rest = _load(v_ptr, v_stride, keys, length, DV, DV_MAIN, DV_REST)
            acc = acc * decay[:, None] + _dot(p, v, UPCAST)
            if DV_REST > 0:
                acc_rest = acc_rest * decay[:, None] + _dot(p, v_rest, UPCAST)
            highest = new

    divisor = tl.where(total == 0, 1.0, total)
    out, out_rest = acc / divisor[:, None], acc_rest / divisor[:, None]
    _store(
        out_ptr + first_row * DV, DV, rows, num_rows, out, out_rest, DV, DV_MAIN, DV_REST, False
    )  # fmt: skip
    lse = (highest + tl.log2(divisor)) * LN_2
    tl.store(lse_ptr + first_row + rows, lse, mask=rows < num_rows)


@triton.jit(do_not_specialize=VARYING)
def _page_attention_bwd_dq_kernel(
    q_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, table_ptr,
    num_pages, num_rows, num_queries, num_kv_heads, q_start, q_len, window, scale, softcap,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_MAIN: tl.constexpr, DV_REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, IS_WINDOWED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of rows, over all pages."""
    batch, kv_head = tl.program_id(1) // num_kv_heads, tl.program_id(1) % num_kv_heads
    first_row = tl.program_id(1).to(tl.int64) * num_rows
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    position = q_start + rows % num_queries % q_len
    q, q_rest = _load(q_ptr + first_row * D, D, rows, num_rows, D, D_MAIN, D_REST)
    grad, grad_rest = _load(
        grad_ptr + first_row * DV, DV, rows, num_rows, DV, DV_MAIN, DV_REST
    )  # fmt: skip
    lse = tl.load(lse_ptr + first_row + rows, mask=rows < num_rows, other=float("inf"))
    delta = tl.load(delta_ptr + first_row + rows, mask=rows < num_rows, other=0.0)
    acc = tl.zeros([BLOCK_M, D_MAIN], tl.float32)
    if D_REST > 0:
        acc_rest = tl.zeros([BLOCK_M, D_REST], tl.float32)
    else:
        acc_rest = acc

    for page in range(num_pages):
        entry = table_ptr + page * COLUMNS
        start, length = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
        k_ptr, k_stride = _operand(entry, K_COLUMN, batch, kv_head, q_ptr, ALIGNED)
        v_ptr, v_stride = _operand(entry, V_COLUMN, batch, kv_head, q_ptr, ALIGNED)
        first, end = _key_range(
            position, start, length, window, BLOCK_N, IS_CAUSAL, IS_WINDOWED
        )  # fmt: skip
        for block in range(first, end, BLOCK_N):
            keys = block + tl.arange(0, BLOCK_N)
            k, k_rest = _load(k_ptr, k_stride, keys, length, D, D_MAIN, D_REST)
            v, v_rest = _load(v_ptr, v_stride, keys, length, DV, DV_MAIN, DV_REST)
            distance = position[:, None] - (start + keys)[None, :]
            visible = _visible(
                distance, (keys < length)[None, :], window, IS_CAUSAL, IS_WINDOWED
            )  # fmt: skip
            products = _products(q, q_rest, k, k_rest, D_REST, UPCAST)
            scores = _scores(products, visible, scale, softcap, HAS_SOFTCAP)
            products = _products(grad, grad_rest, v, v_rest, DV_REST, UPCAST)
            p, ds = _score_gradients(
                scores, lse[:, None], products, delta[:, None], visible, softcap, HAS_SOFTCAP
            )  # fmt: skip
            acc += _dot(ds, k, UPCAST)
            if D_REST > 0:
                acc_rest += _dot(ds, k_rest, UPCAST)

    _store(
        dq_ptr + first_row * D, D, rows, num_rows, acc * scale, acc_rest * scale,
        D, D_MAIN, D_REST, False,
    )  # fmt: skip


@triton.jit
def _row_range(
    keys, q_start, num_queries, window,
    IS_CAUSAL: tl.constexpr, IS_WINDOWED: tl.constexpr, IS_ONE_SEQUENCE: tl.constexpr,
):  # fmt: skip
    """First and one past the last of a head's queries that may see some key of a tile."""
    first = num_queries * 0
    if IS_ONE_SEQUENCE:  # positions of several side by side begin again
        if IS_CAUSAL:
            first = tl.maximum(tl.min(keys, 0) - q_start, 0)
        if IS_WINDOWED:
            num_queries = tl.minimum(num_queries, tl.max(keys, 0) + window - q_start)
    return first, num_queries


@triton.jit(do_not_specialize=VARYING)
def _page_attention_bwd_dkv_kernel(
    q_ptr, grad_ptr, lse_ptr, delta_ptr, table_ptr, tiles_ptr,
    num_spans, num_queries, num_kv_heads, q_start, q_len, window, scale, softcap,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_MAIN: tl.constexpr, DV_REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, IS_WINDOWED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    IS_ONE_SEQUENCE: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of one page's keys, which no other program adds to.

    `tiles` holds page and first key. Rows are `num_spans` times `num_queries`: a span is a head's
    queries if there is a mask, so that those which see no key of the tile are left out, else all
    rows. Scores stand on their side, `[BLOCK_N, BLOCK_M]`.
    """
    batch, kv_head = tl.program_id(1) // num_kv_heads, tl.program_id(1) % num_kv_heads
    first_row = tl.program_id(1).to(tl.int64) * num_spans * num_queries
    entry = table_ptr + tl.load(tiles_ptr + 2 * tl.program_id(0)) * COLUMNS
    start, length = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
    keys = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1).to(tl.int32) + tl.arange(0, BLOCK_N)
    k_ptr, k_stride = _operand(entry, K_COLUMN, batch, kv_head, q_ptr, ALIGNED)
    v_ptr, v_stride = _operand(entry, V_COLUMN, batch, kv_head, q_ptr, ALIGNED)
    k, k_rest = _load(k_ptr, k_stride, keys, length, D, D_MAIN, D_REST)
    v, v_rest = _load(v_ptr, v_stride, keys, length, DV, DV_MAIN, DV_REST)
    dk, dv = tl.zeros([BLOCK_N, D_MAIN], tl.float32), tl.zeros([BLOCK_N, DV_MAIN], tl.float32)
    dk_rest, dv_rest = dk, dv
    if D_REST > 0:
        dk_rest = tl.zeros([BLOCK_N, D_REST], tl.float32)
    if DV_REST > 0:
        dv_rest = tl.zeros([BLOCK_N, DV_REST], tl.float32)

    first, end = _row_range(
        start + keys, q_start, num_queries, window, IS_CAUSAL, IS_WINDOWED, IS_ONE_SEQUENCE
    )  # fmt: skip
    for span in range(num_spans):
        base = first_row + span * num_queries
        for block in range(first, end, BLOCK_M):
            rows = block + tl.arange(0, BLOCK_M)
            q, q_rest = _load(q_ptr + base * D, D, rows, num_queries, D, D_MAIN, D_REST)
            grad, grad_rest = _load(
                grad_ptr + base * DV, DV, rows, num_queries, DV, DV_MAIN, DV_REST
            )  # fmt: skip
            is_row = rows < num_queries
            lse = tl.load(lse_ptr + base + rows, mask=is_row, other=float("inf"))
            delta = tl.load(delta_ptr + base + rows, mask=is_row, other=0.0)
            distance = (q_start + rows % q_len)[None, :] - (start + keys)[:, None]
            visible = _visible(
                distance, (keys < length)[:, None], window, IS_CAUSAL, IS_WINDOWED
            )  # fmt: skip
            products = _products(k, k_rest, q, q_rest, D_REST, UPCAST)
            scores = _scores(products, visible, scale, softcap, HAS_SOFTCAP)
            products = _products(v, v_rest, grad, grad_rest, DV_REST, UPCAST)
            p, ds = _score_gradients(
                scores, lse[None, :], products, delta[None, :], visible, softcap, HAS_SOFTCAP
            )  # fmt: skip
            dv += _dot(p, grad, UPCAST)
            dk += _dot(ds, q, UPCAST)
            if DV_REST > 0:
                dv_rest += _dot(p, grad_rest, UPCAST)
            if D_REST > 0:
                dk_rest += _dot(ds, q_rest, UPCAST)

    dk_ptr, dk_stride = _operand(entry, DK_COLUMN, batch, kv_head, lse_ptr, ALIGNED)
    dv_ptr, dv_stride = _operand(entry, DV_COLUMN, batch, kv_head, lse_ptr, ALIGNED)
    _store(
        dk_ptr, dk_stride, keys, length, dk * scale, dk_rest * scale, D, D_MAIN, D_REST, True
    )  # fmt: skip
    _store(dv_ptr, dv_stride, keys, length, dv, dv_rest, DV, DV_MAIN, DV_REST, True)
