"""The three queues that work on one device waits in, and the events that order them.

Knows streams and memory; knows nothing of pages. `CudaLanes` is a dozen lines on purpose: what is
copied when, and who waits for whom, is decided in `staging.py` against this interface, so that it
can be driven on a CPU by lanes that run late and out of order.
"""

from enum import Enum
from typing import Protocol

import torch
from torch import Tensor


class Lane(Enum):
    """A queue. Work in one lane runs in order; between lanes only events order anything."""

    COMPUTE = "compute"  # the stream that the model runs on
    IN = "in"  # copies from the host to the device
    OUT = "out"  # copies from the device to the host


class Event(Protocol):
    """A point in a lane."""

    def query(self) -> bool:
        """Whether everything before the point is done."""
        ...

    def synchronize(self) -> None:
        """Block this process until everything before the point is done."""
        ...


class Lanes(Protocol):
    """Work on one device. Every call queues and returns at once."""

    def record(self, lane: Lane) -> Event:
        """The point behind all that was queued in `lane` so far."""
        ...

    def wait(self, lane: Lane, event: Event) -> None:
        """Let what is queued in `lane` from now on begin after `event`; the caller goes on."""
        ...

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        """`target.copy_(source)` in `lane`. A copy lane keeps neither of the two alive."""
        ...

    def add(self, target: Tensor, source: Tensor) -> None:
        """`target += source` in the compute lane."""
        ...

    def device_bytes(self, num_bytes: int) -> Tensor:
        """Uninitialized device memory that the compute lane may use at once, uint8."""
        ...

    def pinned_bytes(self, num_bytes: int) -> Tensor:
        """Uninitialized page-locked host memory, uint8."""
        ...

    def retire(self, memory: Tensor) -> None:
        """Say that `memory` of `device_bytes` is dropped, when the compute lane has waited for all
        other users of it."""
        ...

    def let_go(self, tensors: tuple[Tensor, ...]) -> None:
        """Say that tensors of the model are dropped. They last until the compute lane is here."""
        ...


class CudaLanes:
    """Two streams for the two directions, beside whatever stream is current.

    Two, not one: the bus carries both directions at a time, and a page that is awaited must not
    stand behind cotangents that are leaving.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copy_streams = {
            Lane.IN: torch.cuda.Stream(device),
            Lane.OUT: torch.cuda.Stream(device),
        }

    def record(self, lane: Lane) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream(lane).wait_event(event)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream(lane)):
            target.copy_(source, non_blocking=True)

    def add(self, target: Tensor, source: Tensor) -> None:
        target += source

    def device_bytes(self, num_bytes: int) -> Tensor:
        # Outlives the caller's mode: memory made in inference mode could not be written outside.
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pinned_bytes(self, num_bytes: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def retire(self, memory: Tensor) -> None:
        # The allocator orders reuse behind the stream of the allocation only, and the current
        # stream may be another one by now.
        for lane in Lane:
            memory.record_stream(self._stream(lane))

    def let_go(self, tensors: tuple[Tensor, ...]) -> None:
        """Nothing to do: the allocator uses their memory again in the order of their stream."""

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._copy_streams.get(lane) or torch.cuda.current_stream(self.device)


def lanes_between(home: torch.device, device: torch.device) -> Lanes | None:
    """Lanes that bring pages from `home` to `device`; None where there is nothing to overlap."""
    if home.type == "cpu" and device.type == "cuda":
        return CudaLanes(device)
    return None
