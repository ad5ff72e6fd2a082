"""What a forward chose, tokens to attend to and experts to run, as one number for each chooser.

A choice has no gradient; the gradient is that of the function with its choices made. So what is run
again must choose again what it chose, or the gradient is that of another function.
"""

import torch
from torch import Tensor


class Choices:
    """The choices of one chunk's forward, and of its recompute under gradient checkpointing."""

    def __init__(self) -> None:
        self._made: dict[str, Tensor] = {}
        self._recomputed: dict[str, Tensor] = {}

    @property
    def is_empty(self) -> bool:
        return not self._made

    def note(self, chooser: str, fingerprint: Tensor) -> None:
        """Say what a module chose: a scalar, see `fingerprint`."""
        (self._recomputed if chooser in self._made else self._made)[chooser] = fingerprint

    def differing(self, captured: "Choices | None") -> list[str]:
        """Who chose otherwise than in `captured`, or in the recompute of this forward.

        Choosers that only one of the two ran do not count: a capture leaves out what nobody reads.
        """
        pairs = [
            (chooser, other[chooser])
            for other in (self._recomputed, captured._made if captured is not None else {})
            for chooser in other.keys() & self._made.keys()
        ]
        if not pairs:
            return []
        ours = torch.stack([self._made[chooser] for chooser, _ in pairs])
        others = torch.stack([other.to(ours.device) for _, other in pairs])
        is_other = ours.ne(others).tolist()
        return sorted({c for (c, _), differs in zip(pairs, is_other, strict=True) if differs})

    def packed(self) -> "Choices":
        """The same in one small tensor, for as long as the state is held."""
        if self._made:
            values = torch.stack(list(self._made.values())).unbind()
            self._made = dict(zip(self._made, values, strict=True))
        return self

    def total(self, kind: str = "") -> int:
        """The sum over choosers whose name contains `kind`; equal for equal choices, however these
        are divided over chunks and ranks whose totals are added up (modulo 2^64)."""
        return sum(int(x) for name, x in self._made.items() if kind in name)


def fingerprint(chosen: Tensor, choosers: Tensor) -> Tensor:
    """A scalar int64 that changes with what is chosen, and not with the order of it.

    Args:
        chosen: `[.., K]` integer; negative ones are no choice.
        choosers: integers that broadcast to `[..]`: who chooses, a position or a row.
    """
    mixed = (choosers.unsqueeze(-1).long() * 0x9E3779B97F4A7C1 + chosen.long()) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 29)) * 0x1B873593CC9E2D51
    mixed = mixed ^ (mixed >> 32)
    return torch.where(chosen >= 0, mixed, 0).sum()
