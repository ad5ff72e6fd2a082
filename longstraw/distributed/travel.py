"""Queries travel, state stays: how the parts of a chunk and the whole of it become one another.

Attention, whose state is divided by tokens:

    forward     gather queries; every rank attends with all of them to the keys it owns;
                send each rank what was found for its rows; merge by log-sum-exp
    backward    gather queries, outputs and their gradients; every rank differentiates the keys it
                owns, which leaves dK and dV where the keys are; sum dQ at home

What a rank receives for a chunk of C tokens in one layer, with B rows, H heads of D (values Dv),
an item of e bytes, sums of s = 4 (8 for fp64), and w tokens to a rank (`Ownership.width`, about
C / sp):

    forward     (sp - 1) B H w (D e + (Dv + 1) s)
    backward    (sp - 1) B H w ((D + 2 Dv) e + (D + 1) s)

Beside the layers, the scores of a chunk with a loss take (sp - 1) B w 2 s. It does not depend on
the history: moving keys and values instead would cost 2 K D e for each of its tokens, and their
gradients again in the backward. Heads need not be divisible by anything.

A recurrence, which needs all tokens in order and has nothing to do with other heads, is divided by
heads instead:

    forward     send each rank its heads of all tokens; every rank runs the whole chunk for them;
                send each rank its tokens of all heads
    backward    the same two ways back

Each way takes (sp - 1) / sp B w F e, forwards and backwards, with F features to a token: there what
enters convolution and recurrence, back what comes out of it.

Knows tokens and their owners; knows nothing of attention, pages or models.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from .axes import SequenceGroup
from .ownership import Ownership


class Travel:
    """The queries of one attention call and where they meet keys. Here they stay where they are.

    Attributes:
        is_local: whether no other rank has a part in it.
        rank, size: this rank's place among those that have, and their number.
    """

    is_local = True
    rank = 0
    size = 1

    def gather(self, part: Tensor, dim: int = -2) -> Tensor:
        """This rank's tokens along `dim` -> all that attend together, in order, on every rank."""
        return part

    def parts_home(self, whole: Tensor) -> Tensor:
        """What every rank found for all tokens `[.., C, D]` -> what it found for those here,
        `[sp, .., w, D]`."""
        return whole.unsqueeze(0)

    def sum_home(self, whole: Tensor) -> Tensor:
        """The sum over ranks of what each has for all tokens `[.., C, D]`, for those here."""
        return whole

    def own_runs(self, num_keys: int) -> list[tuple[slice, int]]:
        """Which of the own keys this rank attends to: columns, and where their first one stands.

        Columns are consecutive tokens, and places count from the first own token of any rank.
        """
        return [(slice(0, num_keys), 0)]

    def to_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """This rank's tokens of all heads -> all tokens of this rank's heads. Differentiable.

        Args:
            parts: each `[B, w, sp, F]`, by the rank that has the heads.

        Returns:
            Each `[B, C, F]`.
        """
        return [part[:, :, 0] for part in parts]

    def from_heads(self, whole: Tensor) -> Tensor:
        """All tokens of this rank's heads `[B, C, H / sp, D]` -> this rank's tokens of all heads
        `[B, w, H, D]`. Differentiable."""
        return whole


