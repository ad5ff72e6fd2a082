"""The log-sum-exp merge, in plain torch."""

import torch
from torch import Tensor


def merge_lse_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """See `longstraw_kernels.lse_merge.merge_lse_`.

    The two weights add up to 1, so `out` is one `lerp_`; three products and sums in new tensors of
    a chunk's size cost as much as a quarter of the attention itself.
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
