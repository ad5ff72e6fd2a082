"""Where pages live, and how many bytes they take.

Knows devices, budgets and bytes; knows nothing of layers or segments.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import MemoryPlanError
from .pages import Page


class PageStore:
    """Allocates pages and their cotangents and accounts for every byte.

    Attributes:
        device: the pages' home.
        page_size: most tokens of one page.
        budget_bytes: most bytes to hold; None sets no limit.
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

    def write(self, key: Tensor, value: Tensor, start: int, needs_cotangent: bool) -> list[Page]:
        """Copy `[B, K, T, D]` keys and values that begin at position `start` into new pages."""
        pages = []
        for offset in range(0, key.shape[-2], self.page_size):
            run = slice(offset, offset + self.page_size)
            page = Page(
                start + offset,
                self._own(key[..., run, :]),
                self._own(value[..., run, :]),
                needs_cotangent,
            )
            self._account(page.nbytes)
            pages.append(page)
        self.num_pages += len(pages)
        return pages

    def add_cotangent(self, page: Page, key_grad: Tensor, value_grad: Tensor) -> None:
        """Add a reader's dL/dkey and dL/dvalue to the page, at the page's home."""
        if page.key_cotangent is None or page.value_cotangent is None:
            before = page.nbytes
            page.key_cotangent = torch.zeros_like(page.key, dtype=page.cotangent_dtype)
            page.value_cotangent = torch.zeros_like(page.value, dtype=page.cotangent_dtype)
            self._account(page.nbytes - before)
        page.key_cotangent += key_grad.to(self.device, page.cotangent_dtype)
        page.value_cotangent += value_grad.to(self.device, page.cotangent_dtype)

    def release(self, pages: Iterable[Page]) -> None:
        """Give the pages' bytes back. The caller drops its references."""
        for page in pages:
            self.bytes_in_use -= page.nbytes
            self.num_pages -= 1

    def require(self, num_bytes: int, what: str) -> None:
        """Raise `MemoryPlanError` now if `num_bytes` more would exceed the budget."""
        if self.budget_bytes is None or self.bytes_in_use + num_bytes <= self.budget_bytes:
            return
        raise MemoryPlanError(
            f"{what} takes {num_bytes:,} bytes beside the {self.bytes_in_use:,} in use; the "
            f"budget is {self.budget_bytes:,}. Raise state_budget_bytes "
            "(longstraw_state_budget_gib in the trainer), put pages on the host "
            "(page_device='host'), shorten the prompt, run fewer prompts per update, or use "
            "prompt_gradient='stopped', which keeps no cotangents."
        )

    def _own(self, view: Tensor) -> Tensor:
        # .copy(): `to` alone would return the view itself when nothing changes.
        owned = view.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
        if self.device.type == "cpu" and view.device.type == "cuda":
            owned = owned.pin_memory()
        return owned

    def _account(self, num_bytes: int) -> None:
        self.bytes_in_use += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
