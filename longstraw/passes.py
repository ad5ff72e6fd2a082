"""The passes over one segment: capture, score, backward. Chunk by chunk, one chunk's graph at most.

Reverse-mode differentiation over the chain of chunks: the state z_c = f_c(weights, z_<c) of chunk c
is read by later chunks and by children only, so when chunks are visited in reverse, every reader of
z_c has already left its part of dL/dz_c on chunk c's pages.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from longstraw_kernels.availability import impl_beside

from .backends import Backend
from .config import EngineConfig
from .distributed import ChunkTravel, LockStep, Ownership, Pass, SequenceGroup, most_owned
from .errors import ReplayMismatchError
from .models import (
    Decoder,
    RouterSums,
    TokenCotangents,
    TokenScores,
    router_sums,
    score_anchor,
    score_tokens,
)
from .models.decoder import ChunkOutput
from .segments import Chunk, Segment
from .state import Choices, ChunkCache, IndexKeys, PageStore, Reader, SegmentState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SegmentLoss:
    """What a segment's own tokens contribute to the loss, as cotangents.

    Attributes:
        targets: `[B, T]`, the token each input predicts, negative where there is none.
        tokens: dL/dlogps and dL/dentropies, `[B, T]`.
        router_probs: `[B, X]`, dL/d(router probability sums), or None.
    """

    targets: Tensor | None = None
    tokens: TokenCotangents | None = None
    router_probs: Tensor | None = None

    def cotangents(self, chunk: Chunk) -> TokenCotangents | None:
        """dL/dscores of a chunk's tokens; None where no token needs a gradient."""
        if self.tokens is None:
            return None
        here = self.tokens.columns(slice(chunk.start, chunk.stop))
        return None if here.is_zero else here


