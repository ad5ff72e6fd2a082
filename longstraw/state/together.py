"""Pages as a kernel reads them that takes a list: all at once, where that takes no more memory."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .pages import Page
from .store import PageStore

Found = tuple[Page, Tensor, Tensor]
"""A page with its key and value on the device that reads."""


def read_together(
    store: PageStore,
    pages: Sequence[Page],
    device: torch.device,
    dtype: torch.dtype,
    at_once: bool,
    with_cotangents: bool = False,
) -> Iterator[list[Found]]:
    """`PageStore.read` in lists: of all pages, if they lie as they are read, else of one.

    Args:
        at_once: False reads one at a time.
        with_cotangents: gradients will be added; all at once only if `can_add_in_place`, because
            those of all pages in tensors of their own would be as large as the history.
    """
    lie_there = store.lies_on(device) and all(p.key.dtype == p.value.dtype == dtype for p in pages)
    if with_cotangents:
        lie_there = lie_there and can_add_in_place(store, pages, device)
    found = store.read(pages, device, dtype, with_cotangents=with_cotangents)
    if not (at_once and lie_there):
        yield from ([one] for one in found)
    elif pages:
        yield list(found)


def can_add_in_place(store: PageStore, pages: Sequence[Page], device: torch.device) -> bool:
    """Whether a kernel on `device` may add fp32 gradients to the pages' cotangents itself."""
    wanted = [page for page in pages if page.needs_cotangent]
    return store.lies_on(device) and all(p.cotangent_dtype == torch.float32 for p in wanted)
