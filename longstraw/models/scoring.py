"""Log-probs and entropies of given tokens, and their backward, a few logits at a time.

dL/dlogp and dL/dentropy are known before a replay starts, so each slice of rows is differentiated
as soon as its logits exist, and its `[rows, V]` tensors are freed before the next slice. Where the
head is a plain product and there is a kernel, all rows meet a run of the vocabulary at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longstraw_kernels.selective_logprob import (
    TokenResults,
    selective_logprob,
    selective_logprob_backward,
)


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
HeadFunction = Callable[[Tensor], nn.Linear | None]
"""From hidden states the head that a kernel may take; see `Decoder.plain_head`."""


@torch.no_grad()
def score_tokens(
    logits_of: LogitsFunction,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    num_rows: int,
    head_of: HeadFunction,
) -> TokenScores:
    """Scores of `targets`, without a graph.

        z = logits / temperature      logp = z[target] - logsumexp(z)
        entropy = logsumexp(z) - sum_v p_v z_v

    Args:
        logits_of: `[n, E]` -> `[n, V]`.
        hidden: `[B, T, E]`; targets: `[B, T]`, negative where there is none.
        num_rows: rows whose logits exist at a time, where no kernel takes the head.
        head_of: that head, or None.
    """
    targets = targets.to(hidden.device)  # a model split over devices ends on another one
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logps = torch.zeros(targets.shape, dtype=dtype, device=hidden.device).view(-1)
    entropies = torch.zeros_like(logps)
    head = head_of(hidden)
    if head is not None:
        rows = (targets.reshape(-1) >= 0).nonzero().squeeze(-1)
        results = _score_by_head(head, hidden, targets, rows, temperature)
        logps[rows], entropies[rows] = results.logps, results.entropies
        return TokenScores(logps.view(targets.shape), entropies.view(targets.shape))
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
    head_of: HeadFunction,
) -> Tensor:
    """A scalar whose backward is that of the scores; its value is zero and means nothing.

    `backward()` on it sends dL/dhidden into `hidden` and the head's gradients into `parameters`,
    both summed over all slices of rows, so that each parameter is reached once however many
    slices there are. Without cotangents both are zeros.

    Args:
        hidden: `[B, T, E]`.
        cotangents: `[B, T]` each.
        parameters: the head's trainable ones.
        head_of: see `score_tokens`.
    """

    def differentiate(hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        if cotangents is None:
            return torch.zeros_like(hidden), [torch.zeros_like(p) for p in parameters]
        head = head_of(hidden)
        if head is not None:
            return _backward_by_head(head, hidden, targets, cotangents, temperature, parameters)
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
    targets, logp_grad, entropy_grad, wanted = _flat(flat.device, targets, cotangents)
    grad, totals = torch.zeros_like(flat), [_Total(p) for p in parameters]
    for rows in _slices(wanted, num_rows):
        grads = logp_grad[rows], None if entropy_grad is None else entropy_grad[rows]
        grad[rows], *parts = _backward_slice(
            logits_of, flat[rows], targets[rows], *grads, temperature, parameters
        )
        for total, part in zip(totals, parts, strict=True):
            total.add(part)
    return grad.view(hidden.shape), [total.value() for total in totals]


def _backward_slice(
    logits_of: LogitsFunction,
    hidden: Tensor,
    targets: Tensor,
    logp_grad: Tensor,
    entropy_grad: Tensor | None,
    temperature: float,
    parameters: Sequence[nn.Parameter],
) -> tuple[Tensor, ...]:
    """dL/dhidden `[n, E]` and dL/dparameters of some rows; their logits are gone behind it."""
    with torch.enable_grad():
        leaf = hidden.requires_grad_()
        log_p = torch.log_softmax(logits_of(leaf) / temperature, dim=-1)
        roots = [_logps(log_p, targets)]
        root_grads = [logp_grad.to(log_p.dtype)]
        if entropy_grad is not None:  # else not even made: each is another `[n, V]` or two
            roots.append(_entropies(log_p))
            root_grads.append(entropy_grad.to(log_p.dtype))
        del log_p
    return torch.autograd.grad(roots, [leaf, *parameters], root_grads)


def _backward_by_head(
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    cotangents: TokenCotangents,
    temperature: float,
    parameters: Sequence[nn.Parameter],
) -> tuple[Tensor, list[Tensor]]:
    """As `_backward_scores`, of all rows over runs of the vocabulary."""
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    targets, logp_grad, entropy_grad, wanted = _flat(flat.device, targets, cotangents)
    rows = wanted.nonzero().squeeze(-1)
    found = selective_logprob_backward(
        logp_grad[rows],
        None if entropy_grad is None else entropy_grad[rows],
        flat[rows].to(head.weight.dtype),
        head.weight.detach(),
        targets[rows],
        _score_by_head(head, hidden, targets, rows, temperature),
        bias=None if head.bias is None else head.bias.detach(),
        temperature=temperature,
        needs_weight=bool(parameters),
        impl="triton",
    )
    grad = torch.zeros_like(flat)
    grad[rows] = found.hidden.to(grad.dtype)
    made = {id(head.weight): found.weight, id(head.bias): found.bias}
    gradients = [made[id(parameter)] for parameter in parameters]
    return grad.view(hidden.shape), [g for g in gradients if g is not None]


def _score_by_head(
    head: nn.Linear, hidden: Tensor, targets: Tensor, rows: Tensor, temperature: float
) -> TokenResults:
    return selective_logprob(
        hidden.detach().reshape(-1, hidden.shape[-1])[rows].to(head.weight.dtype),
        head.weight.detach(),
        targets.reshape(-1)[rows],
        bias=None if head.bias is None else head.bias.detach(),
        temperature=temperature,
        impl="triton",
    )


def _flat(
    device: torch.device, targets: Tensor, cotangents: TokenCotangents
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Targets, both cotangents, and which rows have a gradient; one row per token, on `device`."""
    targets, logp_grad = (x.to(device).reshape(-1) for x in (targets, cotangents.logps))
    entropy_grad, wanted = cotangents.entropies, logp_grad != 0
    if entropy_grad is not None:
        entropy_grad = entropy_grad.to(device).reshape(-1)
        wanted = wanted | (entropy_grad != 0)
    return targets, logp_grad, entropy_grad, wanted & (targets >= 0)


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
    return _logps(log_p, targets), _entropies(log_p)


def _logps(log_p: Tensor, targets: Tensor) -> Tensor:
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _entropies(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)
