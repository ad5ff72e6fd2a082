"""Captured state: pages, the store that holds them, and the cache that readers go through."""

from .cache import ChunkCache, DecodeCache
from .choices import Choices, fingerprint
from .free_memory import FreeMemory
from .pages import IndexKeys, Page, Snapshot, cotangent_dtype_for
from .reader import CACHE_KWARG, LayerHandle, Reader, RowRun, StateIsComplete
from .recurrent import ChunkRecurrence, DecodeRecurrence
from .segment_state import SegmentState
from .store import PageStore

__all__ = [
    "CACHE_KWARG",
    "Choices",
    "ChunkCache",
    "ChunkRecurrence",
    "DecodeCache",
    "DecodeRecurrence",
    "FreeMemory",
    "IndexKeys",
    "LayerHandle",
    "Page",
    "PageStore",
    "Reader",
    "RowRun",
    "SegmentState",
    "Snapshot",
    "StateIsComplete",
    "cotangent_dtype_for",
    "fingerprint",
]
