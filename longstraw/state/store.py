"""Where pages live, how readers get at them, and how many bytes they take.

Knows devices, budgets and bytes; knows nothing of layers or segments.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from ..config import EngineConfig
from ..distributed import SequenceGroup
from ..errors import MemoryPlanError
from . import shortage
from .free_memory import FreeDisk, FreeMemory
from .lanes import lanes_between
from .pages import Page, Snapshot, cotangent_dtype_for
from .pinned import HostBuffers, PinnedPool
from .spill import Spill
from .staging import Staging

AnyPage = TypeVar("AnyPage", bound=Page)


class PageStore:
    """Allocates pages and their cotangents, serves their readers, and accounts for every byte.

    Pages on the device that reads them are read where they lie. Pages on the host of a GPU lie in
    pinned memory and are copied ahead of their reader, see `Staging`; nothing blocks the process.
    With a `spill_dir`, pages that exceed the memory lie in files and pass through it, see `Spill`;
    the process waits only for a disk that is slower than its reader.

    Args:
        device: the pages' home.
        page_size: most tokens of one page.
        budget_bytes: most bytes of memory to hold; None sets no limit beside the memory there is.
        spill_dir: folder for the files of pages that exceed it; None refuses such pages.
        spill_budget_bytes: most bytes in files; None sets no limit beside what the disk has free.
        cotangent_dtype: see `EngineConfig`.
        group: ranks that hold parts of the same states; what does not fit on one fits on none.

    Attributes:
        bytes_in_use, peak_bytes: pages and cotangents held now, and the most so far.
        peak_memory_bytes, peak_disk_bytes: most of them in memory, and in files.

    Raises:
        ConfigError: pages cannot go from this device to files.
        PageFileError: no file can be made in `spill_dir`.
    """

    def __init__(
        self,
        device: torch.device,
        page_size: int,
        budget_bytes: int | None = None,
        *,
        spill_dir: str | os.PathLike[str] | None = None,
        spill_budget_bytes: int | None = None,
        cotangent_dtype: str = "float32",
        group: SequenceGroup | None = None,
    ) -> None:
        self.device = device
        self.page_size = page_size
        self.budget_bytes = budget_bytes
        self.spill_budget_bytes = spill_budget_bytes
        self.cotangent_dtype = cotangent_dtype
        self.bytes_in_use = 0
        self.peak_bytes = self.peak_memory_bytes = self.peak_disk_bytes = 0
        self.num_pages = 0
        self._group = group or SequenceGroup()
        self._memory = FreeMemory(device)
        self._buffers = HostBuffers()
        self._stagings: dict[torch.device, Staging | None] = {}
        self._spill: Spill | None = None
        if spill_dir is not None:
            self._spill = Spill.of_store(device, spill_dir, self._buffers)
            self._disk = FreeDisk(self._spill.files.folder)

    @classmethod
    def from_config(
        cls, config: EngineConfig, model_device: torch.device, group: SequenceGroup | None = None
    ) -> "PageStore":
        """The store that a config asks for, beside a model on `model_device`."""
        return cls(
            torch.device("cpu") if config.page_device == "host" else model_device,
            config.page_size,
            config.state_budget_bytes,
            spill_dir=config.spill_dir,
            spill_budget_bytes=config.spill_budget_bytes,
            cotangent_dtype=config.cotangent_dtype,
            group=group,
        )

    def describe(self) -> str:
        """Where pages are, for logs."""
        return str(self.device) + (f" and in {self._spill.files.folder}" if self._spill else "")

    def lies_on(self, device: torch.device) -> bool:
        """Whether every page is read, and its cotangents added to, where it lies on `device`."""
        return self._spill is None and self.device == device and self._staging(device) is None

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that pages take now; those that pass to or from files with all parts."""
        if self._spill is None:
            return self.bytes_in_use
        return self.bytes_in_use - self.disk_bytes + self._spill.passing_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of pages that lie in files."""
        return self._spill.disk_bytes if self._spill is not None else 0

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory held for pages: what is in use, and what is kept for the next ones."""
        return self._buffers.pool.num_bytes if self._buffers.pool is not None else 0

    @property
    def staging_bytes(self) -> int:
        """Most device memory that pages on their way took so far, beside `peak_bytes`."""
        return sum(staging.peak_bytes for staging in self._active_stagings())

    # ---------------------------------------------------------------- pages

    def write(
        self,
        key: Tensor,
        value: Tensor,
        start: int,
        needs_cotangent: bool,
        kind: type[Page] = Page,
    ) -> list[Page]:
        """Copy `[B, K, T, D]` keys and values that begin at position `start` into new pages.

        Key and value may be dropped, but not written to, as soon as this returns.
        """
        staging = self._staging(key.device)
        key, value = key.detach(), value.detach()
        # On their way to files page by page: the first may have to leave before the last has room.
        at_once = staging is not None and self._spill is None
        pages: list[Page] = []
        sources: list[tuple[Tensor, Tensor]] = []
        try:
            for offset in range(0, key.shape[-2], self.page_size):
                run = slice(offset, offset + self.page_size)
                sources.append((key[..., run, :], value[..., run, :]))
                pages.append(self._new_page(*sources[-1], start + offset, needs_cotangent, kind))
                if not at_once:
                    self._fill(pages[-1:], sources[-1:], staging)
            if at_once:
                self._fill(pages, sources, staging)
        except BaseException:
            self.release(pages)  # nobody else knows of them
            raise
        return pages

    def read(
        self,
        pages: Sequence[Page],
        device: torch.device,
        dtype: torch.dtype | None,
        *,
        with_cotangents: bool = False,
    ) -> Iterator[tuple[Page, Tensor, Tensor]]:
        """Each page in order with its key and value on `device` in `dtype`, one at a time.

        The tensors are the reader's until it asks for the next page. One reader at a time.

        Args:
            dtype: None for each tensor's own.
            with_cotangents: the reader will call `add_cotangent` for pages that need it.
        """
        staging = self._staging(device)
        assert not any(page.is_released for page in pages), "a page was read after its release"
        self._begin_visit(pages, with_state=True, with_cotangents=with_cotangents)
        if staging is None:
            for page in pages:
                self._bring(page)
                yield page, *page.read(device, dtype)
            return
        for slot in staging.visit(pages, with_state=True, with_cotangents=with_cotangents):
            assert slot.page is not None and slot.key is not None and slot.value is not None
            key, value = slot.key, slot.value
            yield slot.page, key.to(dtype or key.dtype), value.to(dtype or value.dtype)

    def release(self, pages: Iterable[Page]) -> None:
        """Give the pages' bytes back. The caller drops its references.

        Readers whose work is still queued are not disturbed: what is written to a buffer next is
        queued behind them.
        """
        for page in pages:
            assert not page.is_released, "a page was released twice"
            page.is_released = True
            self.bytes_in_use -= page.nbytes
            self.num_pages -= 1
            if self._spill is not None:
                self._spill.release(page)
            for tensor in (page.key, page.value, page.key_cotangent, page.value_cotangent):
                if tensor is not None and not tensor.is_meta:
                    self._buffers.give_back(tensor)
        if self.num_pages == 0:
            for staging in self._active_stagings():
                staging.free()

    # ---------------------------------------------------------------- snapshots

    def write_snapshot(
        self, recurrent: Tensor, conv: Tensor, position: int, needs_cotangent: bool
    ) -> Snapshot:
        """Copy a recurrent layer's state before `position` into a snapshot; see `Snapshot`."""
        source = recurrent.detach(), conv.detach()
        snapshot = self._new_page(*source, position, needs_cotangent, Snapshot)
        try:
            self._fill([snapshot], [source], self._staging(recurrent.device))
        except BaseException:
            self.release([snapshot])
            raise
        return snapshot

    def read_snapshot(self, snapshot: Snapshot, device: torch.device) -> tuple[Tensor, Tensor]:
        """Recurrent state and convolution inputs on `device`, for as long as the caller holds them.

        Not to be written to: where nothing has to be moved they are the snapshot itself.
        """
        staging, found = self._staging(device), []
        for _, *parts in self.read([snapshot], device, None):
            found = parts if staging is None else staging.copies(parts)
        recurrent, conv = found
        return recurrent, conv

    def add_snapshot_cotangent(
        self, snapshot: Snapshot, recurrent_grad: Tensor, conv_grad: Tensor
    ) -> None:
        """Add a reader's gradient of both parts to the snapshot."""
        device = recurrent_grad.device
        for page, _, _ in self.read([snapshot], device, None, with_cotangents=True):
            self.add_cotangent(page, recurrent_grad, conv_grad)

    # ---------------------------------------------------------------- cotangents

    def add_cotangent(self, page: Page, key_grad: Tensor, value_grad: Tensor) -> None:
        """Add a reader's dL/dkey and dL/dvalue to the page, in the dtype of its cotangents.

        Where pages are staged, the page is the one that `read` has handed out.
        """
        if self._spill is not None:
            self._spill.prepare_change(page)
        sums = self.cotangents_of(page)
        staging = self._staging(key_grad.device)
        if staging is not None:
            staging.add_cotangent(page, key_grad, value_grad)
        else:
            for target, gradient in zip(sums, (key_grad, value_grad), strict=True):
                # Rounded once, to the cotangents' dtype, when the sum is made.
                target += gradient.to(self.device)
        if page.place is not None and self._spill is not None:
            self._spill.changed(page, page.place.cotangents)

    def cotangents_of(self, page: Page) -> tuple[Tensor, Tensor]:
        """Where the gradients of a page's readers add up, from now on accounted for.

        A reader may add to them itself where pages lie on its device; see `lies_on`.
        """
        if page.key_cotangent is None or page.value_cotangent is None:
            before = page.nbytes
            page.key_cotangent = self._empty_cotangent(page, page.key)
            page.value_cotangent = self._empty_cotangent(page, page.value)
            self._account(page.nbytes - before)
        return page.key_cotangent, page.value_cotangent

    def visit_cotangents(self, pages: Sequence[Page], device: torch.device) -> Iterator[Page]:
        """Each page in order, for a reader on `device` that calls `add_cotangent` and reads no
        state."""
        staging = self._staging(device)
        self._begin_visit(pages, with_state=False, with_cotangents=True)
        if staging is None:
            for page in pages:
                self._bring(page)
                yield page
            return
        for slot in staging.visit(pages, with_state=False, with_cotangents=True):
            assert slot.page is not None
            yield slot.page

    def join_cotangents(
        self, pages: Sequence[Page], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What readers left on consecutive pages, as tensors like `key` and `value`.

        Args:
            pages: of tokens that are neighbours in `key` and `value`, from the first on; or one
                snapshot, with the two tensors that it was made of.
            key, value: `[B, K, T, D]`; shape, device and dtype count. Tokens behind those of the
                pages get zeros.
        """
        staging = self._staging(key.device)
        left = [page for page in pages if page.key_cotangent is not None]
        self._begin_visit(left, with_state=False, with_cotangents=True)
        is_snapshot = bool(left) and isinstance(left[0], Snapshot)
        is_full = is_snapshot or sum(page.num_tokens for page in left) == key.shape[-2]
        make = torch.empty_like if is_full else torch.zeros_like
        ends = list(accumulate(page.num_tokens for page in pages))
        columns = {
            id(p): slice(end - p.num_tokens, end) for p, end in zip(pages, ends, strict=True)
        }
        joined = [
            make(like.detach(), memory_format=torch.contiguous_format) for like in (key, value)
        ]

        def targets(page: Page) -> tuple[Tensor, Tensor]:
            run = slice(None) if is_snapshot else columns[id(page)]
            return joined[0][..., run, :], joined[1][..., run, :]

        if staging is None:
            for page in left:
                self._bring(page)
                for target, source in zip(targets(page), page.cotangents(), strict=True):
                    target.copy_(source)
        else:
            for slot in staging.visit(left, with_state=False, with_cotangents=True):
                assert slot.page is not None
                staging.take_cotangent(*targets(slot.page))
        return joined[0], joined[1]

    def _empty_cotangent(self, page: Page, like: Tensor) -> Tensor:
        if self._buffers.pool is not None:  # the first reader writes it whole
            return self._buffers.take(like.shape, page.cotangent_dtype)
        return torch.zeros(like.shape, dtype=page.cotangent_dtype, device=self.device)

    # ---------------------------------------------------------------- new pages

    def _new_page(
        self,
        key: Tensor,
        value: Tensor,
        start: int,
        needs_cotangent: bool,
        kind: type[AnyPage] = Page,
    ) -> AnyPage:
        """A page that may have memory, and as yet has none: shapes only."""
        # A snapshot has one reader per chunk, and its fp32 is what the recurrence adds up in.
        setting = "float32" if kind is Snapshot else self.cotangent_dtype
        dtype = cotangent_dtype_for(key.dtype, setting)
        shapes = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (key, value)]
        page = kind(start, shapes[0], shapes[1], needs_cotangent, dtype)
        if self._spill is not None:
            if self._spill.limit_bytes is None:
                self._set_limits(self._spill)
            self._spill.admit(page)
        self.num_pages += 1
        self._account(page.nbytes)
        return page

    def _fill(
        self,
        pages: Sequence[Page],
        sources: Sequence[tuple[Tensor, Tensor]],
        staging: Staging | None,
    ) -> None:
        """Give new pages memory of their own, and copy keys and values into it."""
        if staging is None:
            for page, (key, value) in zip(pages, sources, strict=True):
                page.key, page.value = self._own(key), self._own(value)
        else:
            copies = []
            for page, views in zip(pages, sources, strict=True):
                page.key = self._buffers.take(page.key.shape, page.key.dtype)
                page.value = self._buffers.take(page.value.shape, page.value.dtype)
                copies += zip((page.key, page.value), views, strict=True)
            written = staging.write(copies)
            for page in pages:
                page.written = written
        if self._spill is not None:
            for page in pages:
                if page.place is not None:
                    self._spill.changed(page, page.place.state)

    def _own(self, view: Tensor) -> Tensor:
        # .copy(): `to` alone would return the view itself when nothing changes.
        return view.to(self.device, copy=True, memory_format=torch.contiguous_format)

    # ---------------------------------------------------------------- files

    def _begin_visit(self, pages: Sequence[Page], **parts: bool) -> None:
        if self._spill is not None:
            self._spill.begin_visit(pages, **parts)

    def _bring(self, page: Page) -> None:
        """Have the page in host memory."""
        if self._spill is not None:
            self._spill.bring(page)
            self._note_peaks()

    # ---------------------------------------------------------------- bytes

    def fits(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more stay within the budgets and within the room there is.

        Collective over the group: the answer is the same on all of its ranks.
        """
        return num_bytes <= 0 or not self._group.any([self._shortage(num_bytes) is not None])[0]

    def require(self, num_bytes: int, what: str) -> None:
        """Raise `MemoryPlanError` now if `num_bytes` more would not fit.

        For a whole state at a time and not per page: it asks the system. Collective over the group:
        all of its ranks raise, or none.
        """
        if num_bytes <= 0:
            return
        short = self._shortage(num_bytes)
        if self._group.any([short is not None])[0]:
            found = self._group.gather_objects((short, self.bytes_in_use))
            rank = next(rank for rank, (reason, _) in enumerate(found) if reason is not None)
            short, in_use = found[rank]
            where = "" if self._group.is_alone else f"on rank {rank} of the sequence group "
            raise MemoryPlanError(
                f"{what} takes {num_bytes:,} bytes beside the {in_use:,} in use; "
                f"{where}{short}, shorten the prompt, run fewer prompts per update, or use "
                "prompt_gradient='stopped', which keeps no cotangents."
            )

    def _shortage(self, num_bytes: int) -> str | None:
        """What `num_bytes` more would exceed, and what else would help there; None if they fit."""
        if self._spill is not None:
            return self._shortage_of_all(self._spill, num_bytes)
        if self.budget_bytes is not None and self.bytes_in_use + num_bytes > self.budget_bytes:
            return shortage.of_budget(self.budget_bytes)
        left = self._bytes_left(num_bytes)
        if left is None or num_bytes <= left:
            return None
        return shortage.of_memory(self.device, left)

    def _shortage_of_all(self, spill: Spill, num_bytes: int) -> str | None:
        """As `_shortage`, where files take what memory does not."""
        self._set_limits(spill)
        in_memory, on_disk = spill.limit_bytes, spill.disk_limit_bytes
        if in_memory is None or on_disk is None:
            return None
        in_memory = max(0, in_memory - spill.reserved_bytes)
        if self.bytes_in_use + num_bytes <= in_memory + on_disk:
            return None
        return shortage.of_memory_and_files(in_memory, on_disk, spill.files.folder)

    def _set_limits(self, spill: Spill) -> None:
        """Most bytes in memory and in files: the user's, or what there is if that is less."""
        free = self._bytes_left()
        found = None if free is None else self.memory_bytes + free
        limits = [limit for limit in (self.budget_bytes, found) if limit is not None]
        spill.limit_bytes = min(limits, default=None)
        written = spill.files.allocated_bytes
        # Slots that are free again count as free, what is not written yet as taken.
        on_disk = self._disk.bytes_left(written) + written
        spill.disk_limit_bytes = min(on_disk, self.spill_budget_bytes or on_disk)

    def _bytes_left(self, wanted: int = 0) -> int | None:
        """Memory left for pages; to find `wanted`, buffers kept for the next pages are given up."""
        pool = self._buffers.pool
        left = self._memory.bytes_left(self.memory_bytes if pool is None else pool.num_bytes)
        if pool is None or left is None:
            return left
        if wanted > left + pool.free_bytes:
            self._trim(pool)
            left = self._memory.bytes_left(pool.num_bytes)
            assert left is not None
        return left + pool.free_bytes

    def _trim(self, pool: PinnedPool) -> None:
        """Unlock buffers kept for pages of sizes that do not come again."""
        for staging in self._active_stagings():
            staging.synchronize()
        pool.trim()

    def _staging(self, device: torch.device) -> Staging | None:
        """What brings pages to `device`; None where they are read as they lie."""
        if device not in self._stagings:
            lanes = lanes_between(self.device, device)
            self._stagings[device] = None if lanes is None else Staging(lanes, bring=self._bring)
            if lanes is not None and self._buffers.pool is None:
                self._buffers.pool = PinnedPool(lanes.pinned_bytes)
        return self._stagings[device]

    def _active_stagings(self) -> list[Staging]:
        return [staging for staging in self._stagings.values() if staging is not None]

    def _account(self, num_bytes: int) -> None:
        self.bytes_in_use += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        self._note_peaks()

    def _note_peaks(self) -> None:
        self.peak_memory_bytes = max(self.peak_memory_bytes, self.memory_bytes)
        self.peak_disk_bytes = max(self.peak_disk_bytes, self.disk_bytes)
