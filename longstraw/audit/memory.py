"""Counting tensor bytes exactly, on any device.

Resident memory and allocator statistics round and cache; storages do not.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakTensorBytes(TorchDispatchMode):
    """Counts the bytes of tensor storages created inside the context.

    Temporaries inside an operator are not seen. Slows every operator down by some microseconds.

    Args:
        with_meta: also count tensors of the meta device, which have shapes and no bytes.

    Attributes:
        live_bytes: held now.
        peak_bytes: most held at any time.
    """

    def __init__(self, *, with_meta: bool = True) -> None:
        super().__init__()
        self._with_meta = with_meta
        self.live_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_storage_id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, given)
        return out

    def _count(self, tensor: torch.Tensor, given: set[int]) -> None:
        key = _storage_id(tensor)
        if key in self._live or key in given or (tensor.is_meta and not self._with_meta):
            return
        storage = tensor.untyped_storage()
        self._live[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key, 0)


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
