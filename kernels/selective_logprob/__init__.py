"""Log-probs and entropies of given tokens from hidden states and a head's weight.

Logits exist for a run of the vocabulary at a time, so that what is kept beside the operands does
not grow with the vocabulary, and the weight is read once for all tokens.
"""

from typing import Any

import torch
from torch import Tensor

from ..availability import choose
from . import reference
from .params import VOCABULARY_RUN, TokenGradients, TokenResults

__all__ = [
    "IMPLEMENTATIONS",
    "VOCABULARY_RUN",
    "TokenGradients",
    "TokenResults",
    "selective_logprob",
    "selective_logprob_backward",
]

IMPLEMENTATIONS = ("auto", "reference", "triton")


def selective_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    impl: str = "auto",
) -> TokenResults:
    """Scores of the targets.

        z = (hidden weight^T + bias) / temperature        lse = logsumexp(z)
        logp = z[target] - lse                            entropy = lse - sum_v p_v z_v

    Logits are rounded to the operands' dtype, as those of a linear layer are; all else is computed
    in fp32 (fp64 for fp64). Beside the results it takes N * `VOCABULARY_RUN` logits, and some
    copies of them in the reference.

    Args:
        hidden: `[N, E]`.
        weight: `[V, E]`, same dtype; bias: `[V]` or None.
        targets: `[N]` integers, at least 0 and below V (not checked: it would wait for a GPU).
        temperature: above 0.
        impl: one of `IMPLEMENTATIONS`.

    Raises:
        ValueError: operands that do not fit together, or a requested implementation that cannot
            run.
    """
    _check(hidden, weight, targets, bias, temperature)
    implementation = _implementation(impl, hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        return implementation.forward(hidden, weight, targets, bias, temperature)


def selective_logprob_backward(
    logp_grad: Tensor,
    entropy_grad: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    results: TokenResults,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    needs_weight: bool = True,
    impl: str = "auto",
) -> TokenGradients:
    """Gradients of the operands.

        dL/dz_v = logp_grad ([v = target] - p_v) - entropy_grad p_v (z_v - lse + entropy)

    Logits are computed once more. Beside the results it takes N * `VOCABULARY_RUN` of them.

    Args:
        logp_grad: `[N]`; entropy_grad: `[N]`, or None where the loss has no entropy.
        hidden, weight, targets, bias, temperature, impl: as in `selective_logprob`.
        results: what it returned.
        needs_weight: False leaves the gradients of weight and bias out: a frozen head.

    Raises:
        ValueError: as in `selective_logprob`.
    """
    _check(hidden, weight, targets, bias, temperature)
    operands = hidden, weight, targets, bias, temperature
    implementation = _implementation(impl, hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        return implementation.backward(logp_grad, entropy_grad, *operands, results, needs_weight)


def _implementation(impl: str, hidden: Tensor, weight: Tensor) -> Any:
    if choose(impl, IMPLEMENTATIONS, hidden, weight) == "reference":
        return reference
    from . import triton

    return triton


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float
) -> None:
    fits = (
        hidden.dim() == weight.dim() == 2
        and hidden.shape[1] == weight.shape[1]
        and targets.shape == hidden.shape[:1]
        and (bias is None or bias.shape == weight.shape[:1])
        and hidden.dtype == weight.dtype
    )
    if not fits or targets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"hidden {tuple(hidden.shape)} of {hidden.dtype}, weight {tuple(weight.shape)} of "
            f"{weight.dtype}, targets {tuple(targets.shape)} of {targets.dtype} and bias "
            f"{None if bias is None else tuple(bias.shape)} do not fit together; needed are "
            "[N, E], [V, E] of the same dtype, [N] of integers, and [V]."
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0.")
