"""Comparing the engine with the plain full-sequence step, parameter by parameter."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from longstraw import (
    Engine,
    EngineConfig,
    GroupScores,
    PromptGroup,
    RouterSums,
    load_balancing_loss,
)
from longstraw.audit import full_sequence_step
from tests.models import VOCAB, Float64Islands

Gradients = dict[str, Tensor]


def random_groups(shapes: Sequence[tuple[int, Sequence[int]]], seed: int = 1) -> list[PromptGroup]:
    """Groups of random tokens from (prompt length, response lengths)."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(2, VOCAB, (length,), generator=generator)

    return [PromptGroup(ids(p), [ids(r) for r in rs]) for p, rs in shapes]


class RandomLoss:
    """A loss that uses everything a loss may use.

    Random weights on log-probs and entropies, a term that couples all members of all groups, and
    the load-balancing loss where there are routing sums.
    """

    def __init__(self, groups: Sequence[PromptGroup], seed: int = 2) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = []
        for group in groups:
            width = max(ids.numel() for ids in group.completion_ids)
            weight = torch.randn(
                len(group.completion_ids), width, generator=generator, dtype=torch.float64
            )
            for row, ids in zip(weight, group.completion_ids, strict=True):
                row[ids.numel() :] = 0
            self.weights.append(weight)

    def __call__(self, scores: list[GroupScores]) -> Tensor:
        total = scores[0].logps.new_zeros(())
        for group, weight in zip(scores, self.weights, strict=True):
            weight = weight.to(group.logps)
            total = total + (group.logps * weight).sum()
            total = total + 0.3 * (group.entropies * weight.abs()).sum()
        total = total + 0.01 * sum(group.logps.mean() for group in scores) ** 2
        router = [group.router for group in scores if group.router is not None]
        return total + 3 * load_balancing_loss(RouterSums.cat(router)) if router else total


def gradients(model: nn.Module) -> Gradients:
    """A copy of the gradients, which are then cleared."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def worst_error(ours: Gradients, reference: Gradients) -> tuple[float, str]:
    """max |difference| / max |reference| of the worst parameter, and its name.

    Per parameter and not over all: the gradient of a key projection that is lost altogether would
    be a rounding error beside the embedding's. A parameter whose reference is zero to rounding is
    measured against 1e-9 of the largest gradient.
    """
    assert reference, "the reference has no gradient at all"
    largest = max(grad.abs().max() for grad in reference.values())
    worst = (0.0, "")
    for name in reference.keys() | ours.keys():
        zero = torch.zeros(())
        difference = (ours.get(name, zero) - reference.get(name, zero)).abs().max()
        assert torch.isfinite(difference), name  # else NaN would lose every comparison
        size = torch.clamp(reference.get(name, zero).abs().max(), min=1e-9 * largest)
        worst = max(worst, (float(difference / size), name))
    return worst


def full_sequence_gradients(
    model: nn.Module,
    groups: Sequence[PromptGroup],
    *,
    prompt_gradient: str = "exact",
    temperature: float = 1.0,
    with_router: bool = False,
    index_ties: str = "first",
) -> Gradients:
    with _precision(model):
        full_sequence_step(
            model,
            groups,
            RandomLoss(groups),
            prompt_gradient=prompt_gradient,
            temperature=temperature,
            with_router=with_router,
            index_ties=index_ties,
        )
    return gradients(model)


def engine_gradients(
    model: nn.Module, groups: Sequence[PromptGroup], config: EngineConfig
) -> Gradients:
    """The engine's gradients; checks that it gave every byte of state back."""
    engine = Engine(model, config)
    with _precision(model):
        engine.accumulate(groups, RandomLoss(groups))
        engine.finalize()
    assert engine.store.bytes_in_use == 0 and engine.store.num_pages == 0
    return gradients(model)


def _precision(model: nn.Module):  # noqa: ANN202
    is_double = next(model.parameters()).dtype == torch.float64
    return Float64Islands() if is_double else nullcontext()
