"""The cache layers of a recurrent layer: the state it starts from, and the state it ends with.

Nothing is written in place. A snapshot is read by every member of a group and by the rerun of the
chunk behind it, and under gradient checkpointing a layer reads it twice.
"""

from typing import Any

import torch
from torch import Tensor

from .pages import Snapshot
from .reader import Reader, ReaderLayer, StateIsComplete

Boundary = tuple[Tensor, Tensor]
"""Recurrent state `[B, Hv, Dk, Dv]`, and convolution inputs `[B, channels, kernel - 1]`."""


class _Recurrence(ReaderLayer):
    """What both kinds have in common.

    Attributes:
        travel: how tokens that other ranks own come to the heads of this one.
        decodes: whether tokens come one at a time and nothing is differentiated.
    """

    decodes = False

    def __init__(self, reader: Reader, layer: int) -> None:
        super().__init__(reader, layer)
        self.travel = reader.travel

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("a recurrent layer has no keys and values")

    def _read(self, pages: list[Any], device: torch.device) -> Boundary | None:
        if not pages:
            return None
        snapshot = pages[-1]
        assert isinstance(snapshot, Snapshot), "the history of a recurrent layer"
        return self.reader.store.read_snapshot(snapshot, device)


class ChunkRecurrence(_Recurrence):
    """One recurrent layer of one chunk's forward.

    Attributes:
        ends_forward: whether the forward is over when this layer has its state.
        keeps_state: whether anybody will read `own`.
        own: the state behind the chunk as the first forward produced it; under autograd the roots
            that carry the cotangents of later readers.
    """

    own: Boundary | None = None
    ends_forward = False
    keeps_state = True

    def __init__(self, reader: Reader, layer: int) -> None:
        super().__init__(reader, layer)
        self._start: Boundary | None = None

    def read_state(self, num_rows: int, device: torch.device) -> Boundary | None:
        """The state before the chunk, for `num_rows` rows; None at the beginning of a sequence.

        The same leaves of the graph each time, so that a recompute meets the first forward's.
        """
        start = self._start
        if start is None:
            found = self._read(self.history, device)
            if found is None:
                return None
            is_leaf = torch.is_grad_enabled() and self.history[-1].needs_cotangent
            recurrent, conv = (x.detach().requires_grad_(is_leaf) for x in found)
            start = recurrent, conv
            if torch.is_grad_enabled():  # else nobody comes back to it
                self._start = start
        recurrent, conv = (x.expand(num_rows, *x.shape[1:]) for x in start)
        return recurrent, conv

    def take_state(self, recurrent: Tensor, conv: Tensor) -> None:
        """Take the state behind the chunk."""
        if self.own is None and self.keeps_state:
            # Only the first time: a recompute under checkpointing makes tensors of another graph.
            self.own = recurrent, conv
            if self.ends_forward:
                raise StateIsComplete

    def leave_cotangents(self) -> None:
        """Add what a backward left on the leaves to the snapshot they were read from."""
        if self._start is None or all(leaf.grad is None for leaf in self._start):
            return
        snapshot = self.history[-1]
        assert isinstance(snapshot, Snapshot)
        recurrent, conv = (
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._start
        )
        self.reader.store.add_snapshot_cotangent(snapshot, recurrent, conv)
        self._start = None


class DecodeRecurrence(_Recurrence):
    """One recurrent layer of a generation: each row goes on from the snapshot that it continues."""

    decodes = True

    def __init__(self, reader: Reader, layer: int) -> None:
        super().__init__(reader, layer)
        self._now: Boundary | None = None

    def read_state(self, num_rows: int, device: torch.device) -> Boundary | None:
        """The state of all rows before the next token; None at the beginning of all."""
        if self._now is None:
            shared = self._read(self.history, device)
            if shared is not None:
                recurrent, conv = (x.expand(num_rows, *x.shape[1:]) for x in shared)
                self._now = recurrent, conv
            elif self.row_runs:
                self._now = self._gather_rows(num_rows, device)
        return self._now

    def take_state(self, recurrent: Tensor, conv: Tensor) -> None:
        """Take the state behind one more token."""
        self._now = recurrent, conv
        self.num_seen += 1

    def _gather_rows(self, num_rows: int, device: torch.device) -> Boundary | None:
        """Rows of different histories; zeros where a row has none."""
        rows: Boundary | None = None
        for run in self.row_runs:
            found = self._read(run.pages, device)
            if found is None:
                continue
            if rows is None:
                recurrent, conv = (x.new_zeros(num_rows, *x.shape[1:]) for x in found)
                rows = recurrent, conv
            for target, part in zip(rows, found, strict=True):
                target[run.rows] = part
        return rows
