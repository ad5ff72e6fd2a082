"""A pool of page-locked host buffers.

Locking memory costs a system call and a walk over its pages, so buffers are cut from slabs and used
again. Knows sizes; knows nothing of what is kept in a buffer, or of who still reads it.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

MAX_SLAB_BYTES = 64 * 2**20
FIRST_SLAB_BUFFERS = 8
ALIGNMENT = 64


class PinnedPool:
    """Hands out buffers, takes them back, and keeps what is free for the next.

    The pool keeps the most that was ever lent at a time until `trim`; `num_bytes` accounts for it.
    A buffer is up to an eighth larger than asked for, so that the last pages of prompts of all
    lengths share a few sizes.

    Args:
        allocate: makes a slab of that many bytes, uint8.

    Attributes:
        num_bytes: bytes of all slabs, lent or free.
        free_bytes: bytes of the buffers that are free.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[Tensor]] = {}
        self._lent: dict[int, Tensor] = {}  # by address
        self._num_slabs: dict[int, int] = {}
        self.num_bytes = 0
        self.free_bytes = 0

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialized pinned tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        size = _size_class(num_bytes)
        free = self._free.setdefault(size, [])
        if not free:
            self._add_slab(size)
        buffer = free.pop()
        self.free_bytes -= size
        self._lent[buffer.data_ptr()] = buffer
        return buffer[:num_bytes].view(dtype).view(shape)

    def give_back(self, tensor: Tensor) -> None:
        """Take back what `take` gave; the next taker writes over it."""
        buffer = self._lent.pop(tensor.data_ptr())
        self._free[buffer.numel()].append(buffer)
        self.free_bytes += buffer.numel()

    def trim(self) -> None:
        """Unlock the memory if nothing is lent."""
        if self._lent:
            return  # slabs are shared, and finding the unused ones would not free much
        self._free.clear()
        self._num_slabs.clear()
        self.num_bytes = self.free_bytes = 0
        # torch caches pinned memory as well. Its name for this has changed, so it may be missing.
        empty_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_cache is not None and torch.cuda.is_initialized():
            empty_cache()

    def _add_slab(self, size: int) -> None:
        # Doubling: a short prompt locks little, and a long one is not a thousand system calls.
        # Powers of two, because torch rounds pinned memory up to them.
        num_slabs = self._num_slabs.get(size, 0)
        wanted = min(size * FIRST_SLAB_BUFFERS * 2**num_slabs, MAX_SLAB_BYTES)
        slab_bytes = 2 ** math.ceil(math.log2(max(wanted, size)))
        slab = self._allocate(slab_bytes)
        self._num_slabs[size] = num_slabs + 1
        self.num_bytes += slab_bytes
        buffers = [slab[i : i + size] for i in range(0, slab_bytes - size + 1, size)]
        self._free[size].extend(reversed(buffers))
        self.free_bytes += size * len(buffers)


class HostBuffers:
    """Host memory for pages: pinned once a device reads them, ordinary before.

    Attributes:
        pool: where the pinned buffers come from.
    """

    def __init__(self) -> None:
        self.pool: PinnedPool | None = None

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor."""
        if self.pool is not None:
            return self.pool.take(shape, dtype)
        with torch.inference_mode(False):  # outlives the caller's mode
            return torch.empty(shape, dtype=dtype)

    def give_back(self, tensor: Tensor) -> None:
        """Take back what `take` gave; the next taker writes over it. The caller drops it."""
        if self.pool is not None:
            self.pool.give_back(tensor)


def _size_class(num_bytes: int) -> int:
    """`num_bytes` rounded up to one of eight steps between powers of two."""
    step = max(2 ** (max(num_bytes, 1).bit_length() - 4), ALIGNMENT)
    return -(-max(num_bytes, 1) // step) * step
