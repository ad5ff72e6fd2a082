"""Attention over selected rows and its gradients, against one masked softmax by autograd."""

import pytest
import torch
from torch import Tensor

from longstraw_kernels.selected_attention import (
    reference,
    selected_attention,
    selected_attention_backward,
)

SCALE, VALUE_DIM = 0.4, 5
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


@pytest.mark.parametrize("wrong", ["queries", "width", "no rows", "dtype", "value_dim"])
def test_operands_that_do_not_fit_are_refused(wrong: str) -> None:
    q, rows, index, _ = operands((7, 3, 20, 6, 8))
    q = q[:3] if wrong == "queries" else q
    rows = {"width": rows[:, :4], "no rows": rows[:0]}.get(wrong, rows)
    index = index.float() if wrong == "dtype" else index
    with pytest.raises(ValueError, match="do not fit together"):
        selected_attention(q, rows, index, SCALE, 99 if wrong == "value_dim" else VALUE_DIM)
