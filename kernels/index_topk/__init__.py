"""Scores of the indexer of DeepSeek Sparse Attention, and the tokens with the highest ones.

Which tokens are selected is a function of scores and positions alone: of equal scores the earlier
token goes first, or the later one, as asked. So the selection does not depend on how keys are cut
into blocks, nor on which rank has which of them.
"""

import torch
from torch import Tensor

from . import reference
from .running import TIES, RunningTopK, thresholds

__all__ = ["TIES", "RunningTopK", "index_scores", "thresholds"]


def index_scores(q: Tensor, k: Tensor, weights: Tensor, softmax_scale: float) -> Tensor:
    """Scores of a block of keys for each query, in fp32 as the models compute them.

        score = sum_h weights_h * relu(softmax_scale * q_h k^T)

    Args:
        q: `[B, T, H, D]`.
        k: `[B, S, D]`, or `[1, S, D]` for keys that all rows share.
        weights: `[B, T, H]`.
        softmax_scale: factor on the products.

    Returns:
        `[B, T, S]`.

    Raises:
        ValueError: shapes that do not fit together.
    """
    if q.dim() != 4 or k.dim() != 3 or q.shape[:3] != weights.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and weights {tuple(weights.shape)} do not fit "
            "together; needed are [B, T, H, D], [B, S, D] and [B, T, H]."
        )
    with torch.autocast(q.device.type, enabled=False):
        return reference.scores(q, k, weights, softmax_scale)