class ChunkTravel(Travel):
    """For a chunk that is divided over the ranks of a group.

    Each rank's part is padded to the same width; pads come last, belong to nobody and are dropped
    when parts are put together.

    Args:
        group: the ranks.
        ownership: who has which columns.
        device: of the tensors.
    """

    def __init__(self, group: SequenceGroup, ownership: Ownership, device: torch.device) -> None:
        self.group = group
        self.ownership = ownership
        self._device = device
        self.runs = ownership.runs[group.rank]
        self.num_owned = sum(len(run) for run in self.runs)
        self.is_local = group.is_alone
        self.rank, self.size = group.rank, group.size

    # ---------------------------------------------------------------- the whole -> this rank's part

    def take(self, whole: Tensor, fill: float) -> Tensor:
        """`[B, C]` -> `[B, w]`: this rank's columns, behind them `fill` as far as others have."""
        if self.group.is_alone:
            return whole
        part = whole.new_full((whole.shape[0], self.ownership.width), fill)
        part[:, : self.num_owned] = whole[:, self._columns]
        return part

    def positions(self, start: int) -> Tensor:
        """`[w]`, where this rank's tokens stand when the chunk begins at `start`.

        Pads stand at the chunk's last token: a model may have no position after it.
        """
        last = self.ownership.num_tokens - 1
        if self.group.is_alone:
            return torch.arange(start, start + last + 1, device=self._device)
        part = torch.full((self.ownership.width,), last, device=self._device)
        part[: self.num_owned] = self._columns
        return part + start

    # ---------------------------------------------------------------- attention

    def gather(self, part: Tensor, dim: int = -2) -> Tensor:
        if self.group.is_alone:
            return part
        dim %= part.dim()
        whole = self.group.gather(part).movedim(0, dim).flatten(dim, dim + 1)
        return whole.index_select(dim, self._places)

    def parts_home(self, whole: Tensor) -> Tensor:
        return self.group.exchange(self._by_owner(whole))

    def sum_home(self, whole: Tensor) -> Tensor:
        return whole if self.is_local else self.group.sum_home(self._by_owner(whole))

    def own_runs(self, num_keys: int) -> list[tuple[slice, int]]:
        runs, first = [], 0
        for run in self.runs:
            runs.append((slice(first, first + len(run)), run.start))
            first += len(run)
        return runs

    # ---------------------------------------------------------------- recurrence

    def to_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if self.group.is_alone:
            return super().to_heads(parts)
        sizes = [part.shape[-1] for part in parts]
        sent = torch.cat([*parts], dim=-1).movedim(2, 0)
        # [sp, B, w, F] by owner -> [B, C, F]: pads never reach the recurrence.
        found = _exchange(sent, self.group).movedim(0, 1).flatten(1, 2)
        return list(found.index_select(1, self._places).split(sizes, dim=-1))

    def from_heads(self, whole: Tensor) -> Tensor:
        if self.group.is_alone:
            return whole
        found = _exchange(self._by_owner(whole.flatten(2)), self.group)
        return found.unflatten(-1, whole.shape[2:]).movedim(0, 2).flatten(2, 3)

    def _by_owner(self, whole: Tensor) -> Tensor:
        """`[.., C, D]` -> `[sp, .., w, D]`, zeros at pads: they must not reach a gradient."""
        sp_size, width = self.group.size, self.ownership.width
        if self._is_in_order:
            return whole.unflatten(-2, (sp_size, width)).movedim(-3, 0)
        padded = whole.new_zeros(*whole.shape[:-2], sp_size * width, whole.shape[-1])
        padded.index_copy_(-2, self._places, whole)
        return padded.unflatten(-2, (sp_size, width)).movedim(-3, 0)

    @cached_property
    def _is_in_order(self) -> bool:
        """Whether the parts side by side are the whole: no pads, one run to each rank."""
        columns = [c for rank in range(self.group.size) for c in self.ownership.columns(rank)]
        is_full = len(columns) == self.group.size * self.ownership.width
        return is_full and columns == list(range(len(columns)))

    @cached_property
    def _columns(self) -> Tensor:
        return torch.tensor(
            self.ownership.columns(self.group.rank), dtype=torch.long, device=self._device
        )

    @cached_property
    def _places(self) -> Tensor:
        """`[C]`, where each column stands among the padded parts of all ranks."""
        places = [0] * self.ownership.num_tokens
        for rank in range(self.group.size):
            for place, column in enumerate(self.ownership.columns(rank)):
                places[column] = rank * self.ownership.width + place
        return torch.tensor(places, device=self._device)


class DecodeTravel(Travel):
    """For decoding, where every rank of a group runs the same few tokens.

    Pages are each rank's own. The tokens decoded so far are on all of them, and count on the first.
    """

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.is_local = group.is_alone
        self.rank, self.size = group.rank, group.size

    def parts_home(self, whole: Tensor) -> Tensor:
        return self.group.gather(whole)

    def own_runs(self, num_keys: int) -> list[tuple[slice, int]]:
        return super().own_runs(num_keys) if self.group.is_leader else []

    def to_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part[:, :, self.group.rank] for part in parts]

    def from_heads(self, whole: Tensor) -> Tensor:
        return self.group.gather(whole).movedim(0, 2).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """`SequenceGroup.exchange`, which is its own transpose."""

    @staticmethod
    def forward(ctx, parts, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return group.exchange(parts)

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        return ctx.group.exchange(grad_output), None


def _exchange(parts: Tensor, group: SequenceGroup) -> Tensor:
    return _Exchange.apply(parts, group)  # type: ignore[no-any-return]
