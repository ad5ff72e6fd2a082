"""Captured state: pages, the store that holds them, and the cache that readers go through."""

from .cache import (
    CACHE_KWARG,
    ChunkCache,
    DecodeCache,
    LayerHandle,
    Reader,
    RowRun,
    StateIsComplete,
)
from .free_memory import FreeMemory
from .pages import Page, cotangent_dtype_for
from .segment_state import SegmentState
from .store import PageStore

__all__ = [
    "CACHE_KWARG",
    "ChunkCache",
    "DecodeCache",
    "FreeMemory",
    "LayerHandle",
    "Page",
    "PageStore",
    "Reader",
    "RowRun",
    "SegmentState",
    "StateIsComplete",
    "cotangent_dtype_for",
]
