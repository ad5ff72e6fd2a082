"""What the layers of one forward read: which pages, of which rows, in which order.

Knows pages and positions; knows nothing of what a layer computes with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..distributed import Travel
from .pages import Page
from .store import PageStore

CACHE_KWARG = "longstraw_handle"
"""The keyword under which an attention function finds its `LayerHandle`."""


@dataclass(frozen=True)
class RowRun:
    """Pages that some rows of a batch read, in a batch whose rows have different histories.

    Attributes:
        pages: in order.
        rows: indices of the rows, ascending, on the device that reads.
        shifts: per row, by how much its tokens stand before those of the longest row: rows end
            together, and their positions do not.
    """

    pages: list[Page]
    rows: Tensor
    shifts: list[int]

    @cached_property
    def row_numbers(self) -> list[int]:
        """The rows, where reading them waits for no device."""
        return self.rows.tolist()

    @cached_property
    def by_shift(self) -> "list[RowRun]":
        """The same, in parts whose rows stand at the same positions."""
        parts: dict[int, list[int]] = {}
        for place, shift in enumerate(self.shifts):
            parts.setdefault(shift, []).append(place)
        return [
            RowRun(self.pages, self.rows[places], [shift] * len(places))
            for shift, places in parts.items()
        ]


class Kept:
    """Hands what a checkpointed layer found in its history to its recompute.

    Under gradient checkpointing a layer runs twice, and visiting a long history is most of it. The
    result of attention is one more hidden state per layer and token (of latent attention H * r
    numbers), beside the layer's input that is kept anyway; the selection of an indexer is kept
    anyway where later layers use it. With them the recompute visits no page.
    """

    def __init__(self) -> None:
        self._result: tuple[Tensor, ...] | None = None

    def put(self, *result: Tensor) -> None:
        """Leave the result for the recompute."""
        self._result = result

    def take(self) -> tuple[Tensor, ...] | None:
        """What was put here, once; None if nothing was."""
        result, self._result = self._result, None
        return result


@dataclass(frozen=True)
class LayerHandle:
    """What one attention call reads beside its own keys and values.

    Attributes:
        history: pages of all earlier tokens, in order.
        row_runs: pages of earlier tokens that only some rows read, in order of positions in each
            row; decoding only.
        store: where the pages' cotangents are kept.
        q_start: absolute position of the first query, of any rank.
        own_start: absolute position of the first own key; before `q_start` when decoding.
        impl: attention implementation, see `EngineConfig.attention`.
        kept: the way to this layer's recompute, if there will be one.
        travel: how queries meet keys that other ranks own.
        index_ties: see `EngineConfig`; of an indexer.
        memo: what a layer computes once for all tokens of a generation; None elsewhere.
    """

    history: list[Page]
    store: PageStore
    q_start: int
    own_start: int
    impl: str = "auto"
    row_runs: Sequence[RowRun] = ()
    kept: Kept | None = None
    travel: Travel = field(default_factory=Travel)
    index_ties: str = "first"
    memo: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Reader:
    """Who reads: the history of each layer, where it lives, and how attention is computed.

    Attributes:
        histories: per layer, pages that all rows read.
        start: position of the first token that is read for, that of the longest row.
        row_runs: per layer, pages that some rows read; empty where all rows read the same.
        is_recomputed: whether layers run again in their backward, from the same cache.
        travel: how queries meet keys that other ranks own.
        recurrent_layers: layers whose history is a snapshot.
        index_histories: of layers with an indexer, the pages of its keys that all rows read.
        index_row_runs: of layers with an indexer, those that some rows read.
        index_ties: see `EngineConfig`.
    """

    histories: list[list[Page]]
    store: PageStore
    start: int
    impl: str = "auto"
    row_runs: Sequence[Sequence[RowRun]] = ()
    is_recomputed: bool = False
    travel: Travel = field(default_factory=Travel)
    recurrent_layers: frozenset[int] = frozenset()
    index_histories: Mapping[int, list[Page]] = field(default_factory=dict)
    index_row_runs: Mapping[int, Sequence[RowRun]] = field(default_factory=dict)
    index_ties: str = "first"


class ReaderLayer(CacheLayerMixin):
    """What transformers expects of a cache layer, for layers that only read."""

    is_sliding = False

    def __init__(self, reader: Reader, layer: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.reader = reader
        self.layer = layer
        self.history = reader.histories[layer]
        self.row_runs = reader.row_runs[layer] if reader.row_runs else ()
        self.start = reader.start
        self.num_seen = reader.start
        self.kept = Kept() if reader.is_recomputed else None
        self.kept_selection = Kept() if reader.is_recomputed else None
        self.has_indexer = layer in reader.index_histories

    def handle(self) -> LayerHandle:
        """What the layer's attention reads."""
        reader = self.reader
        return LayerHandle(
            history=self.history,
            store=reader.store,
            q_start=self.num_seen,
            own_start=self.start,
            impl=reader.impl,
            row_runs=self.row_runs,
            kept=self.kept,
            travel=reader.travel,
        )

    def index_handle(self) -> LayerHandle:
        """What the layer's indexer reads. Only of a layer that has one."""
        reader = self.reader
        return LayerHandle(
            history=reader.index_histories[self.layer],
            store=reader.store,
            q_start=self.num_seen,
            own_start=self.start,
            impl=reader.impl,
            row_runs=reader.index_row_runs.get(self.layer, ()),
            kept=self.kept_selection,
            travel=reader.travel,
            index_ties=reader.index_ties,
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def get_seq_length(self) -> int:
        return self.num_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_seen + query_length, 0

    def get_max_length(self) -> int:
        return -1


class StateIsComplete(Exception):
    """Ends a forward of which nobody reads more than the keys and values of all layers."""
