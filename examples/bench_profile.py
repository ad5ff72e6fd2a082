"""Which operators an optimizer step of LongStraw spends its time in, phase by phase.

`bench.py --profile` runs this in the process of one cell. Recording slows operators down by some
microseconds each, so shares can be trusted and sums cannot.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench_cell import Cell, make_trainer
from bench_trainers import OurTrainer, StepEvents


@dataclass
class Operator:
    """One operator's total in one phase."""

    calls: int = 0
    seconds: float = 0.0  # on the device where there is one, else of the CPU, without its callees


@dataclass
class PhaseProfile:
    """What one phase took."""

    seconds: float = 0.0
    operators: dict[str, Operator] = field(default_factory=lambda: defaultdict(Operator))


class PhaseProfiler:
    """Records the operators of each phase that the ledger names, from the second step on."""

    def __init__(self, trainer: OurTrainer) -> None:
        self.phases: dict[str, PhaseProfile] = defaultdict(PhaseProfile)
        self.total = 0.0
        self._is_warm = False
        self._original = trainer.engine.ledger.phase
        trainer.engine.ledger.phase = self._phase  # type: ignore[method-assign]
        self._activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            self._activities.append(ProfilerActivity.CUDA)

    @contextmanager
    def _phase(self, name: str, tokens: int) -> Iterator[Any]:
        with self._original(name, tokens) as bar:
            if not self._is_warm:
                yield bar
                return
            with profile(activities=self._activities) as profiler:
                begin = time.perf_counter()
                yield bar
                seconds = time.perf_counter() - begin
        self._add(name, seconds, profiler)

    def _add(self, name: str, seconds: float, profiler: profile) -> None:
        record = self.phases[name]
        record.seconds += seconds
        for event in profiler.key_averages():
            on_device = len(self._activities) > 1
            micro = event.self_device_time_total if on_device else event.self_cpu_time_total
            operator = record.operators[event.key]
            operator.calls += event.count
            operator.seconds += micro / 1e6

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def before_optimizer(self) -> None:
        """Part of a listener of `StepEvents`."""

    def after_optimizer(self) -> None:
        """Part of a listener of `StepEvents`."""

    def end(self) -> bool:
        self.total = time.perf_counter() - self._begin
        was_warm, self._is_warm = self._is_warm, True
        return not was_warm


def run_profile(cell: Cell, folder: str, num_operators: int = 15) -> dict[str, Any]:
    """Profile one step of the cell, after a small one.

    Returns:
        By phase, with "all" first: `seconds`, and the `num_operators` operators that take most of
        it as [name, calls, seconds].
    """
    trainer = make_trainer(cell, folder)
    assert isinstance(trainer, OurTrainer)
    profiler = PhaseProfiler(trainer)
    trainer.add_callback(StepEvents(profiler))
    trainer.train()
    whole = PhaseProfile(sum(phase.seconds for phase in profiler.phases.values()))
    for phase in profiler.phases.values():
        for name, operator in phase.operators.items():
            whole.operators[name].calls += operator.calls
            whole.operators[name].seconds += operator.seconds
    return {
        name: {
            "seconds": phase.seconds,
            "operators": [
                [key, operator.calls, operator.seconds]
                for key, operator in sorted(
                    phase.operators.items(), key=lambda item: -item[1].seconds
                )[:num_operators]
            ],
        }
        for name, phase in {"all": whole, **profiler.phases}.items()
    }


def profile_text(result: dict[str, Any]) -> str:
    """The profile as tables."""
    lines, all_seconds = [], result["all"]["seconds"]
    for name, phase in result.items():
        share = phase["seconds"] / all_seconds
        lines.append(f"\n{name}: {phase['seconds']:.2f} s, {share:.0%} of all phases")
        lines.append(f"  {'operator':<58} {'calls':>8} {'self s':>8} {'share':>6}")
        for key, calls, seconds in phase["operators"]:
            part = seconds / phase["seconds"]
            lines.append(f"  {key[:58]:<58} {calls:>8,} {seconds:>8.2f} {part:>6.1%}")
    return "\n".join(lines)
