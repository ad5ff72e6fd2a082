"""The definition in plain torch: an online log-sum-exp over runs of the vocabulary."""

import torch
from torch import Tensor

from .params import TokenGradients, TokenResults, logits_of, runs


def forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float
) -> TokenResults:
    """See `selective_logprob`."""
    dtype, number = _sum_dtype(hidden), len(targets)
    highest = torch.full((number,), -torch.inf, dtype=dtype, device=hidden.device)
    total, weighted, picked = (torch.zeros_like(highest) for _ in range(3))
    for run in runs(len(weight)):
        z = logits_of(hidden, weight, bias, run).to(dtype) / temperature
        new = torch.maximum(highest, z.amax(-1))
        decay, p = torch.exp(highest - new), torch.exp(z - new.unsqueeze(-1))
        total = total * decay + p.sum(-1)
        # A token that a model rules out has a logit of -inf, and p z is 0.
        weighted = weighted * decay + (p * z.masked_fill(p == 0, 0.0)).sum(-1)
        place, is_here = _place(targets, run)
        picked += torch.where(is_here, z.gather(-1, place.unsqueeze(-1)).squeeze(-1), 0.0)
        highest = new
    lse = highest + torch.log(total)
    return TokenResults(picked - lse, lse - weighted / total, lse)


def backward(
    logp_grad: Tensor,
    entropy_grad: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    results: TokenResults,
    needs_weight: bool,
) -> TokenGradients:
    """See `selective_logprob_backward`."""
    dtype = _sum_dtype(hidden)
    dhidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    dweight = torch.empty_like(weight) if needs_weight else None
    dbias = torch.empty_like(bias) if needs_weight and bias is not None else None
    logp_grad = logp_grad.to(dtype)
    for run in runs(len(weight)):
        z = logits_of(hidden, weight, bias, run).to(dtype) / temperature
        log_p = z - results.lse.unsqueeze(-1)
        p = torch.exp(log_p)
        dz = -logp_grad.unsqueeze(-1) * p
        if entropy_grad is not None:
            terms = log_p.masked_fill(p == 0, 0.0) + results.entropies.unsqueeze(-1)
            dz -= entropy_grad.to(dtype).unsqueeze(-1) * p * terms
        place, is_here = _place(targets, run)
        dz.scatter_add_(-1, place.unsqueeze(-1), (logp_grad * is_here).unsqueeze(-1))
        dz /= temperature
        dhidden += dz @ weight[run].to(dtype)
        if dweight is not None:
            dweight[run] = (dz.T @ hidden.to(dtype)).to(weight.dtype)
        if dbias is not None:
            dbias[run] = dz.sum(0).to(dbias.dtype)
    return TokenGradients(dhidden, dweight, dbias)


def _place(targets: Tensor, run: slice) -> tuple[Tensor, Tensor]:
    """Column of each target in a run's logits, some column where it is not there; and whether."""
    is_here = (targets >= run.start) & (targets < run.stop)
    return torch.where(is_here, targets - run.start, 0).long(), is_here


def _sum_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