class SegmentPasses:
    """Runs segments of one decoder against one page store.

    Attributes:
        lockstep: takes turns with other ranks, for passes that contain collectives.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: PageStore,
        backend: Backend,
        lockstep: LockStep,
        config: EngineConfig,
        group: SequenceGroup,
    ) -> None:
        if decoder.recurrence is not None:
            decoder.recurrence.check_ranks(config.sp_size)
            decoder.recurrence.check_chunk(
                config.chunk_size, config.replay_batch or 1, config.sp_size
            )
        self.decoder = decoder
        self.group = group
        self._travel_of = lru_cache(maxsize=64)(self._make_travel)
        self.store = store
        self.config = config
        self.drive_with(backend, lockstep)

    def drive_with(self, backend: Backend, lockstep: LockStep) -> None:
        """Let `backend` drive backwards, in step with other ranks."""
        self.backend = backend
        self.lockstep = lockstep
        lockstep.turns = backend.turns
        lockstep.run_idle = self._join

    def new_state(
        self,
        segment: Segment,
        version: object,
        parent: SegmentState | None = None,
        *,
        needs_cotangent: bool,
        keeps_boundaries: bool = True,
    ) -> SegmentState:
        """An empty state for `segment`, continuing `parent`; see `SegmentState`."""
        return SegmentState(
            segment,
            self.decoder.num_layers + len(self.decoder.index_layers),
            self.store,
            version,
            parent=parent,
            needs_cotangent=needs_cotangent,
            keeps_boundaries=keeps_boundaries,
        )

    def state_bytes(
        self,
        num_tokens: int,
        *,
        with_cotangents: bool = False,
        num_rows: int = 1,
        keeps_boundaries: bool = True,
    ) -> int:
        """Bytes that a segment's state takes on the rank of the group that holds most of it.

        Of recurrent layers a snapshot for each chunk, or for the last one; its cotangents are those
        of one snapshot at a time, as each is used up by the backward that leaves the one before.
        """
        config, decoder = self.config, self.decoder
        owned = most_owned(num_tokens, config.chunk_size, config.sp_size, config.sp_layout)
        num_snapshots = -(-num_tokens // config.chunk_size)
        if not keeps_boundaries:
            num_snapshots = min(num_snapshots, 1)
        snapshots = num_snapshots * decoder.snapshot_bytes(config.sp_size)
        if with_cotangents and num_snapshots:
            snapshots += decoder.snapshot_bytes(config.sp_size, of_cotangents=True)
        return decoder.state_bytes(num_rows * owned, with_cotangents) + num_rows * snapshots

    @torch.no_grad()
    def capture(self, state: SegmentState, bar: tqdm, *, but_last: bool = False) -> None:
        """Fill `state`: forward without a graph, keep pages, free the rest chunk by chunk.

        Args:
            but_last: leave the last chunk out, which no later chunk of the segment reads.
        """
        chunks = self._chunks(state)[: -1 if but_last else None]
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        needed = self.state_bytes(
            num_tokens,
            num_rows=state.segment.num_rows,
            keeps_boundaries=state.keeps_boundaries,
        )
        self.store.require(needed, f"the state of {state.segment.num_rows * num_tokens:,} tokens")
        for chunk in chunks:
            with self._turn(Pass.CAPTURE):
                cache, output = self._forward(state, chunk, state_only=self._may_end_early)
            self._keep(state, chunk, cache)
            self._add_router_sums(state, chunk, output)
            del cache, output  # before the next chunk's are made
            if not but_last:  # else the backward that follows counts these tokens
                bar.update(state.segment.num_rows * chunk.num_tokens)

    @torch.no_grad()
    def score(
        self, state: SegmentState, targets: Tensor, bar: tqdm, *, keep: bool = False
    ) -> TokenScores:
        """Log-probs and entropies of `targets` `[B, T]`.

        Args:
            keep: capture the segment in the same pass. Else the pages in between are freed again.
        """
        parts, chunks = [], self._chunks(state)
        for chunk in chunks:
            is_kept = keep or chunk is not chunks[-1]
            with self._turn(Pass.SCORE):
                cache, output = self._forward(state, chunk, keeps_state=is_kept)
                parts.append(self._score(chunk, output, targets[:, chunk.start : chunk.stop]))
            self._add_router_sums(state, chunk, output)
            if is_kept:
                self._keep(state, chunk, cache)
            del cache, output
            bar.update(state.segment.num_rows * chunk.num_tokens)
        if not keep:
            state.free()
        return TokenScores(
            torch.cat([part.logps for part in parts], dim=1),
            torch.cat([part.entropies for part in parts], dim=1),
        )

    def backward(self, state: SegmentState, loss: SegmentLoss, bar: tqdm) -> None:
        """Accumulate dL/dparameters of a captured segment; uses its state up.

        Chunks in reverse. Each is run again with a graph on the state before it, and
        backpropagates its own part of the loss together with the cotangents that later tokens
        left on its pages; that leaves cotangents on the pages before it.
        """
        for chunk in reversed(self._chunks(state)):
            with self._turn(Pass.BACKWARD):
                self._backward_chunk(state, chunk, loss)
            bar.update(state.segment.num_rows * chunk.num_tokens)

    def _backward_chunk(self, state: SegmentState, chunk: Chunk, loss: SegmentLoss) -> None:
        tokens = loss.cotangents(chunk)
        with torch.enable_grad():
            cache, output = self._forward(
                state,
                chunk,
                state_only=self._may_end_early and tokens is None,
                keeps_state=state.holds(chunk),
            )
            roots, cotangents = [], []
            for root, cotangent in (
                *self._token_roots(chunk, output, loss, tokens),
                *self._router_roots(state, chunk, output, loss),
                *self._state_roots(state, chunk, cache),
            ):
                if root.requires_grad:
                    roots.append(root)
                    cotangents.append(cotangent)
        # Nobody reads this chunk again; its own keys and values are in the graph.
        captured = state.choices(chunk)
        state.free_chunk(chunk)
        if roots:
            self.backend.backward(roots, cotangents)
            cache.leave_cotangents()
        cache.let_go()
        self._check_choices(cache.choices, captured, state, chunk)
        if roots:
            for before in state.lineage():
                if before is not state:
                    before.note_reader()

    def _check_choices(
        self, choices: Choices, captured: Choices | None, state: SegmentState, chunk: Chunk
    ) -> None:
        """Raise, on all ranks of the group, if the chunk has chosen otherwise than in its capture.

        After the backward, in which layers may have been run once more.
        """
        if choices.is_empty:  # on every rank: the model chooses nothing
            return
        differing = choices.differing(captured)
        if not self.group.any([bool(differing)])[0]:
            return
        first = state.segment.start + chunk.start
        where = ", ".join(differing[:3]) or "on another rank, a module"
        found = (
            f"{where} chose other tokens or experts for the {chunk.num_tokens:,} tokens from "
            f"position {first:,} on than when these were captured. The gradient"
        )
        if self.config.sp_size % self.backend.ep_size:
            # Experts run rows of other groups beside these, other ones each time, and a product of
            # more rows rounds its last bits in another way.
            logger.warning(f"{found} is that of the second choice.")
            return
        raise ReplayMismatchError(
            f"{found} would be that of another function. Both runs have the same inputs, so a "
            "kernel gives other results each time: call torch.use_deterministic_algorithms(True), "
            "or choose other kernels (experts_implementation='eager' when the model is loaded)."
        )

    # ---------------------------------------------------------------- one pass

    @contextmanager
    def _turn(self, kind: Pass) -> Iterator[None]:
        with self.lockstep.turn(kind) as is_collective:
            if not is_collective:
                yield
                return
            self.backend.begin_pass()
            yield
            self.backend.end_pass()

    def run_idle(self, kind: Pass) -> None:
        """One pass of zero weight that every rank makes."""
        with self._turn(kind):
            self._run_idle(kind)

    def _join(self, kind: Pass) -> None:
        """One pass of zero weight while other ranks make real ones."""
        self.backend.begin_pass()
        self._run_idle(kind)
        self.backend.end_pass()

    def _run_idle(self, kind: Pass) -> None:
        """One token without a history, for the sake of the collectives in its pass."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.decoder.device)
        state = self.new_state(Segment(token, (1,)), None, needs_cotangent=False)
        chunk = self._chunks(state)[0]
        with self.decoder.attached():
            if kind is Pass.BACKWARD:
                self._backward_chunk(state, chunk, SegmentLoss())
                return
            with torch.no_grad():
                _, output = self._forward(state, chunk)
                if kind is Pass.SCORE:
                    self._score(chunk, output, torch.full_like(token, -1))

    @property
    def _may_end_early(self) -> bool:
        """Whether a forward whose output nobody reads may leave the last layer's dead work out.

        Not where passes must be alike on all ranks, or the last layer's routing counts.
        """
        is_free = not self.backend.needs_anchor and Pass.CAPTURE not in self.backend.turns
        return is_free and not self.config.router_statistics

    def _chunks(self, state: SegmentState) -> list[Chunk]:
        return state.segment.chunks(self.config.chunk_size)

    def _forward(
        self,
        state: SegmentState,
        chunk: Chunk,
        *,
        state_only: bool = False,
        keeps_state: bool = True,
    ) -> tuple[ChunkCache, ChunkOutput]:
        segment = state.segment
        start = segment.start + chunk.start
        layers = range(self.decoder.num_layers)
        histories = [state.history(layer, before_chunk=chunk.index) for layer in layers]
        reader = Reader(
            histories,
            self.store,
            start,
            self.config.attention,
            is_recomputed=torch.is_grad_enabled() and self.decoder.is_checkpointed,
            travel=(travel := self._travel(chunk)),
            recurrent_layers=self.decoder.recurrent_layers,
            index_histories={
                layer: state.history(place, before_chunk=chunk.index)
                for layer, place in self.decoder.index_places.items()
            },
            index_ties=self.config.index_ties,
        )
        cache = ChunkCache(reader, state_only=state_only, keeps_state=keeps_state)
        output = self.decoder.run_chunk(
            travel.take(segment.token_ids[:, chunk.start : chunk.stop], 0),
            travel.positions(start),
            cache,
            with_router=self.config.router_statistics,
        )
        return cache, output

    def _score(self, chunk: Chunk, output: ChunkOutput, targets: Tensor) -> TokenScores:
        """Scores of a chunk's `targets` `[B, C]`, each computed by the rank that owns the token."""
        travel = self._travel(chunk)
        targets = travel.take(targets, -1)

        def score(hidden: Tensor) -> tuple[Tensor, Tensor]:
            scores = score_tokens(
                self.decoder.logits,
                hidden,
                targets,
                self.config.temperature,
                self.config.logprob_chunk_size,
                self._head_of,
            )
            return scores.logps, scores.entropies  # what hooks on modules can look into

        logps, entropies = self.decoder.at_head(score, output.hidden)
        return TokenScores(travel.gather(logps, dim=1), travel.gather(entropies, dim=1))

    def _head_of(self, hidden: Tensor) -> nn.Linear | None:
        """The head, where a kernel takes its weight; see `Decoder.plain_head`."""
        return self.decoder.plain_head(hidden, impl_beside(self.config.attention))

    def _travel(self, chunk: Chunk) -> ChunkTravel:
        """How the chunk's tokens are divided over the ranks of the group."""
        return self._travel_of(chunk.num_tokens)

    def _make_travel(self, num_tokens: int) -> ChunkTravel:
        ownership = Ownership(num_tokens, self.group.size, self.config.sp_layout)
        return ChunkTravel(self.group, ownership, self.decoder.device)

    def _keep(self, state: SegmentState, chunk: Chunk, cache: ChunkCache) -> None:
        state.note_choices(chunk, cache.choices)
        for layer, place in self.decoder.index_places.items():
            rotated, rest = cache.own_index(layer)
            runs = self._travel(chunk).own_runs(rotated.shape[-2])
            state.append(chunk, place, rotated, rest, runs, IndexKeys)
        for layer in range(self.decoder.num_layers):
            if layer in self.decoder.recurrent_layers:
                state.append_snapshot(chunk, layer, *cache.own(layer))
                continue
            key, value = cache.own(layer)
            runs = self._travel(chunk).own_runs(key.shape[-2])
            state.append(chunk, layer, key, value, runs)

    def _router_sums(self, state: SegmentState, chunk: Chunk, output: ChunkOutput) -> RouterSums:
        """Of this rank's tokens."""
        top_k = self.decoder.num_experts_per_token
        assert top_k is not None, "router statistics of a model without experts"
        real = self._travel(chunk).take(state.segment.real_tokens(chunk), False)
        return router_sums(output.router_logits, real, top_k)

    def _add_router_sums(self, state: SegmentState, chunk: Chunk, output: ChunkOutput) -> None:
        if self.config.router_statistics:
            sums = self._router_sums(state, chunk, output)
            for part in (sums.counts, sums.probs, sums.num_rows):
                self.group.sum_(part)
            state.router = sums if state.router is None else state.router + sums

    def _token_roots(
        self,
        chunk: Chunk,
        output: ChunkOutput,
        loss: SegmentLoss,
        cotangents: TokenCotangents | None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if cotangents is None and not self.backend.needs_anchor:
            return
        travel = self._travel(chunk)
        if cotangents is not None:
            cotangents = cotangents.map(lambda whole: travel.take(whole, 0.0))
        if loss.targets is None:
            targets = torch.full(output.hidden.shape[:2], -1, device=output.hidden.device)
        else:
            targets = travel.take(loss.targets[:, chunk.start : chunk.stop], -1)
        parameters = [p for p in self.decoder.head.parameters() if p.requires_grad]

        def anchor(hidden: Tensor) -> Tensor:
            return score_anchor(
                self.decoder.logits,
                hidden,
                targets,
                cotangents,
                self.config.temperature,
                self.config.logprob_chunk_size,
                parameters,
                self._head_of,
            )

        root = self.decoder.at_head(anchor, output.hidden)
        yield root, torch.ones_like(root)

    def _router_roots(
        self, state: SegmentState, chunk: Chunk, output: ChunkOutput, loss: SegmentLoss
    ) -> Iterator[tuple[Tensor, Tensor]]:
        cotangent = loss.router_probs
        if cotangent is None and not (
            # Ranks must leave the decoder by the same outputs: ZeRO-3 counts them.
            self.backend.needs_anchor and self.config.router_statistics
        ):
            return
        probs = self._router_sums(state, chunk, output).probs
        yield probs, torch.zeros_like(probs) if cotangent is None else cotangent.to(probs.dtype)

    def _state_roots(
        self, state: SegmentState, chunk: Chunk, cache: ChunkCache
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What the chunk adds to each layer's state, with what later tokens left on it."""
        if not state.holds(chunk):
            return  # on every rank: a last chunk, which nobody reads
        layers = [state.pages(layer, chunk) for layer in range(self.decoder.num_layers)]
        # A window may hide one rank's pages and not another's. All must go the same way back.
        is_read = self.group.any(
            [any(page.key_cotangent is not None for page in pages) for pages in layers]
        )
        for layer, pages in enumerate(layers):
            if not is_read[layer]:
                continue
            key, value = cache.own(layer)
            yield from zip((key, value), self.store.join_cotangents(pages, key, value), strict=True)
