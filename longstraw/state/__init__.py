"""Captured state: pages, the store that holds them, and the cache that readers go through."""

from .cache import ChunkCache, DecodeCache
from .choices import Choices, fingerprint
from .free_memory import FreeMemory
from .pages import IndexKeys, Page, Snapshot, cotangent_dtype_for
from .reader import CACHE_KWARG, LayerHandle, Reader, RowRun, StateIsComplete
from .recurrent import ChunkRecurrence, DecodeRecurrence
from .segment_state import SegmentState
from .store import PageStore
from .together import Found, can_add_in_place, read_together

__all__ = [
    "CACHE_KWARG",
    "Choices",
    "ChunkCache",
    "ChunkRecurrence",
    "DecodeCache",
    "DecodeRecurrence",
    "Found",
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
    "can_add_in_place",
    "cotangent_dtype_for",
    "fingerprint",
    "read_together",
]
