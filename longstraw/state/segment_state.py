"""What capturing a segment leaves behind: per layer, the pages or the snapshot of each chunk.

Knows layers, chunks and the history a segment continues; knows nothing of models or losses.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from ..errors import PromptStateError
from ..segments import Chunk, Segment
from .choices import Choices
from .pages import IndexKeys, Page, Snapshot
from .store import PageStore


class SegmentState:
    """The state of one segment, readable by its own later chunks and by its children.

    Attributes:
        segment: whose state this is.
        parent: the state that the segment continues, or None for a prompt.
        policy_version: the weights it was captured with.
        needs_cotangent: whether readers leave cotangents here, for this segment's own backward.
        keeps_boundaries: whether recurrent layers keep the snapshot of every chunk, from which a
            backward runs the next one again. Else only that of the last chunk, for children.
        awaits_members: whether members of its own are still to come; its backward waits for them.
        is_prompt: whether a group's prompt runs through it. Then it is no part of a response: what
            others leave here is the prompt's.
        is_inner: whether members of a group run through it, as a part of their responses.
        router: routing sums of the segment's tokens, where they are asked for.
        router_cotangent: `[1, X]`, what members left on the routing probabilities.
    """

    def __init__(
        self,
        segment: Segment,
        num_layers: int,
        store: PageStore,
        policy_version: object,
        *,
        parent: "SegmentState | None" = None,
        needs_cotangent: bool,
        keeps_boundaries: bool = True,
    ) -> None:
        self.segment = segment
        self.parent = parent
        self.policy_version = policy_version
        self.needs_cotangent = needs_cotangent
        self.keeps_boundaries = keeps_boundaries
        self.awaits_members = True
        self.is_prompt = False
        self.is_inner = False
        self.router: Any = None
        self.router_cotangent: Tensor | None = None
        self._store = store
        self._is_used_up = False
        self._has_been_read = False
        # layer -> chunk index -> pages
        self._pages: list[dict[int, list[Page]]] = [{} for _ in range(num_layers)]
        self._held_chunks: set[int] = set()
        self._choices: dict[int, Choices] = {}

    @cached_property
    def tokens_on_cpu(self) -> Tensor:
        """`[T]`, the tokens of the first row, where comparing them waits for no device."""
        return self.segment.token_ids[0].cpu()

    def lineage(self) -> "Iterator[SegmentState]":
        """This state and all before it, back to the root."""
        state: SegmentState | None = self
        while state is not None:
            yield state
            state = state.parent

    @property
    def depth(self) -> int:
        """How many states it continues."""
        return sum(1 for _ in self.lineage()) - 1

    @property
    def is_used_up(self) -> bool:
        """Whether pages were freed, so that nobody can read it any more."""
        return self._is_used_up

    def keep_cotangents(self) -> None:
        """From now on readers leave cotangents here."""
        self.needs_cotangent = True
        for page in self._all_pages():
            page.needs_cotangent = not isinstance(page, IndexKeys)

    def append(
        self,
        chunk: Chunk,
        layer: int,
        key: Tensor,
        value: Tensor,
        runs: Sequence[tuple[slice, int]],
        kind: type[Page] = Page,
    ) -> None:
        """Copy one layer's keys and values of `chunk` into pages.

        Args:
            key, value: `[B, K, T, D]`.
            runs: which of the T tokens are kept here, and where each run of them stands in the
                chunk; see `Travel.own_runs`.
            kind: of pages; index keys are kept under a number of their own, see `Reader`.
        """
        start = self.segment.start + chunk.start
        self._held_chunks.add(chunk.index)
        pages = self._pages[layer].setdefault(chunk.index, [])
        needs_cotangent = self.needs_cotangent and kind is not IndexKeys
        for columns, place in runs:
            part = key[..., columns, :], value[..., columns, :]
            pages += self._store.write(*part, start + place, needs_cotangent, kind)

    def append_snapshot(self, chunk: Chunk, layer: int, recurrent: Tensor, conv: Tensor) -> None:
        """Copy a recurrent layer's state behind `chunk`; see `Snapshot` for the shapes."""
        self._held_chunks.add(chunk.index)
        position = self.segment.start + chunk.stop
        if not self.keeps_boundaries:
            for before in self._pages[layer].values():
                self._store.release(before)
            self._pages[layer].clear()
        snapshot = self._store.write_snapshot(recurrent, conv, position, self.needs_cotangent)
        self._pages[layer][chunk.index] = [snapshot]

    def drop_boundaries(self) -> None:
        """Say that no backward of its own will run: of recurrent layers the end is enough."""
        self.keeps_boundaries = False
        for layer in self._pages:
            for index, pages in sorted(layer.items())[:-1]:
                if isinstance(pages[-1] if pages else None, Snapshot):
                    self._store.release(layer.pop(index))

    def note_choices(self, chunk: Chunk, choices: Choices) -> None:
        """Keep what the capture of `chunk` has chosen, for its backward to compare with."""
        self._choices[chunk.index] = choices.packed()

    def choices(self, chunk: Chunk) -> Choices | None:
        """What `note_choices` kept of a chunk."""
        return self._choices.get(chunk.index)

    def holds(self, chunk: Chunk) -> bool:
        """Whether the chunk was captured; by this rank too if it owns none of its tokens."""
        return chunk.index in self._held_chunks

    def pages(self, layer: int, chunk: Chunk) -> list[Page]:
        """The pages of one chunk; none for a last chunk that was left out of the capture."""
        return self._pages[layer].get(chunk.index, [])

    def history(self, layer: int, before_chunk: int | None = None) -> list[Page]:
        """Everything a reader sees: the parent's pages, then this segment's up to a chunk.

        Of a recurrent layer that is the last snapshot.

        Args:
            before_chunk: index of the reading chunk when it is one of this segment's own; None for
                a child, which sees all chunks.

        Raises:
            PromptStateError: a child would see a state whose pages were freed.
        """
        if before_chunk is None and self._is_used_up:
            raise PromptStateError(
                f"the state of {self.segment.num_tokens:,} tokens was freed: a segment's backward "
                "uses it up. Capture the segment again."
            )
        own = self.own_pages(layer, before_chunk)
        if own and isinstance(own[-1], Snapshot):
            return own[-1:]
        inherited = self.parent.history(layer) if self.parent is not None else []
        return inherited + own

    def own_pages(self, layer: int, before_chunk: int | None = None) -> list[Page]:
        """This segment's own part of `history`."""
        own = sorted(self._pages[layer].items())
        visible = [pages for index, pages in own if before_chunk is None or index < before_chunk]
        return [page for pages in visible for page in pages]

    def free_chunk(self, chunk: Chunk) -> None:
        """Drop one chunk's pages and cotangents in every layer."""
        self._is_used_up = True
        self._held_chunks.discard(chunk.index)
        self._choices.pop(chunk.index, None)
        for layer in self._pages:
            self._store.release(layer.pop(chunk.index, []))

    def free(self) -> None:
        """Drop all pages of this segment; its parent's stay."""
        self._is_used_up = True
        self._has_been_read = False
        self.router_cotangent = None
        self._held_chunks.clear()
        self._choices.clear()
        for layer in self._pages:
            for pages in layer.values():
                self._store.release(pages)
            layer.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of this segment's pages and cotangents."""
        return sum(page.nbytes for page in self._all_pages())

    def note_reader(self) -> None:
        """Say that the backward of something that continues this segment has run."""
        self._has_been_read = self.needs_cotangent

    @property
    def has_cotangent(self) -> bool:
        """Whether any reader has left a cotangent, so that a backward has something to do.

        Not asked of the pages: of one prompt some ranks may hold pages that a window hides from
        every reader, and all have to run its backward.
        """
        return self._has_been_read or self.router_cotangent is not None

    def _all_pages(self) -> Iterator[Page]:
        for layer in self._pages:
            for pages in layer.values():
                yield from pages
