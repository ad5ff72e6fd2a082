"""A device without a GPU: lanes whose work runs as late, or as much out of order, as events allow.

Memory is CPU memory filled with NaN. A copy first fills its target with NaN and then, at any time
until somebody has waited for it, with the source; it does not keep its source alive.
"""

import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.state.lanes import Lane

NAN_BYTE = 0xFF  # in every byte: NaN in bf16, fp32 and fp64


class WrittenAfterwards(Exception):
    """A copy ran into memory that had been given up."""


@dataclass(eq=False)
class LateEvent:
    lanes: "LateLanes"
    lane: Lane
    is_done: bool = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.lanes.run_until(self)


class LateLanes:
    """Implements `Lanes`.

    Args:
        order: lanes that run first when several could. None takes a random one, and runs some work
            whenever more is queued, so that the caller is not always far ahead.
        seed: of the random choice.
        compute_at_once: run the compute lane when it is given work, as code does that computes
            with torch directly; the copy lanes run when they are waited for and not before.
        ignored: waits (who, for whom) that are left out: a planted mistake.
    """

    def __init__(
        self,
        order: tuple[Lane, ...] | None = None,
        seed: int = 0,
        *,
        compute_at_once: bool = False,
        ignored: tuple[Lane, Lane] | None = None,
    ) -> None:
        self._order = order
        self._random = random.Random(seed)
        self._compute_at_once = compute_at_once
        self._ignored = ignored
        self._queues: dict[Lane, deque[LateEvent | Callable[[], None] | _Wait]] = {
            lane: deque() for lane in Lane
        }
        self._retired: list[Tensor] = []
        self.num_copies = dict.fromkeys(Lane, 0)
        self.num_synchronized = 0

    # ---------------------------------------------------------------- Lanes

    def record(self, lane: Lane) -> LateEvent:
        event = LateEvent(self, lane)
        self._queue(lane, event)
        return event

    def wait(self, lane: Lane, event: LateEvent) -> None:
        if (lane, event.lane) != self._ignored:
            self._queue(lane, _Wait(event))

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape
        self.num_copies[lane] += 1
        if lane is Lane.COMPUTE:
            self._queue(lane, lambda: target.copy_(source))
            return
        assert target.dtype == source.dtype, "a copy between devices would convert on the host"
        to, of = _Weak(target), _Weak(source)
        self._queue(lane, lambda: to.tensor().view(torch.uint8).fill_(NAN_BYTE))
        self._queue(lane, lambda: to.tensor().copy_(of.tensor()))

    def add(self, target: Tensor, source: Tensor) -> None:
        self.compute(lambda: target.add_(source))

    def device_bytes(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), NAN_BYTE, dtype=torch.uint8)

    def pinned_bytes(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), NAN_BYTE, dtype=torch.uint8)

    def retire(self, memory: Tensor) -> None:
        # The next owner writes in the order of the compute lane, and `finish` looks whether a
        # copy that came late wrote over it.
        self._retired.append(memory)
        self.compute(lambda: memory.fill_(NAN_BYTE))

    def let_go(self, tensors: tuple[Tensor, ...]) -> None:
        self.compute(lambda: tensors)  # what is queued keeps them

    # ---------------------------------------------------------------- for tests

    def compute(self, work: Callable[[], object]) -> None:
        """Queue work of the model."""
        self._queue(Lane.COMPUTE, work)

    def finish(self) -> None:
        """Run everything; raise if memory was written after it was given up."""
        while any(self._queues.values()):
            self._step()
        if not all(bool((memory == NAN_BYTE).all()) for memory in self._retired):
            raise WrittenAfterwards

    def run_until(self, event: LateEvent) -> None:
        """Block until `event`, as the process would."""
        self.num_synchronized += 1
        while not event.is_done:
            if self._compute_at_once:
                self._run_for(event.lane)
            else:
                self._step()

    # ---------------------------------------------------------------- running

    def _queue(self, lane: Lane, item) -> None:
        self._queues[lane].append(item)
        if self._compute_at_once:
            while self._queues[Lane.COMPUTE]:
                self._run_for(Lane.COMPUTE)
        elif self._order is None:
            for _ in range(self._random.randrange(3)):
                if any(self._can_run(lane) for lane in Lane):
                    self._step()

    def _run_for(self, lane: Lane) -> None:
        """Run the head of a lane, and before it only what it waits for."""
        head = self._queues[lane][0]
        while isinstance(head, _Wait) and not head.event.is_done:
            self._run_for(head.event.lane)
        self._run_head(lane)

    def _step(self) -> None:
        """Run the head of one lane that can."""
        lanes = [lane for lane in self._order or Lane if self._can_run(lane)]
        assert lanes, "every lane waits for another"
        self._run_head(lanes[0] if self._order else self._random.choice(lanes))

    def _can_run(self, lane: Lane) -> bool:
        queue = self._queues[lane]
        return bool(queue) and not (isinstance(queue[0], _Wait) and not queue[0].event.is_done)

    def _run_head(self, lane: Lane) -> None:
        item = self._queues[lane].popleft()
        if isinstance(item, LateEvent):
            item.is_done = True
        elif not isinstance(item, _Wait):
            item()


@dataclass
class _Wait:
    event: LateEvent


class _Weak:
    """A tensor that is not kept alive; NaN once it is gone, as memory is that another owner has."""

    def __init__(self, given: Tensor) -> None:
        self._storage = weakref.ref(given.untyped_storage())
        self._dtype = given.dtype
        self._layout = given.storage_offset(), given.shape, given.stride()

    def tensor(self) -> Tensor:
        storage = self._storage()
        if storage is None:
            return torch.full(self._layout[1], torch.nan, dtype=self._dtype)
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)
