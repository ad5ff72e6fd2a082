"""Curves through measured points, and what follows from them. Knows numbers only.

seconds = fixed + linear * P + attention * P^2      all terms at least 0
bytes   = fixed + per_token * P
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class Growth:
    """Seconds against prompt tokens.

    Attributes:
        fixed: seconds whatever the prompt (replies, optimizer, overhead).
        linear: seconds per token (linear layers, norms).
        attention: seconds per token squared.
        worst: largest |fit - measured| / measured; None when there are as few points as terms.
    """

    fixed: float
    linear: float
    attention: float
    worst: float | None

    def seconds(self, prompt: float) -> float:
        """The curve at a prompt of so many tokens."""
        return self.fixed + self.linear * prompt + self.attention * prompt**2


@dataclass(frozen=True)
class Line:
    """Peak bytes against prompt tokens; `worst` as in `Growth`."""

    fixed: float
    per_token: float
    worst: float | None

    def prompt_at(self, num_bytes: float) -> float:
        """The prompt whose peak is `num_bytes`."""
        return (num_bytes - self.fixed) / self.per_token


@dataclass(frozen=True)
class LongestPrompt:
    """How long a prompt reaches another mode's peak.

    Attributes:
        prompt: tokens, from the fitted line.
        ratio: to the other mode's prompt; below 1 this mode needs more memory.
        is_extrapolated: whether it lies outside of the measured prompts.
    """

    prompt: float
    ratio: float
    is_extrapolated: bool


def fit_growth(prompts: Sequence[int], seconds: Sequence[float]) -> Growth | None:
    """Least squares of the relative errors, terms not negative; None for fewer than two points.

    Two points determine two terms; the fixed one is then left out.
    """
    if len(set(prompts)) < 2:
        return None
    x, y = np.asarray(prompts, dtype=float), np.asarray(seconds, dtype=float)
    columns = np.stack([np.ones_like(x), x, x**2], axis=1) / y[:, None]
    terms = (0, 1, 2) if len(set(prompts)) > 2 else (1, 2)
    factors = nonnegative_least_squares(columns, np.ones_like(y), terms)
    errors = np.abs(columns @ factors - 1)
    worst = float(errors.max()) if len(prompts) > len(terms) else None
    return Growth(*map(float, factors), worst)


def nonnegative_least_squares(
    columns: np.ndarray, target: np.ndarray, terms: Sequence[int]
) -> np.ndarray:
    """The factors >= 0 of the columns `terms` that come closest to `target`; zero elsewhere.

    Tries every subset: with three columns that is seven, and exact.
    """
    best, smallest = np.zeros(columns.shape[1]), np.inf
    scale = np.abs(columns).max(axis=0)  # P^2 beside 1 would be lost in rounding
    for size in range(1, len(terms) + 1):
        for subset in map(list, combinations(terms, size)):
            part = columns[:, subset] / scale[subset]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(((part @ found - target) ** 2).sum())
            if (found >= 0).all() and error < smallest:
                best, smallest = np.zeros(columns.shape[1]), error
                best[subset] = found / scale[subset]
    return best


def fit_line(prompts: Sequence[int], num_bytes: Sequence[int]) -> Line | None:
    """Least squares; None for fewer than two points."""
    if len(set(prompts)) < 2:
        return None
    slope, fixed = np.polyfit(prompts, num_bytes, 1)
    errors = np.abs(fixed + slope * np.asarray(prompts) - num_bytes) / np.asarray(num_bytes)
    worst = float(errors.max()) if len(prompts) > 2 else None
    return Line(float(fixed), float(slope), worst)


def longest_prompt(
    prompts: Sequence[int], num_bytes: Sequence[int], *, baseline: int, budget: int
) -> LongestPrompt | None:
    """The prompt at which a mode takes `budget` bytes, what another one takes at `baseline`.

    Args:
        prompts, num_bytes: the mode's measured peaks.

    Returns:
        None if there is no line, or if even no prompt at all takes more.
    """
    line = fit_line(prompts, num_bytes)
    if line is None or line.per_token <= 0 or line.prompt_at(budget) <= 0:
        return None
    prompt = line.prompt_at(budget)
    outside = not min(prompts) <= prompt <= max(prompts)
    return LongestPrompt(prompt, prompt / baseline, outside)


def predict_seconds(points: Sequence[tuple[int, float]], prompt: int) -> float | None:
    """Seconds at `prompt` from measured smaller prompts; None without any.

    One point says nothing of the curve's shape: it is taken to grow as P^1.5, between the linear
    layers and attention.
    """
    smaller = [(p, s) for p, s in points if p <= prompt]
    if not smaller:
        return None
    growth = fit_growth(*zip(*smaller, strict=True))
    if growth is None:
        nearest, seconds = max(smaller)
        return seconds * (prompt / nearest) ** 1.5
    return growth.seconds(prompt)
