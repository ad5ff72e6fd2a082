"""Bytes of pages in files: written and read by threads, and checked when they come back.

Knows buffers and slots of files; knows nothing of pages, or of when their bytes are needed.
"""

import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from ..errors import PageFileError

NUM_THREADS = 4
"""Enough to keep a disk busy while the checksum of another page is computed."""


@dataclass(eq=False)
class FileSlot:
    """Room for one page: `num_bytes` of `file` from `offset` on."""

    file: "_File"
    offset: int
    num_bytes: int


@dataclass(eq=False)
class Extent:
    """Consecutive bytes of a slot that are written and read as a whole.

    Attributes:
        offset: of the first byte, within the slot.
        checksum: CRC-32 of what was written last; None before that. CRC-32, because its 3 GB/s
            per thread is more than most disks give; BLAKE2b does a quarter of it.
    """

    offset: int
    checksum: int | None = None


class PageFiles:
    """Slots in files of one folder, and the threads that fill and read them.

    The files have no name. The system takes their space back when the process ends, also when it
    is killed, so nothing is ever left in the folder, and neither two stores nor two ranks can
    meet. One file holds slots of one size: then no hole is too small for the next page. A file is
    closed, which frees its space, when none of its slots is in use.

    Args:
        folder: where the files are made; made if it is missing.

    Raises:
        PageFileError: no file can be made there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()
        self._files: dict[int, _File] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="longstraw-pages")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot_make_file(error) from error
        self._open().close()  # an error is better now than in the middle of a capture

    @property
    def allocated_bytes(self) -> int:
        """What the files take on the disk, as the file system counts it."""
        handles = [file.handle for file in self._files.values()]
        return sum(os.fstat(handle.fileno()).st_blocks * 512 for handle in handles)

    def take(self, num_bytes: int) -> FileSlot:
        """A slot whose content is undefined; it takes space when it is written to."""
        file = self._files.get(num_bytes)
        if file is None:
            file = self._files[num_bytes] = _File(self._open())
        return FileSlot(file, file.take_slot() * num_bytes, num_bytes)

    def give_back(self, slot: FileSlot) -> None:
        """Take a slot back that nothing writes to or reads any more."""
        slot.file.free.append(slot.offset // slot.num_bytes)
        if len(slot.file.free) == slot.file.num_slots:
            slot.file.handle.close()
            del self._files[slot.num_bytes]

    def write(self, slot: FileSlot, extent: Extent, tensors: Sequence[Tensor]) -> Future[None]:
        """Write contiguous host tensors one behind the other; they may not change meanwhile."""
        return self._threads.submit(self._write, slot, extent, [_bytes(t) for t in tensors])

    def read(self, slot: FileSlot, extent: Extent, tensors: Sequence[Tensor]) -> Future[None]:
        """Fill tensors with what `write` was given. Their content is undefined until it is done.

        The result is a `PageFileError` if a byte is not the one that was written.
        """
        return self._threads.submit(self._read, slot, extent, [_bytes(t) for t in tensors])

    # ---------------------------------------------------------------- in a thread

    def _write(self, slot: FileSlot, extent: Extent, buffers: list[memoryview]) -> None:
        extent.checksum = _checksum(buffers)
        try:
            done = _transfer(os.pwritev, slot, extent, buffers)
        except OSError as error:
            raise PageFileError(
                f"writing a page of {slot.num_bytes:,} bytes to a file in {self.folder} failed: "
                f"{error}. Free space there, lower spill_budget_bytes (longstraw_spill_budget_gib "
                "in the trainer), or name another folder with spill_dir (longstraw_spill_dir)."
            ) from error
        if not done:
            raise PageFileError(f"a file in {self.folder} takes no more bytes. Free space there.")

    def _read(self, slot: FileSlot, extent: Extent, buffers: list[memoryview]) -> None:
        where = f"the page at byte {slot.offset:,} of a file in {self.folder}"
        way_out = (
            "The update that needed it was given up. Check the disk, or name another folder with "
            "spill_dir (longstraw_spill_dir in the trainer)."
        )
        try:
            done = _transfer(os.preadv, slot, extent, buffers)
        except OSError as error:
            raise PageFileError(f"{where} cannot be read: {error}. {way_out}") from error
        if not done:
            raise PageFileError(f"{where} is cut off: the file ends before it does. {way_out}")
        found = _checksum(buffers)
        if found != extent.checksum:
            raise PageFileError(
                f"{where} has checksum {found:08x}, what was written had {extent.checksum or 0:08x}"
                f": its bytes have changed on the disk. {way_out}"
            )

    # ---------------------------------------------------------------- files

    def _open(self) -> IO[bytes]:
        try:
            return tempfile.TemporaryFile(buffering=0, dir=self.folder)
        except OSError as error:
            raise self._cannot_make_file(error) from error

    def _cannot_make_file(self, error: OSError) -> PageFileError:
        return PageFileError(
            f"no file can be made in {self.folder}: {error}. Pages that exceed the memory are kept "
            "there. Name a folder on a local disk that this process may write to with spill_dir "
            "(longstraw_spill_dir in the trainer)."
        )


class _File:
    """A file of equally large slots."""

    def __init__(self, handle: IO[bytes]) -> None:
        self.handle = handle
        self.num_slots = 0
        self.free: list[int] = []

    def take_slot(self) -> int:
        if self.free:
            return self.free.pop()
        self.num_slots += 1
        return self.num_slots - 1


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _checksum(buffers: Sequence[memoryview]) -> int:
    checksum = 0
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    return checksum


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    slot: FileSlot,
    extent: Extent,
    buffers: list[memoryview],
) -> bool:
    """Read or write all of `buffers`; False if the file has or takes no more."""
    fd, offset, left = slot.file.handle.fileno(), slot.offset + extent.offset, list(buffers)
    while left:
        # One call usually does it. The system may stop early: at a signal, or at 2 GiB.
        done = call(fd, left, offset)
        if done == 0:
            return False
        offset += done
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]
    return True
