"""Where an update's time and memory go, phase by phase; progress bars for what takes long.

Knows phases, seconds, tokens and bytes; knows nothing of what a phase does.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm

PHASES = ("rollout", "capture", "score", "prompt_drift", "loss", "replay", "prompt_backward")
"""The phases of an update in their order."""

_BAR_FROM_TOKENS = 1024


@dataclass
class PhaseRecord:
    """Totals of one phase.

    Attributes:
        seconds: wall time.
        tokens: tokens passed through the model.
        peak_bytes: highest memory while the phase ran: allocated on the device with CUDA, else
            resident memory of the process (0 where the system does not tell).
        calls: how often the phase was entered.
    """

    phase: str
    seconds: float = 0.0
    tokens: int = 0
    peak_bytes: int = 0
    calls: int = 0


class Ledger:
    """Adds up what each phase took.

    Args:
        announce: told the name of each phase as it begins.

    Attributes:
        state_bytes: most bytes of captured state and cotangents held so far.
        num_captures: segments captured: prompts, turns that continue them, runs that several share.
    """

    def __init__(
        self,
        device: torch.device,
        progress: bool = False,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self.device = device
        self.progress = progress
        self._announce = announce
        self.state_bytes = 0
        self.num_captures = 0
        self._measurement: str | None = None
        self._taken: dict[str, float] = {}
        self._records = {phase: PhaseRecord(phase) for phase in PHASES}

    @contextmanager
    def phase(self, name: str, tokens: int) -> Iterator["tqdm"]:
        """Account for what runs inside; yields a bar to `update` by tokens done."""
        name = self._measurement or name
        record = self._records[name]
        show = self.progress and tokens >= _BAR_FROM_TOKENS
        if self._announce is not None:
            self._announce(f"{name}, call {record.calls + 1}")
        _reset_peak(self.device)
        begin = time.perf_counter()
        bar = tqdm(total=tokens, desc=name, unit="tok", leave=False, disable=not show)
        try:
            with bar:
                yield bar
        finally:
            record.seconds += time.perf_counter() - begin
            record.tokens += tokens
            record.calls += 1
            record.peak_bytes = max(record.peak_bytes, _peak_bytes(self.device))

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Account for phases inside under `name`: they are no part of the update.

        What they capture does not count in `num_captures`.
        """
        num_captures = self.num_captures
        self._measurement = name
        try:
            yield
        finally:
            self._measurement = None
            self.num_captures = num_captures

    def note_state(self, num_bytes: int) -> None:
        """Keep the most bytes of state that were held."""
        self.state_bytes = max(self.state_bytes, num_bytes)

    def add_tokens(self, phase: str, tokens: int) -> None:
        """Add tokens that were only known after the phase."""
        self._records[phase].tokens += tokens

    def table(self) -> list[dict[str, object]]:
        """One record per phase that ran, in order: phase, seconds, tokens, peak_bytes, calls."""
        return [asdict(record) for record in self._records.values() if record.calls]

    def peak_bytes(self) -> dict[str, int]:
        """The highest memory so far in each phase that ran; 0 where the system does not tell."""
        return {phase: r.peak_bytes for phase, r in self._records.items() if r.calls}

    def take_seconds(self) -> dict[str, float]:
        """Seconds per phase since the last call of this method."""
        now = {phase: record.seconds for phase, record in self._records.items()}
        taken = {phase: now[phase] - self._taken.get(phase, 0.0) for phase in now}
        self._taken = now
        return {phase: seconds for phase, seconds in taken.items() if seconds > 0}


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        # Linux: "5" resets the process's high-water mark of resident memory.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # elsewhere the mark only grows


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
