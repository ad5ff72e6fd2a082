"""Log-probs and entropies of given tokens, and their backward, a few rows of logits at a time.

dL/dlogp and dL/dentropy are known before a replay starts, so each slice of rows is differentiated
as soon as its logits exist, and its `[rows, V]` tensors are freed before the next slice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TokenScores:
    """Values of one token each, zero where there is no target.

    Attributes:
        logps: log-probability of the target under the temperature-scaled distribution.
        entropies: entropy of that distribution.
    """

    logps: Tensor
    entropies: Tensor


@dataclass(frozen=True)
class TokenCotangents:
    """dL/dlogps and dL/dentropies, shaped like the scores; `entropies` None when L has none."""

    logps: Tensor
    entropies: Tensor | None = None

    @property
    def is_zero(self) -> bool:
        """Whether no token needs a gradient."""
        some = bool(self.logps.any())
        return not some and (self.entropies is None or not bool(self.entropies.any()))

    def columns(self, run: slice) -> "TokenCotangents":
        """Those of a run of tokens."""
        return self.map(lambda whole: whole[:, run])

    def map(self, function: Callable[[Tensor], Tensor]) -> "TokenCotangents":
        """`function` of each."""
        entropies = None if self.entropies is None else function(self.entropies)
        return TokenCotangents(function(self.logps), entropies)


LogitsFunction = Callable[[Tensor], Tensor]


@torch.no_grad()
def score_tokens(
    logits_of: LogitsFunction, hidden: Tensor, targets: Tensor, temperature: float, num_rows: int
) -> TokenScores:
    """Scores of `targets`, without a graph.

        z = logits / temperature      logp = z[target] - logsumexp(z)
        entropy = logsumexp(z) - sum_v p_v z_v

    Args:
        logits_of: `[n, E]` -> `[n, V]`.
        hidden: `[B, T, E]`; targets: `[B, T]`, negative where there is none.
        num_rows: rows whose logits exist at a time.
    """
    targets = targets.to(hidden.device)  # a model split over devices ends on another one
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logps = torch.zeros(targets.shape, dtype=dtype, device=hidden.device).view(-1)
    entropies = torch.zeros_like(logps)
    for rows in _slices(targets.reshape(-1) >= 0, num_rows):
        z = logits_of(hidden.reshape(-1, hidden.shape[-1])[rows]) / temperature
        logps[rows], entropies[rows] = _score(z, targets.reshape(-1)[rows])
    return TokenScores(logps.view(targets.shape), entropies.view(targets.shape))


def score_anchor(
    logits_of: LogitsFunction,
    hidden: Tensor,
    targets: Tensor,
    cotangents: TokenCotangents | None,
    temperature: float,
    num_rows: int,
    parameters: Sequence[nn.Parameter],
) -> Tensor:
    """A scalar whose backward is that of the scores; its value is zero and means nothing.

    `backward()` on it sends dL/dhidden into `hidden` and the head's gradients into `parameters`,
    both summed over all slices of rows, so that each parameter is reached once however many
    slices there are. Without cotangents both are zeros.

    Args:
        hidden: `[B, T, E]`.
        cotangents: `[B, T]` each.
        parameters: the head's trainable ones.
    """

    def differentiate(hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        if cotangents is None:
            return torch.zeros_like(hidden), [torch.zeros_like(p) for p in parameters]
        return _backward_scores(
            logits_of, hidden, targets, cotangents, temperature, num_rows, parameters
        )

    return _ScoreAnchor.apply(hidden, differentiate, *parameters)  # type: ignore[no-any-return]


class _ScoreAnchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, differentiate, *parameters):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden)
        ctx.differentiate = differentiate
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        hidden_grad, parameter_grads = ctx.differentiate(*ctx.saved_tensors)
        return hidden_grad, None, *parameter_grads


def _backward_scores(
    logits_of: LogitsFunction,
    hidden: Tensor,
    targets: Tensor,
    cotangents: TokenCotangents,
    temperature: float,
    num_rows: int,
    parameters: Sequence[nn.Parameter],
) -> tuple[Tensor, list[Tensor]]:
    """dL/dhidden `[B, T, E]`, and dL/dparameters in each parameter's shape."""
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    targets, logp_grad = targets.to(flat.device), cotangents.logps.to(flat.device).reshape(-1)
    entropy_grad = cotangents.entropies
    if entropy_grad is not None:
        entropy_grad = entropy_grad.to(flat.device).reshape(-1)
    wanted = logp_grad != 0 if entropy_grad is None else (logp_grad != 0) | (entropy_grad != 0)
    grad, totals = torch.zeros_like(flat), [_Total(p) for p in parameters]
    for rows in _slices(wanted & (targets.reshape(-1) >= 0), num_rows):
        with torch.enable_grad():
            leaf = flat[rows].requires_grad_()
            logps, entropies = _score(logits_of(leaf) / temperature, targets.reshape(-1)[rows])
        roots, root_grads = [logps], [logp_grad[rows].to(logps.dtype)]
        if entropy_grad is not None:
            roots.append(entropies)
            root_grads.append(entropy_grad[rows].to(entropies.dtype))
        grad[rows], *parts = torch.autograd.grad(roots, [leaf, *parameters], root_grads)
        for total, part in zip(totals, parts, strict=True):
            total.add(part)
    return grad.view(hidden.shape), [total.value() for total in totals]


class _Total:
    """A sum over slices, in fp32 as soon as there are two of them."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.sum: Tensor | None = None

    def add(self, part: Tensor) -> None:
        if self.sum is None:
            self.sum = part
        elif part.dtype == self.sum.dtype and part.dtype not in (torch.float32, torch.float64):
            self.sum = self.sum.float().add_(part)
        else:
            self.sum = self.sum.add_(part)

    def value(self) -> Tensor:
        if self.sum is None:
            return torch.zeros_like(self.parameter)
        return self.sum.to(self.parameter.dtype)


def _slices(wanted: Tensor, num_rows: int) -> Iterator[Tensor]:
    """Indices of the wanted rows, `num_rows` at a time."""
    yield from wanted.nonzero().squeeze(-1).split(num_rows) if bool(wanted.any()) else ()


def _score(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(z, dim=-1)
    logps = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return logps, -(log_p.exp() * log_p).sum(-1)
