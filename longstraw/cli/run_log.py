"""What a training run has logged: series of numbers by name, read from `trainer_state.json`.

Knows the file and the names under which TRL and LongStraw log; knows nothing of how it is drawn.
"""

import json
import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError

FILE = "trainer_state.json"
CAPTURES = "longstraw/captures"
CAPTURES_PER_STEP = "captures per step"


class Series(NamedTuple):
    """One metric over the run.

    Attributes:
        steps: optimizer steps at which it was logged, rising.
        values: the mean since the log before, as the trainer writes it.
    """

    steps: list[int]
    values: list[float]

    def summary(self) -> dict[str, float]:
        """first, last, min, max, mean of what was logged."""
        values = self.values
        return {
            "first": values[0],
            "last": values[-1],
            "min": min(values),
            "max": max(values),
            "mean": sum(values) / len(values),
        }


@dataclass(frozen=True)
class RunLog:
    """The log of one run.

    Attributes:
        file: what was read.
        num_steps: optimizer steps that were made.
        series: by name. What was logged as something else than a finite number is left out.
        num_left_out: by name, how many values were.
    """

    file: Path
    num_steps: int
    series: dict[str, Series]
    num_left_out: dict[str, int]

    def named(self, prefix: str) -> dict[str, Series]:
        """Series whose names begin with a prefix, by the rest of their names."""
        found = {name: s for name, s in self.series.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): series for name, series in found.items()}


def read_run(folder: Path) -> RunLog:
    """The longest log of a run.

    Args:
        folder: the run's `output_dir`, or one of its checkpoints.

    Raises:
        DataError: there is no such folder or log, or it cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Give a run's output_dir, or a checkpoint.")
    files = [folder / FILE, *folder.glob(f"checkpoint-*/{FILE}")]
    states = {file: _read_state(file) for file in files if file.is_file()}
    if not states:
        raise DataError(
            f"{folder} has no {FILE}, nor has a checkpoint-* in it. The trainer writes it into "
            "each checkpoint (save_steps), and trainer.save_state() at any time: give the folder "
            "of a run that has saved once."
        )
    file = max(states, key=lambda file: states[file].get("global_step", 0))
    log = states[file]["log_history"]
    if not log:
        raise DataError(
            f"{file} has an empty log_history: nothing was logged before it was saved. Set "
            "logging_steps below save_steps."
        )
    series, left_out = _series_of(log)
    _add_captures_per_step(series)
    return RunLog(file, int(states[file].get("global_step", 0)), series, left_out)


def _read_state(file: Path) -> dict[str, Any]:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} is not JSON ({error}). It may have been cut while it was written: remove it, "
            "or give an earlier checkpoint."
        ) from None
    log = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(log, list) or not all(isinstance(entry, dict) for entry in log):
        raise DataError(
            f"{file} has no log_history, a list of what was logged. It is not a file that the "
            "trainer wrote: give a run's output_dir."
        )
    return state


def _series_of(log: list[dict[str, Any]]) -> tuple[dict[str, Series], dict[str, int]]:
    series: dict[str, Series] = {}
    left_out: dict[str, int] = {}
    for entry in log:
        step = entry.get("step")
        for name, value in entry.items():
            if name in ("step", "epoch") or isinstance(value, bool | str):
                continue
            if not isinstance(step, int) or not _is_finite(value):
                left_out[name] = left_out.get(name, 0) + 1
                continue
            found = series.setdefault(name, Series([], []))
            found.steps.append(step)
            found.values.append(float(value))
    return series, left_out


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _add_captures_per_step(series: dict[str, Series]) -> None:
    """LongStraw logs how many captures there were so far."""
    total = series.get(CAPTURES)
    if total is None:
        return
    logged = list(zip(total.steps, total.values, strict=True))
    if total.steps[0] == 1:  # else the first is a mean over several steps
        logged.insert(0, (0, 0.0))
    made = [
        (step, (count - earlier) / (step - last))
        for (last, earlier), (step, count) in pairwise(logged)
        if step > last and count >= earlier  # less: the run was resumed, and counts anew
    ]
    if made:
        series[CAPTURES_PER_STEP] = Series([step for step, _ in made], [n for _, n in made])


def rewards_by_function(log: RunLog) -> dict[str, Series]:
    """The mean of each reward function, by its name."""
    found = {}
    for name, series in log.series.items():
        match = re.fullmatch(r"rewards/(.+)/mean", name)
        if match:
            found[match[1]] = series
    return found
