"""Merging two attention results in place: every implementation against fp64 truth."""

import itertools

import pytest
import torch
from torch import Tensor

from longstraw_kernels.availability import is_triton_installed
from longstraw_kernels.lse_merge import merge_lse_

needs_triton = pytest.mark.skipif(not is_triton_installed(), reason="Triton is not installed")
IMPLEMENTATIONS = ["reference", pytest.param("triton", marks=needs_triton)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A row of one tile and a part of the next; columns that are a power of two, padded, in two blocks.
SHAPES = [(1, 2, 9, 64), (2, 3, 5, 40), (1, 1, 3, 576), (3, 17, 16), (4, 8), (1, 1, 1, 1)]


def operands(shape: tuple[int, ...], part_dtype: torch.dtype) -> list[Tensor]:
    """`out, lse, part_out, part_lse`, with log-sum-exps that are close, far apart and infinite."""
    generator = torch.Generator().manual_seed(sum(shape))
    out, part_out = (torch.randn(shape, generator=generator) for _ in range(2))
    lse, part_lse = (5 * torch.randn(shape[:-1], generator=generator) for _ in range(2))
    if lse.numel() > 3:  # one part empty, the other, both; and one that is nothing beside the other
        flat, part = lse.view(-1), part_lse.view(-1)
        flat[0], part[1], flat[2], part[2] = (-torch.inf,) * 4
        flat[3] = part[3] + 80
    out[lse == -torch.inf], part_out[part_lse == -torch.inf] = 0, 0  # as attention gives them
    return [x.to(DEVICE) for x in (out, lse, part_out.to(part_dtype), part_lse)]


def merged(operands: list[Tensor], impl: str) -> tuple[Tensor, Tensor]:
    out, lse, part_out, part_lse = (x.clone() for x in operands)
    merge_lse_(out, lse, part_out, part_lse, impl=impl)
    return out, lse


def truth(operands: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The formula in fp64; nothing where both are empty."""
    out, lse, part_out, part_lse = (x.double() for x in operands)
    total = torch.logaddexp(lse, part_lse)
    weights = [(x - total).nan_to_num(nan=-torch.inf).exp()[..., None] for x in (lse, part_lse)]
    return weights[0] * out + weights[1] * part_out, total


@pytest.mark.parametrize("part_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_merge_is_the_softmax_over_both(impl, shape, part_dtype) -> None:
    """To four roundings of fp32: one weight, two products and their sum.

    The definition takes the exponential of differences to the merged log-sum-exp, whose rounding is
    of its own size.
    """
    given = operands(shape, part_dtype)
    eps = torch.finfo(torch.float32).eps
    if impl == "reference":
        eps *= 1 + max(float(x[x.isfinite()].abs().max()) for x in (given[1], given[3]))
    for ours, exact in zip(merged(given, impl), truth(given), strict=True):
        finite = exact.isfinite()
        assert torch.equal(ours.isfinite(), finite) and not ours.isnan().any()
        scale = max(float(exact[finite].abs().max()), 1.0) if finite.any() else 1.0
        assert (ours.double() - exact)[finite].abs().max() <= 4 * eps * scale


@needs_triton
@pytest.mark.parametrize("exponent", [-1, -4, -10, -16])
def test_the_log_of_a_small_share_keeps_its_digits(exponent: int) -> None:
    """A chunk's keys against a long history: `log(1 + x)` of a small x, to two roundings of it.

    `lse` itself is zero, where the result is the logarithm alone.
    """
    lse = torch.zeros(4, device=DEVICE)
    part_lse = torch.full_like(lse, exponent)
    out = torch.zeros(4, 16, device=DEVICE)
    merge_lse_(out, lse, out.clone(), part_lse, impl="triton")
    exact = torch.log1p(part_lse.double().exp())
    assert ((lse.double() - exact) / exact).abs().max() <= 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_views_of_larger_tensors_are_written_where_they_lie(impl: str) -> None:
    """Some rows of all, heads and tokens transposed; what lies beside them stays, NaN."""
    given = operands((2, 3, 5, 24), torch.float32)
    expected = merged(given, impl)
    out = torch.full((2, 9, 3, 32), torch.nan, device=DEVICE)
    lse = torch.full((2, 3, 9), torch.nan, device=DEVICE)
    out_view, lse_view = out.transpose(1, 2)[:, :, 2:7, 8:], lse[:, :, 2:7]
    out_view.copy_(given[0])
    lse_view.copy_(given[1])
    part = given[2].transpose(1, 2).contiguous().transpose(1, 2)
    part_lse = given[3].transpose(0, 2).contiguous().transpose(0, 2)
    merge_lse_(out_view, lse_view, part, part_lse, impl=impl)
    assert torch.equal(out_view, expected[0]) and torch.equal(lse_view, expected[1])
    assert int(out.isnan().sum()) == out.numel() - out_view.numel()
    assert int(lse.isnan().sum()) == lse.numel() - lse_view.numel()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_row_without_keys_is_zero_and_merges_away(impl: str) -> None:
    """Both parts empty, one empty, and the other: no NaN, and the non-empty part unchanged."""
    out, lse = torch.randn(1, 2, 3, 4, device=DEVICE), torch.randn(1, 2, 3, device=DEVICE)
    nothing, empty = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for a, b in itertools.permutations([(out, lse), (nothing, empty)]):
        found = merged([*a, *b], impl)
        assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    both = merged([nothing, empty, nothing, empty], impl)
    assert torch.equal(both[0], nothing) and torch.equal(both[1], empty)


@needs_triton
def test_a_requested_kernel_runs_or_raises() -> None:
    """And "auto" is the definition where the kernel cannot be."""
    out, lse = torch.randn(2, 3, 4, device=DEVICE), torch.randn(2, 3, device=DEVICE)
    column = torch.randn(2, 4, 3, device=DEVICE).transpose(1, 2)
    deep = [x[None, None, None].clone() for x in (out, lse, out, lse)]
    for given, word in [
        ([column, lse, out, lse.clone()], "the last not 1"),
        ([out.double(), lse.double(), out.double(), lse.double()], "float64"),
        (deep, "more than 4"),
    ]:
        with pytest.raises(ValueError, match=word):
            merge_lse_(*given, impl="triton")
        merge_lse_(*(x.clone() for x in given), impl="auto")


def test_parts_that_do_not_fit_are_refused() -> None:
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    for given in [
        (out, lse, out[:1], lse),
        (out, lse, out, lse[:1]),
        (out, lse.double(), out, lse),
        (out, lse[:, :2], out, lse[:, :2]),
    ]:
        with pytest.raises(ValueError, match="do not fit"):
            merge_lse_(*given)
