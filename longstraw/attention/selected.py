"""Latent attention over the tokens that were selected for each query.

A layer's state is brought to the device that reads as one table, for the time of one layer's
attention: what queries select of it lies anywhere. Beside the table nothing grows with the history,
and the work is that of the copy and of the selected tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from longstraw_kernels.availability import impl_beside
from longstraw_kernels.page_copy import gather_pages, scatter_add_pages
from longstraw_kernels.selected_attention import selected_attention, selected_attention_backward

from ..state import LayerHandle, Page, read_together
from .operands import AttentionOptions, Saved

_NOWHERE = 2**62


@dataclass
class _Places:
    """Where the tokens of each row of a batch stand in a table: runs of consecutive positions.

    Attributes:
        starts: per row, the position of each run's first token, ascending.
        places: per row, its place in the table.
    """

    starts: list[list[int]]
    places: list[list[int]]
    _ends: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, num_rows: int) -> "_Places":
        lists = [[[] for _ in range(num_rows)] for _ in range(2)]
        return cls(lists[0], lists[1], [(-1, -1)] * num_rows)

    def add(self, row: int, position: int, place: int, num_tokens: int) -> None:
        """Tokens from `position` on stand in the table from `place` on."""
        if self._ends[row] != (position, place):
            self.starts[row].append(position)
            self.places[row].append(place)
        self._ends[row] = (position + num_tokens, place + num_tokens)

    def find(self, positions: Tensor) -> Tensor:
        """Places `[B, T, K]` of positions `[B, T, K]`; -1 stays -1."""
        num_runs = max(map(len, self.starts))
        if num_runs == 0:
            return positions.new_full(positions.shape, -1)
        starts, places = (
            torch.tensor(
                [row + [fill] * (num_runs - len(row)) for row in rows], device=positions.device
            )
            for rows, fill in ((self.starts, _NOWHERE), (self.places, 0))
        )
        flat = positions.flatten(1).long()
        run = (torch.searchsorted(starts, flat, right=True) - 1).clamp(min=0)
        found = places.gather(1, run) + flat - starts.gather(1, run)
        return torch.where(flat >= 0, found, -1).view(positions.shape)


class SelectedRows:
    """The state of one layer as a table, and the rows of it that each query reads.

    Args:
        handle: the history.
        options: of latent attention.
        selection: positions `[B, T, K]` of the tokens that this rank owns; -1 for none.
        key, value: latents and rotary keys of the own tokens, `[B, 1, T', ..]`.
    """

    def __init__(
        self,
        handle: LayerHandle,
        options: AttentionOptions,
        selection: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> None:
        assert options.is_latent, "tokens are selected for latent attention only"
        self.handle, self.options = handle, options
        self.impl = impl_beside(handle.impl)
        self.own = key, value
        self.latent_dim = key.shape[-1]
        self.num_rows = key.shape[0]
        self.own_runs = handle.travel.own_runs(key.shape[-2])
        self._places = _Places.of(self.num_rows)
        self.num_places = self._lay_out()
        self.index = self._places.find(selection).flatten(0, 1)

    def _lay_out(self) -> int:
        """Give every token of the history and of the own ones a place; returns how many."""
        place = 0
        for page, rows in self._pages():
            size = page.num_tokens if page.num_rows > 1 else 0
            for at, row in enumerate(rows):
                self._places.add(row, page.start, place + at * size, page.num_tokens)
            place += page.num_rows * page.num_tokens
        self.num_history = place
        for columns, first in self.own_runs:
            size = columns.stop - columns.start
            for row in range(self.num_rows):
                self._places.add(row, self.handle.own_start + first, place, size)
                place += size
        return place

    def _pages(self) -> Iterator[tuple[Page, Sequence[int]]]:
        """Every page of the history, with the rows that read it."""
        for page in self.handle.history:
            yield page, range(self.num_rows)
        for run in self.handle.row_runs:
            for page in run.pages:
                yield page, run.row_numbers

    def _table(self, like: Tensor) -> Tensor:
        """`[M, D]`: the state of every token."""
        width = sum(x.shape[-1] for x in self.own)
        if self.num_places == 0:  # a table is read at some place for no token too
            return like.new_zeros(1, width)
        table = like.new_empty(self.num_places, width)
        latents, rotary = self._split(table)
        place = 0
        pages = [page for page, _ in self._pages()]
        for found in read_together(self.handle.store, pages, like.device, like.dtype, at_once=True):
            keys = [key.flatten(0, 2) for _, key, _ in found]
            values = [value.flatten(0, 2) for _, _, value in found]
            places = list(accumulate(map(len, keys), initial=place))
            place = places.pop()
            gather_pages(keys, places, latents, impl=self.impl)
            gather_pages(values, places, rotary, impl=self.impl)
        for columns, _ in self.own_runs:
            size = (columns.stop - columns.start) * self.num_rows
            run = slice(place, place + size)
            key, value = (x[..., columns, :].flatten(0, 2) for x in self.own)
            latents[run], rotary[run] = key, value
            place = run.stop
        return table

    def forward(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """`(out, lse)` of queries `[B, H, T, D]` over what this rank owns of their selection."""
        options, shape = self.options, q.shape
        out, lse = selected_attention(
            _by_query(q),
            self._table(q),
            self.index,
            options.softmax_scale,
            self.latent_dim,
            impl=self.impl,
        )
        out, lse = (x.view(shape[0], shape[2], shape[1], -1) for x in (out, lse))
        return out.transpose(1, 2).contiguous(), lse.squeeze(-1).transpose(1, 2).contiguous()

    def backward(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, and those of own latents and rotary keys; leaves those of pages there."""
        shape = saved.q.shape
        dq, dtable = selected_attention_backward(
            _by_query(saved.grad_out),
            _by_query(saved.q),
            self._table(saved.q),
            self.index,
            _by_query(saved.out),
            _by_query(saved.lse.unsqueeze(-1)).squeeze(-1),
            self.options.softmax_scale,
            impl=self.impl,
        )
        self._leave(dtable[: self.num_history])
        dkey, dvalue = (torch.zeros_like(x, dtype=dtable.dtype) for x in self.own)
        place = self.num_history
        for columns, _ in self.own_runs:
            size = columns.stop - columns.start
            part = dtable[place : place + size * self.num_rows]
            part = part.view(self.num_rows, 1, size, -1)
            dkey[..., columns, :] = part[..., : self.latent_dim]
            dvalue[..., columns, :] = part[..., self.latent_dim :]
            place += size * self.num_rows
        dq = dq.view(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
        return dq.contiguous(), dkey, dvalue

    def _leave(self, dtable: Tensor) -> None:
        """Add the history's gradients to the pages that need them."""
        store, place, wanted = self.handle.store, 0, []
        for page, _ in self._pages():
            if page.needs_cotangent:
                wanted.append((page, place))
            place += page.num_rows * page.num_tokens
        if store.lies_on(dtable.device):
            sums = [store.cotangents_of(page) for page, _ in wanted]
            places = [place for _, place in wanted]
            for part, into in zip(self._split(dtable), zip(*sums, strict=True), strict=False):
                rows = [x.view(-1, x.shape[-1]) for x in into]
                scatter_add_pages(part, places, rows, impl=self.impl)
            return
        place_of = {id(page): place for page, place in wanted}
        for page in store.visit_cotangents([page for page, _ in wanted], dtable.device):
            place = place_of[id(page)]
            rows = dtable[place : place + page.num_rows * page.num_tokens]
            parts = self._split(rows.view(page.num_rows, 1, page.num_tokens, -1))
            store.add_cotangent(page, *parts)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The part of latents and that of rotary keys, of `[.., D]`."""
        return x[..., : self.latent_dim], x[..., self.latent_dim :]


def _by_query(x: Tensor) -> Tensor:
    """`[B, H, T, D]` -> `[B*T, H, D]`."""
    return x.transpose(1, 2).flatten(0, 1)
