"""Routing statistics of mixture-of-experts layers, in a form that adds up over chunks.

The load-balancing loss is a function of the whole batch, but of two sums only: how often each
expert was chosen (no gradient) and the router's probabilities (gradient). Both add up over chunks,
segments and members, so the loss can be taken on the sums and its gradient sent back to each chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RouterSums:
    """Sums over tokens and expert layers, for each of B rows.

    Attributes:
        counts: `[B, X]`, how often each of X experts was among a token's choices.
        probs: `[B, X]`, sum of the router's probabilities; may carry a graph.
        num_rows: `[B]`, tokens times expert layers.
    """

    counts: Tensor
    probs: Tensor
    num_rows: Tensor

    def __add__(self, other: "RouterSums") -> "RouterSums":
        """Element by element; one row of either side is broadcast over the other's."""
        return RouterSums(
            self.counts + other.counts, self.probs + other.probs, self.num_rows + other.num_rows
        )

    def detach(self) -> "RouterSums":
        return RouterSums(self.counts, self.probs.detach(), self.num_rows)

    @staticmethod
    def cat(parts: Sequence["RouterSums"]) -> "RouterSums":
        """The rows of all parts."""
        return RouterSums(
            torch.cat([part.counts for part in parts]),
            torch.cat([part.probs for part in parts]),
            torch.cat([part.num_rows for part in parts]),
        )


def router_sums(router_logits: Sequence[Tensor], real: Tensor, top_k: int) -> RouterSums:
    """Sums over one chunk.

    Args:
        router_logits: per expert layer `[B*C, X]`.
        real: `[B, C]` bool, tokens that count.
        top_k: experts per token.
    """
    weights = real.to(torch.float32).unsqueeze(-1)
    counts, probs = [], []
    for logits in router_logits:
        probabilities = torch.softmax(logits.to(real.device), dim=-1).view(*real.shape, -1)
        chosen = torch.topk(probabilities, top_k, dim=-1).indices
        hits = torch.zeros_like(probabilities, dtype=torch.float32).scatter_(-1, chosen, 1.0)
        counts.append((hits * weights).sum(1))
        probs.append((probabilities * weights.to(probabilities.dtype)).sum(1))
    num_rows = real.sum(1).to(torch.float32) * len(router_logits)
    return RouterSums(torch.stack(counts).sum(0), torch.stack(probs).sum(0), num_rows)


def load_balancing_loss(sums: RouterSums) -> Tensor:
    """The Switch loss of everything in `sums`, differentiable in `sums.probs`.

        X * sum_x (counts_x / rows) * (probs_x / rows)

    Source:
        Fedus et al. 2021, https://arxiv.org/abs/2101.03961, equations (4) - (6), taken over all
        rows and layers together, as transformers' `load_balancing_loss_func` does.
    """
    rows = sums.num_rows.sum()
    shares = sums.counts.sum(0).to(sums.probs.dtype) / rows
    return sums.counts.shape[-1] * (shares * (sums.probs.sum(0) / rows)).sum()
