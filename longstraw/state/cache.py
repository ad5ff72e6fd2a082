"""The transformers caches through which a model reads pages.

Attention layers of transformers call `cache.update(k, v, layer_idx, kwargs=kwargs)` and then hand
`kwargs` to the registered attention function. Our caches put a `LayerHandle` there, return the
chunk's own keys and values unchanged, and store nothing themselves: `update` is idempotent, so
that a layer recomputed under gradient checkpointing reads exactly what it read before, and no
member of a group can see another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

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
    def by_shift(self) -> "list[RowRun]":
        """The same, in parts whose rows stand at the same positions."""
        parts: dict[int, list[int]] = {}
        for place, shift in enumerate(self.shifts):
            parts.setdefault(shift, []).append(place)
        return [
            RowRun(self.pages, self.rows[places], [shift] * len(places))
            for shift, places in parts.items()
        ]


class KeptAttention:
    """Hands the result of a checkpointed layer's attention to its recompute.

    Under gradient checkpointing a layer runs twice, and attention over a long history is most of
    it. The result is one more hidden state per layer and token, beside the layer's input that is
    kept anyway; with it the recompute visits no page.
    """

    def __init__(self) -> None:
        self._result: tuple[Tensor, Tensor] | None = None

    def put(self, out: Tensor, lse: Tensor) -> None:
        """Leave the result for the recompute."""
        self._result = (out, lse)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """What was put here, once; None if nothing was."""
        result, self._result = self._result, None
        return result


@dataclass(frozen=True)
class LayerHandle:
    """What one attention call reads beside its own keys and values.

    Attributes:
        history: pages of all earlier tokens, in order.
        row_runs: pages of earlier tokens that only some rows read; decoding only.
        store: where the pages' cotangents are kept.
        q_start: absolute position of the first query, of any rank.
        own_start: absolute position of the first own key; before `q_start` when decoding.
        impl: attention implementation, see `EngineConfig.attention`.
        kept: the way to this layer's recompute, if there will be one.
        travel: how queries meet keys that other ranks own.
    """

    history: list[Page]
    store: PageStore
    q_start: int
    own_start: int
    impl: str = "auto"
    row_runs: Sequence[RowRun] = ()
    kept: KeptAttention | None = None
    travel: Travel = field(default_factory=Travel)


@dataclass(frozen=True)
class Reader:
    """Who reads: the history of each layer, where it lives, and how attention is computed.

    Attributes:
        histories: per layer, pages that all rows read.
        start: position of the first token that is read for, that of the longest row.
        row_runs: per layer, pages that some rows read; empty where all rows read the same.
        is_recomputed: whether layers run again in their backward, from the same cache.
        travel: how queries meet keys that other ranks own.
    """

    histories: list[list[Page]]
    store: PageStore
    start: int
    impl: str = "auto"
    row_runs: Sequence[Sequence[RowRun]] = ()
    is_recomputed: bool = False
    travel: Travel = field(default_factory=Travel)


class _ReaderLayer(CacheLayerMixin):
    """What transformers expects of a cache layer, for layers that only read."""

    is_sliding = False

    def __init__(self, reader: Reader, layer: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.reader = reader
        self.history = reader.histories[layer]
        self.row_runs = reader.row_runs[layer] if reader.row_runs else ()
        self.start = reader.start
        self.num_seen = reader.start
        self.kept = KeptAttention() if reader.is_recomputed else None

    def handle(self) -> LayerHandle:
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


class ChunkLayer(_ReaderLayer):
    """One layer of one chunk's forward.

    Attributes:
        ends_forward: whether the forward is over when this layer has its keys and values.
        own: the chunk's own keys and values as the first forward produced them; under autograd
            they are the roots that carry the cotangents of later readers.
    """

    own: tuple[Tensor, Tensor] | None = None
    ends_forward = False

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        if self.own is None:
            # Only the first time: a recompute under checkpointing makes tensors of another graph.
            self.own = (key_states, value_states)
            if self.ends_forward:
                raise StateIsComplete
        if kwargs is not None:
            kwargs[CACHE_KWARG] = self.handle()
        return key_states, value_states


class ChunkCache(Cache):
    """Serves one forward of one chunk. Made for it, dropped after it.

    Args:
        state_only: end the forward with `StateIsComplete` when the last layer has its keys and
            values: its attention, its MLP and what comes after them are dead work then.
    """

    def __init__(self, reader: Reader, *, state_only: bool = False) -> None:
        super().__init__(layers=[ChunkLayer(reader, i) for i in range(len(reader.histories))])
        setattr(self.layers[-1], "ends_forward", state_only)  # noqa: B010  (typed as any kind)

    def own(self, layer: int) -> tuple[Tensor, Tensor]:
        """The chunk's own keys and values in `layer`, `[B, K, C, D]` each."""
        own = getattr(self.layers[layer], "own")  # noqa: B009  (typed as any kind of layer)
        assert own is not None, f"layer {layer} did not pass through the cache"
        return own


class DecodeLayer(_ReaderLayer):
    """One layer of a generation: shared pages, and each member's own tokens in a growing buffer."""

    def __init__(self, reader: Reader, layer: int) -> None:
        super().__init__(reader, layer)
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        used = self.num_seen - self.start
        self._key = _grow_into(self._key, used, key_states)
        self._value = _grow_into(self._value, used, value_states)
        if kwargs is not None:
            kwargs[CACHE_KWARG] = self.handle()
        self.num_seen += key_states.shape[-2]
        used = self.num_seen - self.start
        return self._key[..., :used, :], self._value[..., :used, :]


class DecodeCache(Cache):
    """Serves `generate` for members that share a captured history."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(layers=[DecodeLayer(reader, i) for i in range(len(reader.histories))])


def _grow_into(buffer: Tensor | None, used: int, new: Tensor) -> Tensor:
    """Write `new` `[B, K, t, D]` behind the `used` tokens of `buffer`, doubling it when full.

    Doubling instead of `torch.cat`: decoding R tokens then copies O(R) tokens, not O(R^2).
    """
    needed = used + new.shape[-2]
    if buffer is None or needed > buffer.shape[-2]:
        grown = new.new_empty(*new.shape[:-2], max(needed, 2 * used, 16), new.shape[-1])
        if buffer is not None:
            grown[..., :used, :] = buffer[..., :used, :]
        buffer = grown
    buffer[..., used:needed, :] = new
    return buffer
