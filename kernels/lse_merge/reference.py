"""The definition of the log-sum-exp merge, in plain torch.

Knows two partial results and nothing of pages, ranks or models.
"""

import torch
from torch import Tensor


def merge_lse(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine two attention results over disjoint sets of keys.

        softmax over A and B:   lse = logaddexp(lse_A, lse_B)
                                out = exp(lse_A - lse) * out_A + exp(lse_B - lse) * out_B

    Either part may cover no key for some row (lse = -inf); that row is then the other part's,
    and both empty gives zeros. Not meant for autograd: attention over pages has a backward of its
    own that needs only the merged `out` and `lse`.

    Args:
        out, lse: `[..., T, D]` and `[..., T]`, the first part, fp32 or fp64.
        part_out, part_lse: the second part, same shapes and dtype.

    Returns:
        The merged `out` and `lse`.

    Source:
        Online softmax: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867.
    """
    merged = torch.logaddexp(lse, part_lse)
    # exp(-inf - -inf) is NaN; an empty row has nothing to weigh, so any finite pivot gives zeros.
    pivot = merged.masked_fill(merged == -torch.inf, 0.0)
    weight, part_weight = torch.exp(lse - pivot), torch.exp(part_lse - pivot)
    return out * weight.unsqueeze(-1) + part_out * part_weight.unsqueeze(-1), merged


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
