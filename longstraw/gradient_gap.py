"""How far the stopped gradient is from the exact one, measured on the user's own run.

The exact gradient is the stopped one plus what flows through the prompt's state; the latter is what
a prompt backward adds. Keeping it apart gives both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .distributed import SequenceGroup


class GradientGap:
    """Accumulates the prompt's part of the gradient over one update.

    Costs one copy of the trainable gradients.
    """

    def __init__(self) -> None:
        self._prompt_part: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def measuring(self, parameters: Sequence[nn.Parameter], keep: bool) -> Iterator[None]:
        """Take what the inside adds to `.grad` as prompt part.

        Args:
            keep: leave it in `.grad` as well (exact), or take it out again (stopped).
        """
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        yield
        for p, grad in zip(parameters, before, strict=True):
            part, p.grad = p.grad, grad
            if part is None:
                continue
            held = self._prompt_part.get(p)
            self._prompt_part[p] = part.clone() if held is None else held.add_(part)
            if keep:
                p.grad = part if grad is None else grad.add_(part)

    def forget(self) -> None:
        """Drop what was measured since the last summary."""
        self._prompt_part.clear()

    def summarize(
        self, parameters: Sequence[nn.Parameter], has_prompt_part: bool, group: SequenceGroup
    ) -> dict[str, float]:
        """Compare the two gradients of this group's prompts and forget them. Collective over it.

        Args:
            has_prompt_part: whether `.grad` is the exact gradient or the stopped one.
            group: ranks that each hold the part of their own tokens.

        Returns:
            `relative`: |exact - stopped| / |exact|; `cosine` of the two; zeros and ones when both
            vanish.
        """
        missing = exact = stopped = product = 0.0
        for p in parameters:
            part = self._prompt_part.get(p)
            part = torch.zeros_like(p) if part is None else part
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            if not group.is_alone:
                part, grad = group.sum_(part.clone()), group.sum_(grad.clone())
            full = grad if has_prompt_part else grad + part
            rest = full - part
            missing += _dot(part, part)
            exact += _dot(full, full)
            stopped += _dot(rest, rest)
            product += _dot(full, rest)
        self._prompt_part.clear()
        if exact == 0.0:
            return {"relative": 0.0, "cosine": 1.0}
        norm = (exact * stopped) ** 0.5
        return {
            "relative": (missing / exact) ** 0.5,
            "cosine": product / norm if norm > 0 else 0.0,
        }


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())
