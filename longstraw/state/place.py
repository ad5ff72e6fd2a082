"""Where a page lies in a file, and what is known of the way there.

Knows slots and transfers; knows nothing of tensors or of memory.
"""

from concurrent.futures import Future
from dataclasses import dataclass

from .page_files import Extent, FileSlot


@dataclass(eq=False)
class Part:
    """Keys and values, or the cotangents, of a page in a file.

    Attributes:
        names: the page's two tensors. On the meta device, with shape and without memory, while
            they are in the file only: reading them by mistake raises.
        event: the page's event behind which they are in host memory.
        extent: where they lie within the page's slot.
        is_new: memory holds what the file does not, and no write was begun.
        transfer: the write or read that was begun last.
        is_read: whether that was a read.
    """

    names: tuple[str, str]
    event: str
    extent: Extent
    is_new: bool = False
    transfer: Future[None] | None = None
    is_read: bool = False

    def wait(self) -> None:
        """Block until the last transfer is done; raise if it failed."""
        if self.transfer is not None:
            self.transfer.result()

    def abandon(self) -> None:
        """Block until nothing is transferred, whatever comes of it."""
        if self.transfer is not None and not self.transfer.cancel():
            self.transfer.exception()


@dataclass(eq=False)
class Place:
    """Where a page lies in a file."""

    slot: FileSlot
    state: Part
    cotangents: Part

    @property
    def parts(self) -> tuple[Part, Part]:
        return self.state, self.cotangents
