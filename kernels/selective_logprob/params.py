"""What `selective_logprob` gives, and how much of the vocabulary it looks at together."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY_RUN = 8192
"""Tokens of the vocabulary whose logits exist at a time."""


@dataclass(frozen=True)
class TokenResults:
    """`[N]` each, fp32 (fp64 for fp64); see `selective_logprob`."""

    logps: Tensor
    entropies: Tensor
    lse: Tensor


@dataclass(frozen=True)
class TokenGradients:
    """Of the operands.

    Attributes:
        hidden: `[N, E]`, fp32 (fp64 for fp64).
        weight, bias: in the shape and dtype of the operand; None where not asked for.
    """

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None


def runs(vocabulary: int) -> Iterator[slice]:
    """The vocabulary, `VOCABULARY_RUN` tokens at a time."""
    for first in range(0, vocabulary, VOCABULARY_RUN):
        yield slice(first, min(first + VOCABULARY_RUN, vocabulary))


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, run: slice) -> Tensor:
    """`[N, tokens of the run]`, in the dtype of the operands."""
    return torch.nn.functional.linear(hidden, weight[run], None if bias is None else bias[run])
