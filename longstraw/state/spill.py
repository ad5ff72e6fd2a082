"""The pages of a store that lie in files, and the host memory that they pass through.

    memory   pages that stay, and a few that pass            at most `limit_bytes`
    files    every page that does not stay

Who stays is settled when a page is written, first come, first served. A cache of the pages used
last would do worse than none: readers go through a layer's pages in order, again and again, so what
was used last is what is needed last. The pages written first have the most readers, every later
chunk; and since each visit begins with them, the first pages of the files come in meanwhile.

Pages that pass are read ahead of their reader, in its order. What is new on them is written behind
it, and memory is given up only when that is done: until then a page is readable where it is.

Knows pages, files and memory; knows nothing of devices, or of what is computed.
"""

import os
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from ..errors import ConfigError, PageRoomError
from .page_files import Extent, PageFiles
from .pages import Page
from .pinned import HostBuffers
from .place import Part, Place

NUM_AHEAD = 3
"""Pages that are on their way while one is read."""

NUM_KEPT = 2
"""Pages handed out last: with `Staging`, the one computed on and the one that comes after it."""

NUM_PASSING = 8
"""Pages that memory is set aside for: those above, and some whose writes are not done."""


class Spill:
    """Decides which pages stay in memory, and brings the others in and out.

    Attributes:
        limit_bytes: most bytes of pages in memory; None for no limit. May change at any time.
        disk_limit_bytes: most bytes of pages in files.
        staying_bytes: of pages that stay, with room for the cotangents they will have.
        passing_bytes: of pages in memory that lie in files, counted in the same way.
        disk_bytes: of pages in files.
    """

    def __init__(self, files: PageFiles, buffers: HostBuffers) -> None:
        self.files = files
        self.limit_bytes: int | None = None
        self.disk_limit_bytes: int | None = None
        self.staying_bytes = self.passing_bytes = self.disk_bytes = 0
        self._buffers = buffers
        # With the bytes they are counted with.
        self._staying: dict[Page, int] = {}  # oldest first
        self._passing: dict[Page, int] = {}  # in the order of their last use
        self._admitted: dict[Page, int] = {}  # with the sizes that count for the reserve
        self._sizes: Counter[int] = Counter()
        self._new: dict[Part, Page] = {}
        self._coming: deque[Page] = deque()
        self._wanted: tuple[bool, bool] = (True, False)
        self._kept: deque[Page] = deque(maxlen=NUM_KEPT)

    @classmethod
    def of_store(
        cls, device: torch.device, folder: str | os.PathLike[str], buffers: HostBuffers
    ) -> "Spill":
        """Files in `folder` for pages whose home is `device`; see `PageStore` for the errors."""
        if device.type != "cpu":
            raise ConfigError(
                f"spill_dir={str(folder)!r} (longstraw_spill_dir in the trainer) keeps pages in "
                f"files that exceed host memory, and the pages are on {device}. Put them on "
                "the host: page_device='host' (longstraw_page_device)."
            )
        return cls(PageFiles(folder), buffers)

    @property
    def reserved_bytes(self) -> int:
        """Memory that no page can stay in, because others pass through it."""
        return NUM_PASSING * self.largest_page

    @property
    def largest_page(self) -> int:
        """Bytes of the largest page that there is, with its cotangents."""
        return max(self._sizes, default=0)

    # ---------------------------------------------------------------- a page's life

    def admit(self, page: Page) -> None:
        """Take charge of a new page and make room for it, before it is given memory.

        Raises:
            MemoryPlanError: it may not stay, and exceeds what files may take.
        """
        self._end_visit()  # pages are written between visits
        self._admitted[page] = page.full_bytes
        self._sizes[page.full_bytes] += 1
        try:
            self._settle(page)
        except BaseException:
            self._dismiss(page)
            raise

    def _settle(self, page: Page) -> None:
        taken = self.staying_bytes + self.reserved_bytes
        stays = self.limit_bytes is None or taken + page.full_bytes <= self.limit_bytes
        if not stays:
            self._require_disk(page.nbytes)
        self._evict_for(page.full_bytes)
        if stays:
            self._staying[page] = page.full_bytes
            self.staying_bytes += page.full_bytes
        else:
            self._give_place(page)

    def changed(self, page: Page, part: Part) -> None:
        """Say that memory holds something new, or will behind the page's event."""
        part.is_new = True
        self._new[part] = page
        self.write_behind()

    def prepare_change(self, page: Page) -> None:
        """Have a page's cotangents in memory, or room for its first, and nobody reading them."""
        is_first = page.key_cotangent is None
        if is_first:
            self._make_room_for_cotangents(page)
        if page.place is not None:
            self._load(page, (page.place.cotangents,))
            page.place.cotangents.wait()
            if is_first:  # now, when nothing can fail before they are there
                self.disk_bytes += page.cotangent_bytes

    def _make_room_for_cotangents(self, page: Page) -> None:
        # Nothing where the page was written with room for them, or lies in a file.
        more = 0
        if page.place is None:
            more = page.state_bytes + page.cotangent_bytes - self._staying[page]
            self._evict_for(more)
        if page.place is None:  # still
            self._staying[page] += more
            self.staying_bytes += more
        else:
            self._require_disk(page.cotangent_bytes)

    def release(self, page: Page) -> None:
        """Forget a page; its buffers and its slot may be used again when this returns."""
        _synchronize(page)
        self._dismiss(page)
        if page.place is None:
            self.staying_bytes -= self._staying.pop(page)
            return
        for part in page.place.parts:
            part.abandon()
            self._new.pop(part, None)
        self.disk_bytes -= page.nbytes
        self._stop_passing(page)
        self.files.give_back(page.place.slot)
        page.place = None

    def _dismiss(self, page: Page) -> None:
        """Take the page out of what the reserve is made for."""
        size = self._admitted.pop(page)
        self._sizes[size] -= 1
        if not self._sizes[size]:
            del self._sizes[size]

    # ---------------------------------------------------------------- visits

    def begin_visit(
        self, pages: Sequence[Page], *, with_state: bool, with_cotangents: bool
    ) -> None:
        """Say which pages will be asked for next, and what of them."""
        self._end_visit()
        self._coming.extend(page for page in pages if page.place is not None)
        self._wanted = with_state, with_cotangents
        self._read_ahead()

    def bring(self, page: Page) -> None:
        """Have the page in memory now, and those after it soon.

        Raises:
            PageFileError: what the file holds is not what was written.
        """
        if page.place is None:
            return
        if self._coming and self._coming[0] is page:
            self._coming.popleft()
        self._kept.append(page)
        parts = self._wanted_parts(page)
        self._load(page, parts)
        self._read_ahead()
        self.write_behind()
        for part in parts:
            if part.is_read:  # while a part is written, memory holds it
                part.wait()

    def write_behind(self) -> None:
        """Begin the writes of what is new and has arrived in memory."""
        for part, page in list(self._new.items()):
            event = getattr(page, part.event)
            if event is None or event.query():
                self._write(page, part)

    def _end_visit(self) -> None:
        self._coming.clear()
        self._kept.clear()

    def _read_ahead(self) -> None:
        for page in islice(self._coming, NUM_AHEAD):
            needs_room = page not in self._passing
            if needs_room and not self._evict_for(page.full_bytes, at_once=True):
                return  # never wait for a page that is not needed yet
            self._load(page, self._wanted_parts(page))

    def _wanted_parts(self, page: Page) -> tuple[Part, ...]:
        assert page.place is not None
        with_state, with_cotangents = self._wanted
        with_cotangents = with_cotangents and page.key_cotangent is not None
        return (page.place.state,) * with_state + (page.place.cotangents,) * with_cotangents

    def _load(self, page: Page, parts: Iterable[Part]) -> None:
        """Begin to read what is not in memory."""
        assert page.place is not None
        self.passing_bytes -= self._passing.pop(page, 0)
        self._evict_for(page.full_bytes)
        self.passing_bytes += page.full_bytes
        self._passing[page] = page.full_bytes
        for part in parts:
            tensors = [getattr(page, name) for name in part.names]
            if tensors[0] is None or not tensors[0].is_meta:
                continue
            tensors = [self._buffers.take(t.shape, t.dtype) for t in tensors]
            for name, tensor in zip(part.names, tensors, strict=True):
                setattr(page, name, tensor)
            part.transfer = self.files.read(page.place.slot, part.extent, tensors)
            part.is_read = True

    # ---------------------------------------------------------------- room

    def _evict_for(self, num_bytes: int, *, at_once: bool = False) -> bool:
        """Give up memory of pages in files until `num_bytes` more fit.

        Args:
            at_once: give up only what needs no waiting, and say whether it was enough.
        """
        while self._is_full_for(num_bytes):
            needed = {*self._kept, *(islice(self._coming, NUM_AHEAD) if at_once else ())}
            page = next((page for page in self._passing if page not in needed), None)
            if at_once and (page is None or not _is_written(page)):
                return False
            if page is None:
                self._send_last_away(num_bytes)
            else:
                self._evict(page)
        return True

    def _is_full_for(self, num_bytes: int) -> bool:
        if self.limit_bytes is None:
            return False
        return self.staying_bytes + self.passing_bytes + num_bytes > self.limit_bytes

    def _evict(self, page: Page) -> None:
        assert page.place is not None
        _synchronize(page)
        for part in page.place.parts:
            if part.is_new:
                self._write(page, part)
            if part.is_read:
                part.abandon()  # nobody waited for it
            else:
                part.wait()
        self._stop_passing(page)

    def _stop_passing(self, page: Page) -> None:
        """Leave of the page's memory the shapes."""
        self.passing_bytes -= self._passing.pop(page, 0)
        assert page.place is not None
        for part in page.place.parts:
            part.transfer, part.is_read = None, False
            for name in part.names:
                tensor = getattr(page, name)
                if tensor is not None and not tensor.is_meta:
                    self._buffers.give_back(tensor)
                    setattr(page, name, torch.empty_like(tensor, device="meta"))

    def _send_last_away(self, num_bytes: int) -> None:
        """Let the page that came last stay no longer: larger ones have come, or less is free."""
        if not self._staying:
            raise PageRoomError(
                f"pages of {num_bytes:,} bytes pass through host memory, {NUM_KEPT + 1} at a time "
                f"or more, and {self.limit_bytes or 0:,} bytes are left for pages there. Raise "
                "state_budget_bytes (longstraw_state_budget_gib in the trainer), give the job more "
                "memory, or lower page_size (longstraw_page_size)."
            )
        page = next(reversed(self._staying))
        self._require_disk(page.nbytes)
        self._give_place(page)  # first: it may find no room in the folder
        self.staying_bytes -= self._staying.pop(page)
        assert page.place is not None
        for part in page.place.parts:
            if getattr(page, part.names[0]) is not None:
                self.changed(page, part)

    def _give_place(self, page: Page) -> None:
        behind = Extent(page.state_bytes)
        page.place = Place(
            # Always with room for cotangents: it takes no space on the disk until it is written.
            self.files.take(page.state_bytes + page.cotangent_bytes),
            Part(("key", "value"), "written", Extent(0)),
            Part(("key_cotangent", "value_cotangent"), "cotangent_written", behind),
        )
        self._passing[page] = page.full_bytes
        self.passing_bytes += page.full_bytes
        self.disk_bytes += page.nbytes

    def _require_disk(self, num_bytes: int) -> None:
        """Raise `PageRoomError` if so many bytes more would exceed the limit of the files."""
        limit = self.disk_limit_bytes
        if limit is not None and self.disk_bytes + num_bytes > limit:
            raise PageRoomError(
                f"{num_bytes:,} bytes of a page do not fit beside the {self.disk_bytes:,} in files "
                f"in {self.files.folder}, which may take {limit:,}. Raise spill_budget_bytes "
                "(longstraw_spill_budget_gib in the trainer), free space there, or name a larger "
                "disk with spill_dir (longstraw_spill_dir)."
            )

    def _write(self, page: Page, part: Part) -> None:
        assert page.place is not None
        del self._new[part]
        part.is_new = False
        part.wait()  # one transfer at a time, so that the last one written is the newest
        tensors = [getattr(page, name) for name in part.names]
        part.transfer = self.files.write(page.place.slot, part.extent, tensors)
        part.is_read = False


def _is_written(page: Page) -> bool:
    """Whether the page's memory can be given up without waiting."""
    assert page.place is not None
    return all(event.query() for event in page.events) and not any(
        part.is_new or (part.transfer is not None and not part.transfer.done())
        for part in page.place.parts
    )


def _synchronize(page: Page) -> None:
    """Block until no copy from or to the page's memory is queued on a device."""
    for event in page.events:
        event.synchronize()
