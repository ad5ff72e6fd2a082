"""The transformers caches through which a model reads pages.

Attention layers of transformers call `cache.update(k, v, layer_idx, kwargs=kwargs)` and then hand
`kwargs` to the registered attention function. Our caches put a `LayerHandle` there, return the
chunk's own keys and values unchanged, and store nothing themselves: `update` is idempotent, so
that a layer recomputed under gradient checkpointing reads exactly what it read before, and no
member of a group can see another.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from .choices import Choices
from .reader import CACHE_KWARG, LayerHandle, Reader, ReaderLayer, StateIsComplete
from .recurrent import ChunkRecurrence, DecodeRecurrence


class ChunkLayer(ReaderLayer):
    """One layer of one chunk's forward.

    Attributes:
        ends_forward: whether the forward is over when this layer has its state.
        keeps_state: whether anybody will read `own`.
        own: the chunk's own keys and values as the first forward produced them; under autograd
            they are the roots that carry the cotangents of later readers.
        own_index: its own index keys, where the layer has an indexer; see `IndexKeys`.
    """

    own: tuple[Tensor, Tensor] | None = None
    own_index: tuple[Tensor, Tensor] | None = None
    ends_forward = False
    keeps_state = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        if self.own is None and self.keeps_state:
            # Only the first time: a recompute under checkpointing makes tensors of another graph.
            self.own = (key_states, value_states)
            if self.ends_forward and not self.has_indexer:
                raise StateIsComplete
        if kwargs is not None:
            kwargs[CACHE_KWARG] = self.handle()
        return key_states, value_states

    def update_index(self, rotated: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, LayerHandle]:
        """Take a chunk's index keys, `[B, 1, T, ..]` each; gives them back, with their history."""
        if self.own_index is None and self.keeps_state:
            self.own_index = rotated.detach(), rest.detach()
            if self.ends_forward:
                raise StateIsComplete
        return rotated, rest, self.index_handle()


class ChunkCache(Cache):
    """Serves one forward of one chunk. Made for it, dropped after it.

    Args:
        state_only: end the forward with `StateIsComplete` when the last layer has its state: its
            attention, its MLP and what comes after them are dead work then.
        keeps_state: False for a chunk that no later one reads, whose state would be held for all
            layers and rows until the forward is over.

    Attributes:
        choices: what the forward chooses, noted as it does.
    """

    def __init__(
        self, reader: Reader, *, state_only: bool = False, keeps_state: bool = True
    ) -> None:
        super().__init__(
            layers=[
                ChunkRecurrence(reader, i)
                if i in reader.recurrent_layers
                else ChunkLayer(reader, i)
                for i in range(len(reader.histories))
            ]
        )
        self.choices = Choices()
        setattr(self.layers[-1], "ends_forward", state_only)  # noqa: B010  (typed as any kind)
        for layer in self.layers:
            setattr(layer, "keeps_state", keeps_state)  # noqa: B010

    def own(self, layer: int) -> tuple[Tensor, Tensor]:
        """What the chunk adds to the state of `layer`.

        Its keys and values, `[B, K, C, D]` each; of a recurrent layer the recurrent state and the
        convolution inputs behind it, as in `Snapshot`.
        """
        own = getattr(self.layers[layer], "own")  # noqa: B009  (typed as any kind of layer)
        assert own is not None, f"layer {layer} did not pass through the cache"
        return own

    def own_index(self, layer: int) -> tuple[Tensor, Tensor]:
        """What the chunk adds to the index keys of `layer`; see `IndexKeys`."""
        own = getattr(self.layers[layer], "own_index")  # noqa: B009
        assert own is not None, f"the indexer of layer {layer} did not pass through the cache"
        return own

    def leave_cotangents(self) -> None:
        """After a backward: leave on snapshots what reached the states that were read there.

        Attention does the same for its pages, in its own backward.
        """
        for layer in self.layers:
            if isinstance(layer, ChunkRecurrence):
                layer.leave_cotangents()

    def let_go(self) -> None:
        """After a backward: hold nothing of the graph any more.

        A checkpointed layer holds this cache, to be run again, and what it adds to the state holds
        the graph that holds the layer. Where nobody reads that (a window that ends behind it, a
        last layer) no backward comes through and cuts the circle, and Python's collector sees no
        more of it than its ends.
        """
        for layer in self.layers:
            setattr(layer, "own", None)  # noqa: B010  (typed as any kind)
            if isinstance(layer, ChunkLayer):
                layer.own_index = None


class DecodeLayer(ReaderLayer):
    """One layer of a generation: shared pages, and each member's own tokens in a growing buffer."""

    def __init__(self, reader: Reader, layer: int) -> None:
        super().__init__(reader, layer)
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._index: tuple[Tensor | None, Tensor | None] = (None, None)
        self.memo: dict[str, Tensor] = {}

    def update_index(self, rotated: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, LayerHandle]:
        """As of `ChunkLayer`; gives back the index keys of all tokens decoded so far."""
        # Behind `update`, which has counted these tokens.
        used = self.num_seen - rotated.shape[-2] - self.start
        grown = [
            _grow_into(buffer, used, new)
            for buffer, new in zip(self._index, (rotated, rest), strict=True)
        ]
        self._index = grown[0], grown[1]
        used = self.num_seen - self.start
        handle = replace(self.index_handle(), q_start=self.num_seen - rotated.shape[-2])
        return grown[0][..., :used, :], grown[1][..., :used, :], handle

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
            kwargs[CACHE_KWARG] = replace(self.handle(), memo=self.memo)
        self.num_seen += key_states.shape[-2]
        used = self.num_seen - self.start
        return self._key[..., :used, :], self._value[..., :used, :]


class DecodeCache(Cache):
    """Serves `generate` for members that share a captured history."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(
            layers=[
                DecodeRecurrence(reader, i)
                if i in reader.recurrent_layers
                else DecodeLayer(reader, i)
                for i in range(len(reader.histories))
            ]
        )


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
