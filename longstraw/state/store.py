"""Where pages live, how readers get at them, and how many bytes they take.

Knows devices, budgets and bytes; knows nothing of layers or segments.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..errors import MemoryPlanError
from .free_memory import RESERVED_PART, FreeMemory, ranks_on_node
from .lanes import lanes_between
from .pages import Page
from .pinned import PinnedPool
from .staging import Staging


class PageStore:
    """Allocates pages and their cotangents, serves their readers, and accounts for every byte.

    Pages on the device that reads them are read where they lie. Pages on the host of a GPU lie in
    pinned memory and are copied ahead of their reader, see `Staging`; nothing blocks the process.

    Attributes:
        device: the pages' home.
        page_size: most tokens of one page.
        budget_bytes: most bytes to hold; None sets no limit beside the memory there is.
        bytes_in_use, peak_bytes: pages and cotangents held now, and the most so far.
    """

    def __init__(
        self, device: torch.device, page_size: int, budget_bytes: int | None = None
    ) -> None:
        self.device = device
        self.page_size = page_size
        self.budget_bytes = budget_bytes
        self.bytes_in_use = 0
        self.peak_bytes = 0
        self.num_pages = 0
        self._memory = FreeMemory(device)
        self._stagings: dict[torch.device, Staging | None] = {}
        self._pool: PinnedPool | None = None

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory held for pages: what is in use, and what is kept for the next ones."""
        return self._pool.num_bytes if self._pool is not None else 0

    @property
    def staging_bytes(self) -> int:
        """Most device memory that pages on their way took so far, beside `peak_bytes`."""
        return sum(staging.peak_bytes for staging in self._active_stagings())

    # ---------------------------------------------------------------- pages

    def write(self, key: Tensor, value: Tensor, start: int, needs_cotangent: bool) -> list[Page]:
        """Copy `[B, K, T, D]` keys and values that begin at position `start` into new pages.

        Key and value may be dropped, but not written to, as soon as this returns.
        """
        staging, pool = self._staging(key.device), self._pool
        key, value = key.detach(), value.detach()
        pages, copies = [], []
        for offset in range(0, key.shape[-2], self.page_size):
            run = slice(offset, offset + self.page_size)
            views = key[..., run, :], value[..., run, :]
            if staging is None or pool is None:
                tensors = [self._own(view) for view in views]
            else:
                tensors = [pool.take(view.shape, view.dtype) for view in views]
                copies += zip(tensors, views, strict=True)
            page = Page(start + offset, tensors[0], tensors[1], needs_cotangent)
            self._account(page.nbytes)
            pages.append(page)
        self.num_pages += len(pages)
        if staging is not None and copies:
            written = staging.write(copies)
            for page in pages:
                page.written = written
        return pages

    def read(
        self,
        pages: Sequence[Page],
        device: torch.device,
        dtype: torch.dtype,
        *,
        with_cotangents: bool = False,
    ) -> Iterator[tuple[Page, Tensor, Tensor]]:
        """Each page in order with its key and value on `device` in `dtype`, one at a time.

        The tensors are the reader's until it asks for the next page. One reader at a time.

        Args:
            with_cotangents: the reader will call `add_cotangent` for pages that need it.
        """
        staging = self._staging(device)
        if staging is None:
            for page in pages:
                yield page, *page.read(device, dtype)
            return
        assert not any(page.is_released for page in pages), "a page was read after its release"
        for slot in staging.visit(pages, with_state=True, with_cotangents=with_cotangents):
            assert slot.page is not None and slot.key is not None and slot.value is not None
            yield slot.page, slot.key.to(dtype), slot.value.to(dtype)

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
            if self._pool is None:
                continue
            for tensor in (page.key, page.value, page.key_cotangent, page.value_cotangent):
                if tensor is not None:
                    self._pool.give_back(tensor)
        if self.num_pages == 0:
            for staging in self._active_stagings():
                staging.free()

    # ---------------------------------------------------------------- cotangents

    def add_cotangent(self, page: Page, key_grad: Tensor, value_grad: Tensor) -> None:
        """Add a reader's dL/dkey and dL/dvalue to the page, in the dtype of its cotangents.

        Where pages are staged, the page is the one that `read` has handed out.
        """
        if page.key_cotangent is None or page.value_cotangent is None:
            before = page.nbytes
            page.key_cotangent = self._empty_cotangent(page, page.key)
            page.value_cotangent = self._empty_cotangent(page, page.value)
            self._account(page.nbytes - before)
        staging = self._staging(key_grad.device)
        if staging is not None:
            staging.add_cotangent(page, key_grad, value_grad)
            return
        page.key_cotangent += key_grad.to(self.device, page.cotangent_dtype)
        page.value_cotangent += value_grad.to(self.device, page.cotangent_dtype)

    def join_cotangents(
        self, pages: Sequence[Page], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What readers left on consecutive pages, as tensors like `key` and `value`.

        Args:
            key, value: `[B, K, T, D]`, the tokens of the pages; shape, device and dtype count.
        """
        staging = self._staging(key.device)
        if staging is None:
            cotangents = zip(*(page.cotangents() for page in pages), strict=True)
            joined = [
                torch.cat([part.to(like.device, like.dtype) for part in parts], dim=-2)
                for parts, like in zip(cotangents, (key, value), strict=True)
            ]
            return joined[0], joined[1]
        left = [page for page in pages if page.key_cotangent is not None]
        make = torch.empty_like if len(left) == len(pages) else torch.zeros_like
        joined = [
            make(like.detach(), memory_format=torch.contiguous_format) for like in (key, value)
        ]
        for slot in staging.visit(left, with_state=False, with_cotangents=True):
            assert slot.page is not None
            first = slot.page.start - pages[0].start
            run = slice(first, first + slot.page.num_tokens)
            staging.take_cotangent(joined[0][..., run, :], joined[1][..., run, :])
        return joined[0], joined[1]

    def _empty_cotangent(self, page: Page, like: Tensor) -> Tensor:
        if self._pool is not None:  # the first reader writes it whole
            return self._pool.take(like.shape, page.cotangent_dtype)
        return torch.zeros_like(like, dtype=page.cotangent_dtype)

    # ---------------------------------------------------------------- bytes

    def fits(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more stay within the budget and within the memory there is."""
        return self._shortage(num_bytes) is None

    def require(self, num_bytes: int, what: str) -> None:
        """Raise `MemoryPlanError` now if `num_bytes` more would not fit.

        For a whole state at a time and not per page: it asks the system.
        """
        shortage = self._shortage(num_bytes)
        if shortage is not None:
            raise MemoryPlanError(
                f"{what} takes {num_bytes:,} bytes beside the {self.bytes_in_use:,} in use; "
                f"{shortage}, shorten the prompt, run fewer prompts per update, or use "
                "prompt_gradient='stopped', which keeps no cotangents."
            )

    def _shortage(self, num_bytes: int) -> str | None:
        """What `num_bytes` more would exceed, and what else would help there; None if they fit."""
        if num_bytes <= 0:
            return None
        if self.budget_bytes is not None and self.bytes_in_use + num_bytes > self.budget_bytes:
            return (
                f"the budget is {self.budget_bytes:,}. Raise state_budget_bytes "
                "(longstraw_state_budget_gib in the trainer), put pages on the host "
                "(page_device='host')"
            )
        left = self._bytes_left()
        if left is not None and num_bytes > left and self._pool is not None:
            self._trim(self._pool)
            left = self._bytes_left()
        if left is None or num_bytes <= left:
            return None
        if self.device.type != "cpu":
            return (
                f"{self.device} has {left:,} left, a {RESERVED_PART}th of its free memory kept in "
                "reserve. Put pages on the host (page_device='host')"
            )
        return (
            f"the host has {left:,} left for this process, one of {ranks_on_node()} on the node, a "
            f"{RESERVED_PART}th of the available memory kept in reserve. Run fewer ranks per node "
            "or give the job more memory"
        )

    def _bytes_left(self) -> int | None:
        if self._pool is None:
            return self._memory.bytes_left(self.bytes_in_use)
        left = self._memory.bytes_left(self._pool.num_bytes)
        return None if left is None else left + self._pool.free_bytes

    def _trim(self, pool: PinnedPool) -> None:
        """Unlock buffers kept for pages of sizes that do not come again."""
        for staging in self._active_stagings():
            staging.synchronize()
        pool.trim()

    def _staging(self, device: torch.device) -> Staging | None:
        """What brings pages to `device`; None where they are read as they lie."""
        if device not in self._stagings:
            lanes = lanes_between(self.device, device)
            self._stagings[device] = None if lanes is None else Staging(lanes)
            if lanes is not None and self._pool is None:
                self._pool = PinnedPool(lanes.pinned_bytes)
        return self._stagings[device]

    def _active_stagings(self) -> list[Staging]:
        return [staging for staging in self._stagings.values() if staging is not None]

    def _own(self, view: Tensor) -> Tensor:
        # .copy(): `to` alone would return the view itself when nothing changes.
        return view.to(self.device, copy=True, memory_format=torch.contiguous_format)

    def _account(self, num_bytes: int) -> None:
        self.bytes_in_use += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
