"""Seconds and bytes of one case.

Knows clocks and memory; knows nothing of what runs.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..audit.memory import PeakTensorBytes
from ..config import EngineConfig
from .cases import Case, Shape


@dataclass(frozen=True)
class Measurement:
    """What one case took.

    Attributes:
        seconds: of every repeat, in order, without the warm-up.
        peak_bytes: most bytes of tensors beside those that stood before: weights, and for a replay
            or a prompt's backward the captured prompt.
        tokens: that passed through the model in one repeat.
    """

    case: str
    seconds: list[float]
    peak_bytes: int
    tokens: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def percentiles(self) -> tuple[float, float]:
        """The 20th and the 80th; with one repeat that one."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        cuts = statistics.quantiles(self.seconds, n=5, method="inclusive")
        return cuts[0], cuts[-1]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a record."""
        low, high = self.percentiles
        return {
            "case": self.case,
            "seconds": {"median": self.median, "p20": low, "p80": high, "all": self.seconds},
            "peak_bytes": self.peak_bytes,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.median,
        }


def measure(
    case: Case,
    model: Any,
    shape: Shape,
    config: EngineConfig,
    repeats: int = 5,
    done: Callable[[], object] = lambda: None,
) -> Measurement:
    """Run the case once for its memory, which is the warm-up, and `repeats` times for its time.

    Args:
        done: called after each run.
    """
    tokens = shape.make(model)
    device = next(model.parameters()).device
    seconds: list[float] = []
    peak_bytes = 0
    for repeat in range(1 + repeats):
        model.zero_grad(set_to_none=True)
        run = case.prepare(model, tokens, config)
        if repeat == 0:
            peak_bytes = _peak_bytes(run, device)
        else:
            _wait(device)
            begin = time.perf_counter()
            run()
            _wait(device)
            seconds.append(time.perf_counter() - begin)
        done()
    model.zero_grad(set_to_none=True)
    return Measurement(case.name, seconds, peak_bytes, case.count_tokens(shape))


def _peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    if device.type != "cuda":
        with PeakTensorBytes() as counter:
            run()
        return counter.peak_bytes
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
