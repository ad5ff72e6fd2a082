"""Pages of host memory on their way to the device and back, while the device computes.

    IN       copy page i+1 into a slot                  (waits: slot free, page written)
    COMPUTE  read page i, add its cotangent in the slot (waits: page i is in)
    OUT      copy cotangent i-1, and captured pages, to the host   (waits: computed)

No call blocks the process; the order is kept by events:

* A slot is written again when the compute lane has read it and its cotangent has left it.
* A page is read after the copy that wrote it, and its cotangent after the last that added to it.
* Before a visit ends the compute lane has waited for every copy that was begun for it. So whatever
  the OUT lane writes to a host buffer after that, it writes behind all readers of the buffer, and
  the buffers of freed pages may be used again at once.

Knows pages and lanes; knows nothing of budgets, or of who reads.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .departures import MAX_HELD_BYTES, Departures
from .lanes import Event, Lane, Lanes
from .pages import Page

NUM_SLOTS = 2
"""One page is computed on while the next comes in. More would not be faster: the bus carries one
page at a time."""

_ALIGNMENT = 512
_PARTS = ("key", "value", "key_cotangent", "value_cotangent")


@dataclass(eq=False)
class Slot:
    """Device memory that holds one page at a time.

    Attributes:
        page: the page it holds.
        key, value: the page's, in its dtype; absent in a visit to cotangents only.
        key_cotangent, value_cotangent: room for the page's cotangents, in their dtype.
        has_cotangent: whether that room holds what earlier readers left.
    """

    memory: Tensor | None = None
    page: Page | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    key_cotangent: Tensor | None = None
    value_cotangent: Tensor | None = None
    has_cotangent: bool = False
    # When the page is in, when the compute lane has read it, when its cotangent has left.
    arrived: Event | None = None
    consumed: Event | None = None
    departed: Event | None = None


class Staging:
    """Brings pages to one device in order, and their cotangents back.

    One visit at a time: beginning another ends the one before.

    Args:
        bring: called before a page is copied, to have it in host memory.

    Attributes:
        nbytes: device memory of the slots; the largest page seen sets it.
        peak_bytes: the most it was, sources of copies in flight included.
    """

    def __init__(
        self,
        lanes: Lanes,
        num_slots: int = NUM_SLOTS,
        *,
        bring: Callable[[Page], None] = lambda page: None,
    ) -> None:
        self.lanes = lanes
        self.nbytes = 0
        self.peak_bytes = 0
        self._bring = bring
        self._slots = [Slot() for _ in range(num_slots)]
        self._turn = 0
        self._ahead: deque[Slot] = deque()  # on their way, not handed out yet
        self._open: Slot | None = None  # handed out
        self._visit: object = None
        self._departures = Departures(lanes)

    # ---------------------------------------------------------------- host to device

    def visit(
        self, pages: Sequence[Page], *, with_state: bool, with_cotangents: bool
    ) -> Iterator[Slot]:
        """Each page in a slot, in order; the compute lane may read it until the next is asked for.

        Args:
            with_state: bring keys and values.
            with_cotangents: bring what earlier readers left on pages that need cotangents, and
                make room for more.
        """
        self._end_visit()
        self._departures.drop_copied()
        visit = self._visit = object()
        num_begun = 0
        try:
            for index, page in enumerate(pages):
                for ahead in pages[num_begun : index + len(self._slots)]:
                    self._fetch(ahead, with_state, with_cotangents and ahead.needs_cotangent)
                    num_begun += 1
                slot = self._open = self._ahead.popleft()
                assert slot.page is page and slot.arrived is not None
                self.lanes.wait(Lane.COMPUTE, slot.arrived)
                if with_state:
                    self._departures.drop_behind(page.written)
                yield slot
                assert self._visit is visit, "a visit went on after another had begun"
                self._close_open()
        finally:
            if self._visit is visit:
                self._end_visit()

    def _fetch(self, page: Page, with_state: bool, with_cotangents: bool) -> None:
        self._bring(page)
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        self._give_room(slot, page, with_state, with_cotangents)
        self._wait_until_free(slot)
        if with_state:
            self._copy_in(page.written, (slot.key, page.key), (slot.value, page.value))
        slot.has_cotangent = with_cotangents and page.key_cotangent is not None
        if slot.has_cotangent:
            self._copy_in(
                page.cotangent_written,
                (slot.key_cotangent, page.key_cotangent),
                (slot.value_cotangent, page.value_cotangent),
            )
        slot.arrived = page.fetched = self.lanes.record(Lane.IN)
        self._ahead.append(slot)

    def _wait_until_free(self, slot: Slot) -> None:
        for event in (slot.consumed, slot.departed):
            if event is not None:
                self.lanes.wait(Lane.IN, event)
        slot.departed = None

    def _copy_in(self, written: Event | None, *pairs: tuple[Tensor | None, Tensor | None]) -> None:
        if written is not None:
            self.lanes.wait(Lane.IN, written)
        for target, source in pairs:
            assert target is not None and source is not None
            self.lanes.copy(Lane.IN, target, source)

    def _close_open(self) -> None:
        if self._open is not None:
            self._open.consumed = self.lanes.record(Lane.COMPUTE)
            self._open = None

    def _end_visit(self) -> None:
        """Also for a visit that was broken off: nobody will read what is still on its way."""
        self._close_open()
        while self._ahead:
            slot = self._ahead.popleft()
            assert slot.arrived is not None
            self.lanes.wait(Lane.COMPUTE, slot.arrived)
            slot.consumed = self.lanes.record(Lane.COMPUTE)
        self._visit = None

    def _give_room(self, slot: Slot, page: Page, with_state: bool, with_cotangents: bool) -> None:
        """Cut the slot's memory for `page`; get more if it is too small."""
        # A snapshot's two tensors have a dtype each.
        dtypes = [page.key.dtype, page.value.dtype] if with_state else [None, None]
        dtypes += [page.cotangent_dtype if with_cotangents else None] * 2
        shapes = [page.key.shape, page.value.shape] * 2
        offset, ranges = 0, []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            size = 0 if dtype is None else math.prod(shape) * dtype.itemsize
            ranges.append(slice(offset, offset + size))
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        memory = slot.memory
        if memory is None or memory.numel() < offset:
            memory = self._replace_memory(slot, offset)
        slot.page = page
        for name, shape, dtype, run in zip(_PARTS, shapes, dtypes, ranges, strict=True):
            setattr(slot, name, None if dtype is None else memory[run].view(dtype).view(shape))

    def _replace_memory(self, slot: Slot, num_bytes: int) -> Tensor:
        self._drop_memory(slot)
        slot.memory = self.lanes.device_bytes(num_bytes)
        # The allocator may hand out memory that queued work of the compute lane still uses.
        slot.consumed = self.lanes.record(Lane.COMPUTE)
        self.nbytes += num_bytes
        self._note_peak()
        return slot.memory

    # ---------------------------------------------------------------- device to host

    def add_cotangent(self, page: Page, key_grad: Tensor, value_grad: Tensor) -> None:
        """Add to the cotangents of the page that is handed out, and send the sum to the host.

        The sum is made on the device, in the dtype of the cotangents: the host would have to wait
        for the gradient first, and adds a tenth as fast. Once per page and visit.
        """
        slot = self._open
        assert slot is not None and slot.page is page, "the page is not the one handed out"
        assert slot.departed is None, "a page's cotangent was added to twice in one visit"
        sums = ((slot.key_cotangent, key_grad), (slot.value_cotangent, value_grad))
        for target, gradient in sums:
            assert target is not None, "the visit was not made for cotangents"
            if slot.has_cotangent:
                self.lanes.add(target, gradient)
            else:
                self.lanes.copy(Lane.COMPUTE, target, gradient)
        slot.departed = page.cotangent_written = self._copy_out(
            (page.key_cotangent, slot.key_cotangent),
            (page.value_cotangent, slot.value_cotangent),
        )

    def take_cotangent(self, key_target: Tensor, value_target: Tensor) -> None:
        """Copy the cotangents of the page that is handed out to device tensors of any dtype."""
        slot = self._open
        assert slot is not None and slot.has_cotangent, "no cotangent is handed out"
        for target, source in (
            (key_target, slot.key_cotangent),
            (value_target, slot.value_cotangent),
        ):
            assert source is not None
            self.lanes.copy(Lane.COMPUTE, target, source)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of what a visit hands out, for longer than the visit."""
        made = [torch.empty_like(tensor) for tensor in tensors]
        for target, source in zip(made, tensors, strict=True):
            self.lanes.copy(Lane.COMPUTE, target, source)
        return made

    def write(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Event:
        """Copy device tensors to pinned ones, given as (target, source).

        The sources are kept until they are copied, `MAX_HELD_BYTES` of them at most.

        Returns:
            The event behind which the targets may be read.
        """
        self._departures.drop_copied()
        event = self._copy_out(*copies)
        self._departures.hold(event, [source for _, source in copies])
        self._note_peak()
        self._departures.drop_above(MAX_HELD_BYTES)
        return event

    def _copy_out(self, *pairs: tuple[Tensor | None, Tensor | None]) -> Event:
        self.lanes.wait(Lane.OUT, self.lanes.record(Lane.COMPUTE))
        for target, source in pairs:
            assert target is not None and source is not None
            self.lanes.copy(Lane.OUT, target, source)
        return self.lanes.record(Lane.OUT)

    # ---------------------------------------------------------------- memory

    def free(self) -> None:
        """Drop the device memory; a later visit allocates again."""
        self._end_visit()
        self._departures.drop_above(0)
        for slot in self._slots:
            self._drop_memory(slot)

    def synchronize(self) -> None:
        """Block until no copy is on its way."""
        self._end_visit()
        for lane in (Lane.IN, Lane.OUT):
            self.lanes.record(lane).synchronize()

    def _drop_memory(self, slot: Slot) -> None:
        if slot.memory is None:
            return
        # The compute lane has waited for what came in; now for what goes out.
        if slot.departed is not None:
            self.lanes.wait(Lane.COMPUTE, slot.departed)
            slot.departed = None
        self.nbytes -= slot.memory.numel()
        self.lanes.retire(slot.memory)
        slot.page = slot.memory = None
        slot.key = slot.value = slot.key_cotangent = slot.value_cotangent = None

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.nbytes + self._departures.nbytes)
