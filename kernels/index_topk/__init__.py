"""Scores of the indexer of DeepSeek Sparse Attention, and the tokens with the highest ones.

Which tokens are selected is a function of scores and positions alone: of equal scores the earlier
token goes first, or the later one, as asked. So the selection does not depend on how keys are cut
into blocks, nor on which rank has which of them.
"""

import torch
from torch import Tensor

from ..availability import choose
from . import reference
from .running import TIES, RunningTopK, thresholds

IMPLEMENTATIONS = ("auto", "reference", "triton")

__all__ = ["IMPLEMENTATIONS", "TIES", "RunningTopK", "index_scores", "thresholds"]


def index_scores(
    q: Tensor, k: Tensor, weights: Tensor, softmax_scale: float, *, impl: str = "auto"
) -> Tensor:
    """Scores of a block of keys for each query, in fp32 as the models compute them.

        score = sum_h weights_h * relu(softmax_scale * q_h k^T)

    Args:
        q: `[B, T, H, D]`.
        k: `[B, S, D]`, or `[1, S, D]` for keys that all rows share.
        weights: `[B, T, H]`. Dtypes may differ: products are those of the wider one.
        softmax_scale: factor on the products.
        impl: one of `IMPLEMENTATIONS`. "triton" keeps no products of single heads.

    Returns:
        `[B, T, S]`, fp32.

    Raises:
        ValueError: shapes that do not fit together, or a requested implementation that cannot run.

    Source:
        DeepSeek-V3.2-Exp, 2025, https://github.com/deepseek-ai/DeepSeek-V3.2-Exp (equation 1).
    """
    fits = (
        q.dim() == 4
        and k.dim() == 3
        and q.shape[:3] == weights.shape
        and q.shape[-1] == k.shape[-1]
        and k.shape[0] in (1, q.shape[0])
    )
    if not fits:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and weights {tuple(weights.shape)} do not fit "
            "together; needed are [B, T, H, D], [B, S, D] and [B, T, H]."
        )
    if choose(impl, IMPLEMENTATIONS, q, k, weights) == "triton":
        from . import triton

        return triton.scores(q, k, weights, softmax_scale)
    with torch.autocast(q.device.type, enabled=False):
        return reference.scores(q, k, weights, softmax_scale)
