"""The four levels of evidence of the LongStraw paper, each a list of findings against budgets.

Knows numbers and names; `run.py` makes the steps that they are taken from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .closeness import ALL, Closeness, adamw_delta, compare
from .policy import DTYPES
from .steps import Step

NAMES = {
    1: "execution",
    2: "response operator",
    3: "distributed update",
    4: "full gradient",
}
CLAIMS = {
    1: "responses have the log-probs of the full sequence",
    2: "with the prompt held constant, the gradient is that of the full-sequence step with the "
    "prompt's state detached",
    3: "several ranks, sharing a prompt or with members of their own, make the update of one",
    4: "the gradient, the prompt's own part included, is that of the full-sequence step, and so is "
    "the first AdamW step from it",
}

EXACT_BUDGET = 1e-9
"""In float64. Mistakes show as 1e-2 or more, rounding as 1e-10 (experts) to 1e-15."""

DELTA_BUDGET = 1e-6
"""Of the AdamW step in float64, which divides by |g| + 1e-8 and so makes rounding of the smallest
gradients larger."""


@dataclass(frozen=True)
class Finding:
    """One quantity and what is allowed.

    Attributes:
        what: a family of parameters, or another name.
        error: relative L2 of a gradient; the largest difference of a log-prob.
        budget: the largest error that is rounding.
        cosine: with the truth, of a gradient.
        worst: the parameter that differs most.
    """

    what: str
    error: float
    budget: float
    cosine: float | None = None
    worst: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error <= self.budget  # not for NaN


@dataclass(frozen=True)
class Level:
    """What one level found at one prompt length.

    Attributes:
        not_run: why it was not run; None if it was.
    """

    number: int
    findings: list[Finding] = field(default_factory=list)
    not_run: str | None = None

    @property
    def name(self) -> str:
        return NAMES[self.number]

    @property
    def status(self) -> str:
        """`ok`, `fail` or `not run`."""
        if self.not_run is not None:
            return "not run"
        return "ok" if self.findings and all(f.is_ok for f in self.findings) else "fail"

    @property
    def tightest(self) -> Finding:
        """The finding that is nearest to its budget, or furthest above it."""
        return max(self.findings, key=lambda f: (not f.is_ok, f.error / (f.budget or 1.0)))


class Judge:
    """Measures steps against the truth.

    In float64 budgets are fixed. In lower precision the truth is a full-sequence step in a higher
    one, and the full-sequence step in the same precision says how much of an error is rounding:

        budget = 2 (its error + one rounding)

    Args:
        dtype: of what is judged.
        truth: the full-sequence step.
        reference: the full-sequence step in `dtype`; None where that is the truth.
    """

    def __init__(self, dtype: str, truth: Step, reference: Step | None) -> None:
        self._rounding = torch.finfo(DTYPES[dtype]).eps
        self._truth = truth
        self._reference = reference
        self._allowed: dict[str, Closeness] | None = None
        if reference is not None:
            self._allowed = compare(reference.gradients, truth.gradients)

    def logps(self, step: Step) -> list[Finding]:
        """The largest difference of any log-prob."""
        budget = EXACT_BUDGET
        if self._reference is not None:
            budget = self._budget(_largest_difference(self._reference.logps, self._truth.logps))
        return [Finding("log-probs", _largest_difference(step.logps, self._truth.logps), budget)]

    def gradients(self, step: Step, label: str = "") -> list[Finding]:
        """By family; `label` is put before its name."""
        return [
            Finding(
                label + family,
                found.relative,
                EXACT_BUDGET if self._allowed is None else self._budget_of(family),
                found.cosine,
                found.worst,
            )
            for family, found in compare(step.gradients, self._truth.gradients).items()
        ]

    def optimizer_step(self, step: Step, label: str = "") -> list[Finding]:
        """One AdamW step from the gradient, over all parameters."""
        truth = self._truth.gradients
        budget = DELTA_BUDGET
        if self._reference is not None:
            budget = self._budget(
                compare(self._reference.gradients, truth, adamw_delta)[ALL].relative
            )
        found = compare(step.gradients, truth, adamw_delta)[ALL]
        return [Finding(f"{label}AdamW step", found.relative, budget, found.cosine, found.worst)]

    def _budget_of(self, family: str) -> float:
        assert self._allowed is not None
        found = self._allowed.get(family)
        return self._budget(0.0 if found is None else found.relative)

    def _budget(self, error: float) -> float:
        return 2 * (error + self._rounding)


def _largest_difference(ours: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    differences = [(a.double() - b.double()).abs() for a, b in zip(ours, truth, strict=True)]
    return float(torch.cat(differences).max())
