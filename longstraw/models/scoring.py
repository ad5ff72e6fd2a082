"""Log-probs and entropies of given tokens, and their backward, a few rows of logits at a time.

The backward does not wait for autograd to ask: dL/dlogp and dL/dentropy are known before a replay
starts, so each slice of rows is differentiated as soon as its logits exist and its `[rows, V]`
tensors are freed before the next slice.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


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


def backward_scores(
    logits_of: LogitsFunction,
    hidden: Tensor,
    targets: Tensor,
    cotangents: TokenCotangents,
    temperature: float,
    num_rows: int,
) -> Tensor:
    """dL/dhidden; the head's own parameters accumulate their gradients on the way.

    Args:
        hidden: `[B, T, E]`, read only for its values.
        cotangents: `[B, T]` each.

    Returns:
        `[B, T, E]`, zero where nothing is asked.
    """
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    targets, logp_grad = targets.to(flat.device), cotangents.logps.to(flat.device).reshape(-1)
    entropy_grad = cotangents.entropies
    if entropy_grad is not None:
        entropy_grad = entropy_grad.to(flat.device).reshape(-1)
    wanted = logp_grad != 0 if entropy_grad is None else (logp_grad != 0) | (entropy_grad != 0)
    grad = torch.zeros_like(flat)
    for rows in _slices(wanted & (targets.reshape(-1) >= 0), num_rows):
        with torch.enable_grad():
            leaf = flat[rows].requires_grad_()
            logps, entropies = _score(logits_of(leaf) / temperature, targets.reshape(-1)[rows])
        roots, root_grads = [logps], [logp_grad[rows].to(logps.dtype)]
        if entropy_grad is not None:
            roots.append(entropies)
            root_grads.append(entropy_grad[rows].to(entropies.dtype))
        torch.autograd.backward(roots, root_grads)
        assert leaf.grad is not None
        grad[rows] = leaf.grad
    return grad.view(hidden.shape)


def _slices(wanted: Tensor, num_rows: int) -> Iterator[Tensor]:
    """Indices of the wanted rows, `num_rows` at a time."""
    yield from wanted.nonzero().squeeze(-1).split(num_rows) if bool(wanted.any()) else ()


def _score(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(z, dim=-1)
    logps = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return logps, -(log_p.exp() * log_p).sum(-1)
