"""How close two gradients are, by family of parameters."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = dict[str, Tensor]

ALL = "all"
_ZERO = 1e-9
"""A family whose gradient is a smaller part of the whole is measured against this part: it is zero
to rounding, and has no size of its own."""


@dataclass(frozen=True)
class Closeness:
    """One gradient seen from another, over one family as if it were one vector.

    Attributes:
        cosine: of the two; None where one vanishes.
        relative: |ours - truth| / |truth|.
        norm_ratio: |ours| / |truth|; None where the truth vanishes.
        worst: the parameter with the largest part in the difference.
    """

    cosine: float | None
    relative: float
    norm_ratio: float | None
    worst: str


def family_of(name: str) -> str:
    """The family of a parameter: `q_proj`, `embed`, `norm`, `q_proj lora`, ..."""
    parts = [part for part in name.split(".") if part not in ("weight", "bias", "default")]
    for index, part in enumerate(parts):
        if part.startswith("lora_"):
            return f"{parts[index - 1]} lora"
    last = parts[-1]
    if "norm" in last or re.fullmatch(r"ln_\w+", last):
        return "norm"
    return "embed" if "embed" in last or last in ("wte", "wpe") else last


def families(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameters by family, in the order of the model."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(family_of(name), []).append(name)
    return found


def compare(
    ours: Gradients, truth: Gradients, of: Callable[[Tensor], Tensor] = torch.Tensor.double
) -> dict[str, Closeness]:
    """`ours` seen from `truth`, by family, and over all parameters under "all".

    A parameter without a gradient has one of zeros.

    Args:
        of: what is compared, made of a gradient, such as `adamw_delta`; in float64.
    """
    names = list(dict.fromkeys([*truth, *ours]))
    sums = {name: _sums(ours.get(name), truth.get(name), of) for name in names}
    whole = sum(found[1] for found in sums.values()) ** 0.5
    result = {
        family: _closeness({name: sums[name] for name in members}, whole)
        for family, members in families(names).items()
    }
    return {**result, ALL: _closeness(sums, whole)}


def adamw_delta(gradient: Tensor) -> Tensor:
    """What the first step of AdamW does to a parameter, in units of the learning rate.

    In float64 and without weight decay, so that what differs is the gradients' difference.
    """
    weight = torch.nn.Parameter(torch.zeros_like(gradient, dtype=torch.float64))
    weight.grad = gradient.double()
    torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0).step()
    return weight.detach()


def _sums(
    ours: Tensor | None, truth: Tensor | None, of: Callable[[Tensor], Tensor]
) -> tuple[float, float, float, float]:
    """Squares of both, of the difference, and their product."""
    like = ours if ours is not None else truth
    assert like is not None
    zeros = torch.zeros_like(like)
    a, b = (
        of(zeros if gradient is None else gradient.to(like.device)) for gradient in (ours, truth)
    )
    return (
        float(a.square().sum()),
        float(b.square().sum()),
        float((a - b).square().sum()),
        float((a * b).sum()),
    )


def _closeness(sums: dict[str, tuple[float, float, float, float]], whole: float) -> Closeness:
    ours, truth, difference, product = (sum(column) for column in zip(*sums.values(), strict=True))
    worst = max(sums, key=lambda name: sums[name][2])
    size = max(truth**0.5, _ZERO * whole)
    norm = (ours * truth) ** 0.5
    return Closeness(
        cosine=product / norm if norm > 0 else None,
        relative=difference**0.5 / size if size > 0 else difference**0.5,
        norm_ratio=(ours / truth) ** 0.5 if truth > 0 else None,
        worst=worst,
    )
