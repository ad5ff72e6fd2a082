"""The log-sum-exp merge, in plain torch.

Knows two partial results and nothing of pages, ranks or models.
"""

import torch
from torch import Tensor


def merge_lse_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge an attention result over other keys into `out` and `lse`, in place.

        softmax over A and B:   lse = logaddexp(lse_A, lse_B)
                                out = exp(lse_A - lse) * out_A + exp(lse_B - lse) * out_B

    The two weights add up to 1, so `out` is one `lerp_`; three products and sums in new tensors of
    a chunk's size cost as much as a quarter of the attention itself.

    Either part may cover no key for some row (lse = -inf); that row is then the other part's,
    and both empty gives zeros. Not meant for autograd: attention over pages has a backward of its
    own that needs only the merged `out` and `lse`.

    Args:
        out, lse: `[..., T, D]` and `[..., T]`, the first part, fp32 or fp64. Written to.
        part_out, part_lse: the second part, same shapes; `part_out` may be in half precision.

    Source:
        Online softmax: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867.
    """
    merged = torch.logaddexp(lse, part_lse)
    # exp(-inf - -inf) is NaN; an empty row has nothing to weigh, so any finite pivot gives zeros.
    part_weight = torch.exp(part_lse - merged.masked_fill(merged == -torch.inf, 0.0))
    out.lerp_(part_out.to(out.dtype), part_weight.unsqueeze(-1))
    lse.copy_(merged)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add one learned logit per head that takes probability and gives no value.

        lse' = logaddexp(lse, sink)        out' = exp(lse - lse') * out

    Args:
        out, lse: `[B, H, T, D]` and `[B, H, T]`.
        sink: `[H]`, the logits (gpt-oss's `sinks`).

    Returns:
        `out'` and `lse'`.
    """
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype).view(1, -1, 1).expand_as(lse))
    return out * torch.exp(lse - with_sink).unsqueeze(-1), with_sink
