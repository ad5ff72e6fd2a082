"""Merging attention results over disjoint sets of keys; see `merge_lse_`.

Knows two partial results and nothing of pages, ranks or models.
"""

from torch import Tensor

from ..availability import choose
from ..launch import is_innermost_contiguous
from . import reference
from .reference import add_sink

IMPLEMENTATIONS = ("auto", "reference", "triton")

__all__ = ["IMPLEMENTATIONS", "add_sink", "merge_lse_"]


def merge_lse_(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, *, impl: str = "auto"
) -> None:
    """Merge an attention result over other keys into `out` and `lse`, in place.

        softmax over A and B:   lse = logaddexp(lse_A, lse_B)
                                out = exp(lse_A - lse) * out_A + exp(lse_B - lse) * out_B

    Either part may cover no key for some row (lse = -inf, out = 0); that row is then the other
    part's, and both empty gives zeros. Not meant for autograd: attention over pages has a backward
    of its own that needs only the merged `out` and `lse`.

    Args:
        out, lse: `[..., T, D]` and `[..., T]`, the first part, both fp32 or both fp64. Written to;
            views of larger tensors are fine, and no element may stand twice in one.
        part_out, part_lse: the second part, same shapes; `part_out` may be in half precision.
        impl: one of `IMPLEMENTATIONS`. "triton" reads and writes each number once; it takes up to
            four dims and an `out` whose last stride is 1, and "auto" the reference for others.

    Raises:
        ValueError: parts that do not fit together, or a requested implementation that cannot run.

    Source:
        Online softmax: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867.
    """
    if (
        out.shape != part_out.shape
        or lse.shape != part_lse.shape
        or lse.shape != out.shape[:-1]
        or lse.dtype != out.dtype
    ):
        raise ValueError(
            f"out {tuple(out.shape)} of {out.dtype}, lse {tuple(lse.shape)} of {lse.dtype}, "
            f"part_out {tuple(part_out.shape)} and part_lse {tuple(part_lse.shape)} do not fit "
            "together; needed are [..., T, D] and [..., T] of the same dtype, twice."
        )
    # Called for each page of each layer on a CPU: what "auto" takes there is known without asking.
    if impl == "auto" and not out.is_cuda:
        reference.merge_lse_(out, lse, part_out, part_lse)
    elif _choose(impl, out, lse, part_out, part_lse) == "triton":
        from . import triton

        triton.merge_lse_(out, lse, part_out, part_lse)
    else:
        reference.merge_lse_(out, lse, part_out, part_lse)


def _choose(impl: str, out: Tensor, *others: Tensor) -> str:
    if choose(impl, IMPLEMENTATIONS, out, *others) == "reference":
        return "reference"
    reason = _why_not_triton(out, *others)
    if reason is not None and impl != "auto":
        raise ValueError(
            f"impl='triton' cannot merge these: {reason}. Use impl='auto' (takes it where it can) "
            "or impl='reference'."
        )
    return "triton" if reason is None else "reference"


def _why_not_triton(out: Tensor, *others: Tensor) -> str | None:
    """What of the layout its kernel does not take; None if it takes all."""
    if out.dim() > 4:
        return f"out has {out.dim()} dims, more than 4"
    if not is_innermost_contiguous(out):
        return f"out is written in place and has strides {out.stride()}, the last not 1"
    if any(x.device != out.device for x in others):
        return f"they are on {', '.join(str(x.device) for x in (out, *others))}"
    return None
