"""Attention over selected rows and its gradients, against one masked softmax by autograd."""

import pytest
import torch
from torch import Tensor

from longstraw_kernels.availability import is_triton_installed
from longstraw_kernels.selected_attention import (
    reference,
    selected_attention,
    selected_attention_backward,
)

SCALE, VALUE_DIM = 0.4, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not is_triton_installed(), reason="Triton is not installed")
IMPLEMENTATIONS = ["reference", pytest.param("triton", marks=needs_triton)]
# (queries, heads, rows, selected, width); one row, one query, a row that all select.
SHAPES = [(7, 3, 20, 6, 8), (1, 1, 1, 1, 5), (4, 2, 3, 5, 6), (9, 4, 50, 1, 16)]


def operands(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, rows, index and a gradient of the output."""
    queries, heads, num_rows, selected, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    q, rows, grad = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for size in ((queries, heads, width), (num_rows, width), (queries, heads, VALUE_DIM))
    )
    index = torch.stack(
        [torch.randperm(num_rows, generator=generator)[:selected] for _ in range(queries)]
    )
    missing = selected - index.shape[1]
    index = torch.nn.functional.pad(index, (0, missing), value=-1)
    if selected > 2:
        index[0, 1] = -1  # a query with fewer than others, and not at the end
    return [q, rows, index.to(torch.int32), grad]


def definition(q: Tensor, rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """All rows, with those that are not selected masked."""
    chosen = torch.zeros(q.shape[0], rows.shape[0], dtype=torch.bool)
    for query, places in enumerate(index.tolist()):
        chosen[query, [place for place in places if place >= 0]] = True
    scores = torch.einsum("nhd,md->nhm", q, rows) * SCALE
    scores = scores.masked_fill(~chosen[:, None], -torch.inf)
    out = torch.softmax(scores, -1) @ rows[:, :VALUE_DIM]
    return out, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("tile", [1, 2**22], ids=["one query at a time", "all at once"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients_are_those_of_the_masked_softmax(
    shape: tuple[int, ...], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "TILE", tile)
    q, rows, index, grad = operands(shape)
    q, rows = q.requires_grad_(), rows.requires_grad_()
    expected, lse = definition(q, rows, index)
    out, found_lse = selected_attention(q.detach(), rows.detach(), index, SCALE, VALUE_DIM)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(found_lse, lse, rtol=0, atol=1e-13)
    gradients = torch.autograd.grad(expected, (q, rows), grad)
    found = selected_attention_backward(
        grad, q.detach(), rows.detach(), index, out, found_lse, SCALE
    )
    for ours, truth in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)


def test_two_halves_of_a_selection_merge_to_the_whole() -> None:
    """As two ranks have them: each half differentiates with the merged output and lse."""
    q, rows, index, grad = operands((6, 3, 30, 8, 9))
    whole, lse = selected_attention(q, rows, index, SCALE, VALUE_DIM)
    parts = [index.masked_fill(index % 2 != half, -1) for half in (0, 1)]
    found = [selected_attention(q, rows, part, SCALE, VALUE_DIM) for part in parts]
    weights = [torch.exp(part_lse - lse).unsqueeze(-1) for _, part_lse in found]
    merged = sum(w * out for w, (out, _) in zip(weights, found, strict=True))
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-13)
    truth = selected_attention_backward(grad, q, rows, index, whole, lse, SCALE)
    halves = [selected_attention_backward(grad, q, rows, part, whole, lse, SCALE) for part in parts]
    for total, *both in zip(truth, *halves, strict=True):
        torch.testing.assert_close(sum(both), total, rtol=0, atol=1e-12)


def test_a_query_without_rows_gives_nothing() -> None:
    """Of a selection another rank may own every row."""
    q, rows, index, grad = operands((3, 2, 4, 2, 6))
    none = torch.full_like(index, -1)
    out, lse = selected_attention(q, rows, none, SCALE, VALUE_DIM)
    assert torch.equal(out, torch.zeros_like(out)) and bool(torch.isinf(lse).all())
    for gradient in selected_attention_backward(grad, q, rows, none, out, lse, SCALE):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_gradients_have_the_same_bits_each_time_on_several_threads() -> None:
    """Many queries select the same rows, whose gradients are sums of many terms."""
    generator = torch.Generator().manual_seed(0)
    q, rows, grad = (
        torch.randn(size, generator=generator)
        for size in ((2048, 2, 64), (128, 64), (2048, 2, VALUE_DIM))
    )
    index = torch.randint(0, 128, (2048, 16), generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        out, lse = selected_attention(q, rows, index, SCALE, VALUE_DIM)
        found = [
            selected_attention_backward(grad, q, rows, index, out, lse, SCALE)[1] for _ in range(5)
        ]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_half_precision_is_summed_in_fp32() -> None:
    """The error is that of rounding the operands: the same operands in fp64 give the same."""
    q, rows, index, grad = operands((7, 3, 20, 6, 8), torch.bfloat16)
    exact = [x.double() for x in (q, rows)]
    out, lse = selected_attention(q, rows, index, SCALE, VALUE_DIM)
    truth, _ = selected_attention(*exact, index, SCALE, VALUE_DIM)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=1e-6)
    dq, drows = selected_attention_backward(grad, q, rows, index, out, lse, SCALE)
    assert dq.dtype == drows.dtype == torch.float32


# (queries, heads, width, width of values, selected, rows); tiles are 16 x 16 in the interpreter.
KERNEL_SHAPES = {
    "one of everything": (1, 1, 1, 1, 1, 1),
    "padded": (5, 3, 24, 16, 7, 30),
    "two parts, two tiles of heads and of rows": (5, 17, 40, 32, 19, 30),
    "a key is its value, in two parts": (3, 2, 40, 40, 16, 9),
    "values narrower than a part": (4, 5, 40, 10, 18, 4),
    "values up to within a rest": (4, 2, 24, 20, 33, 50),
}
every_kernel_shape = pytest.mark.parametrize(
    "shape", KERNEL_SHAPES.values(), ids=KERNEL_SHAPES.keys()
)


def selection(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """grad_out, q, rows and an index: rows that many queries select, one that a query selects
    twice, places of no row between those of rows, and a query without any."""
    queries, heads, width, value_dim, selected, num_rows = shape
    generator = torch.Generator().manual_seed(5)
    grad, q, rows = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)
        for size in ((queries, heads, value_dim), (queries, heads, width), (num_rows, width))
    )
    index = torch.randint(-num_rows // 4, num_rows, (queries, selected), generator=generator)
    index[0, : selected // 2], index[-1, -1] = 0, num_rows - 1
    if queries > 2:
        index[2] = -1
    return [grad, q, rows, index.to(DEVICE)]


def computed(impl: str, grad: Tensor, q: Tensor, rows: Tensor, index: Tensor) -> dict[str, Tensor]:
    """The backward is given the output as its reader has it, in q's dtype."""
    out, lse = selected_attention(q, rows, index, SCALE, grad.shape[-1], impl=impl)
    given = out.to(q.dtype), lse, SCALE
    dq, drows = selected_attention_backward(grad, q, rows, index, *given, impl=impl)
    return {"out": out, "lse": lse, "dq": dq, "drows": drows}


def truth_of(grad: Tensor, q: Tensor, rows: Tensor, index: Tensor) -> dict[str, Tensor]:
    """The definition in fp64; that is checked above."""
    return computed("reference", grad.double(), q.double(), rows.double(), index)


def check(found: dict, plain: dict, truth: dict, dtype: torch.dtype) -> None:
    """error <= 2 * (error of the definition in the same dtype + one rounding of the largest).

    In half precision probabilities are rounded, for tensor cores, but not the scores of an lse.
    """
    for name, exact in truth.items():
        assert found[name].dtype == torch.float32 and found[name].shape == exact.shape, name
        assert torch.equal(found[name].isinf(), exact.isinf()), name
        exact, ours, theirs = (
            x.double().masked_fill(truth[name].isinf(), 0.0)
            for x in (exact, found[name], plain[name])
        )
        rounding = torch.finfo(torch.float32 if name == "lse" else dtype).eps * exact.abs().max()
        budget = 2 * ((theirs - exact).abs().max() + rounding)
        assert (ours - exact).abs().max() <= budget, name


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_kernel_shape
def test_error_is_that_of_the_definition_in_the_same_dtype(shape, dtype: torch.dtype) -> None:
    given = selection(shape, dtype)
    plain = computed("reference", *given)
    check(computed("triton", *given), plain, truth_of(*given), dtype)


@needs_triton
@pytest.mark.parametrize("at_a_time", [1, 2])
def test_gradients_of_rows_do_not_depend_on_queries_at_a_time(at_a_time: int, monkeypatch) -> None:
    """Sums in another order, which is all that may differ."""
    from longstraw_kernels.selected_attention import triton

    shape = KERNEL_SHAPES["padded"]
    given = selection(shape, torch.float32)
    monkeypatch.setattr(triton, "PARTS_BYTES", at_a_time * 4 * shape[4] * shape[2])
    plain = computed("reference", *given)
    check(computed("triton", *given), plain, truth_of(*given), torch.float32)


@needs_triton
def test_every_output_is_written_and_equal_inputs_give_equal_bits(monkeypatch) -> None:
    """Whatever stood where parts are written: those of no row are never added."""
    given = selection(KERNEL_SHAPES["two parts, two tiles of heads and of rows"], torch.float32)
    first = computed("triton", *given)
    plain_new_empty = Tensor.new_empty

    def poisoned(self, *args, **options):
        made = plain_new_empty(self, *args, **options)
        return made.fill_(torch.nan if made.is_floating_point() else 2**30)

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    again = computed("triton", *given)
    for name, x in first.items():
        assert torch.equal(again[name], x) and not x.isnan().any(), name


@needs_triton
def test_operands_are_read_in_any_layout() -> None:
    grad, q, rows, index = selection(KERNEL_SHAPES["padded"], torch.float32)
    plain = computed("triton", grad, q, rows, index)

    def scattered(x: Tensor) -> Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    lying = [scattered(x) for x in (grad, q, rows)]
    assert not any(x.is_contiguous() for x in lying)
    for of_index in (index.int(), scattered(index), index.masked_fill(index < 0, -(2**40))):
        found = computed("triton", *lying, of_index)
        for name, x in plain.items():
            assert torch.equal(found[name], x), name


@needs_triton
def test_rows_are_packed_in_their_order() -> None:
    from longstraw_kernels.selected_attention.triton import packed

    index = torch.tensor([[-1, 4, -2, 0, 4], [3, 1, 2, 0, 5], [-1] * 5, [-1, -1, -1, -1, 7]])
    found, counts = packed(index.to(DEVICE))
    assert counts.tolist() == [3, 5, 0, 1] and found.dtype == counts.dtype == torch.int32
    assert found.tolist() == [
        [4, 0, 4, -1, -1], [3, 1, 2, 0, 5], [-1] * 5, [7, -1, -1, -1, -1],
    ]  # fmt: skip


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_query_without_places_gives_nothing(impl: str) -> None:
    grad, q, rows, index = selection(KERNEL_SHAPES["padded"], torch.float32)
    found = computed(impl, grad, q, rows, index[:, :0])
    assert bool((found.pop("lse") == -torch.inf).all())
    assert not any(x.any() for x in found.values())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_parts_of_a_selection_merge_to_the_whole(impl: str) -> None:
    """As ranks have them: the backward of a part takes the merged output and lse."""
    grad, q, rows, index = given = selection(KERNEL_SHAPES["padded"], torch.float32)
    whole = computed(impl, *given)
    merged, parts = (whole["out"], whole["lse"], SCALE), []
    for rank in range(3):
        own = index.masked_fill(index % 3 != rank, -1)
        parts.append(selected_attention_backward(grad, q, rows, own, *merged, impl=impl))
    dq, drows = (sum(part[i] for part in parts) for i in (0, 1))
    check(whole | {"dq": dq, "drows": drows}, whole, truth_of(*given), torch.float32)


@pytest.mark.gpu
def test_at_the_size_of_a_model_on_a_gpu() -> None:
    """bf16, several tiles of queries whose parts do not fit at once, without waiting."""
    given = selection((500, 64, 576, 512, 2048, 8192), torch.bfloat16)
    computed("auto", *given)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = computed("auto", *given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(found, computed("reference", *given), truth_of(*given), torch.bfloat16)
    again = computed("auto", *given)
    assert all(torch.equal(found[name], x) for name, x in again.items())


def test_implementations_that_cannot_run_are_refused() -> None:
    for impl, message in (("flash", "choose one of auto, reference, triton"),
                          ("triton", "impl='triton' cannot run here")):  # fmt: skip
        grad, q, rows, index = given = selection(KERNEL_SHAPES["padded"], torch.float64)
        with pytest.raises(ValueError, match=message):
            selected_attention(q, rows, index, SCALE, 16, impl=impl)
        merged = selected_attention(q, rows, index, SCALE, 16)
        with pytest.raises(ValueError, match=message):
            selected_attention_backward(*given, *merged, SCALE, impl=impl)


def test_what_the_backward_is_given_has_to_fit() -> None:
    grad, q, rows, index = given = selection(KERNEL_SHAPES["padded"], torch.float32)
    out, lse = selected_attention(q, rows, index, SCALE, 16)
    with pytest.raises(ValueError, match="grad_out"):
        selected_attention_backward(grad[..., :9], *given[1:], out, lse, SCALE)
    with pytest.raises(ValueError, match=r"lse \(4, 3\)"):
        selected_attention_backward(*given, out, lse[1:], SCALE)
    with pytest.raises(ValueError, match="convert one of them"):
        selected_attention(q, rows.half(), index, SCALE, 16)


@pytest.mark.parametrize("wrong", ["queries", "width", "no rows", "dtype", "value_dim"])
def test_operands_that_do_not_fit_are_refused(wrong: str) -> None:
    q, rows, index, _ = operands((7, 3, 20, 6, 8))
    q = q[:3] if wrong == "queries" else q
    rows = {"width": rows[:, :4], "no rows": rows[:0]}.get(wrong, rows)
    index = index.float() if wrong == "dtype" else index
    with pytest.raises(ValueError, match="do not fit together"):
        selected_attention(q, rows, index, SCALE, 99 if wrong == "value_dim" else VALUE_DIM)
