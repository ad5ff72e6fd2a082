"""Which runs of tokens several sequences share: the tree of a group's members, or of prompts.

Found on token ids, never on text. Knows tokens and what is captured; knows nothing of models or
losses.

A run `[start, stop)` is shared by sequences that have token `stop` in common as well: it is what
the run's last token has to predict, so that a run has one set of targets. The next run begins with
it. So the last token of a prompt is run with each response, and here the same holds at every place
where sequences part.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .state import SegmentState

HeldRuns = Callable[[SegmentState], Sequence[SegmentState]]
"""The captured segments that continue a state."""


@dataclass(frozen=True)
class Branch:
    """A run of tokens that some sequences have in common, and what follows it.

    Attributes:
        members: whose run it is, as indices of the sequences.
        start, stop: token range within each of them.
        children: what follows.
        state: the captured state of the run, if it is held.
    """

    members: tuple[int, ...]
    start: int
    stop: int
    children: "tuple[Branch, ...]" = ()
    state: SegmentState | None = field(default=None, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_inner(self) -> bool:
        """Whether it is a segment of its own: others follow it, or it is captured already."""
        return bool(self.children) or self.state is not None

    @property
    def longest_inner_path(self) -> int:
        """Most tokens of inner runs on a way from here to an end."""
        if not self.is_inner:
            return 0
        return self.num_tokens + max((c.longest_inner_path for c in self.children), default=0)

    def walk(self) -> "Iterator[Branch]":
        """This run and all after it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


def grow_branches(
    sequences: Sequence[Tensor],
    *,
    members: Sequence[int] | None = None,
    min_shared: int,
    run_last: bool = False,
    candidates: Sequence[SegmentState] = (),
    held: HeldRuns = lambda state: (),
) -> tuple[Branch, ...]:
    """The tree of `sequences`, cut where they part and where what is captured ends.

    Args:
        sequences: 1-D token ids on the CPU.
        members: which of them; all by default.
        min_shared: fewest tokens of which a shared run is made. What is captured has no minimum.
        run_last: whether a sequence's last token is run, or is only the target of the one before.
        candidates: captured segments that stand where the sequences begin.
        held: what continues them.

    Returns:
        The runs that begin at token 0. A sequence that has no token to run is in none.
    """
    grower = _Grower(sequences, max(min_shared, 1), run_last, held)
    everyone = range(len(sequences)) if members is None else members
    return tuple(grower.grow(everyone, 0, candidates))


@dataclass(frozen=True)
class _Grower:
    sequences: Sequence[Tensor]
    min_shared: int
    run_last: bool
    held: HeldRuns

    def grow(
        self, members: Sequence[int], start: int, candidates: Sequence[SegmentState]
    ) -> Iterator[Branch]:
        """What `members` do from token `start` on; they agree on everything before it."""
        rest = [i for i in members if self._stop(i) > start]
        for state in sorted(candidates, key=lambda s: -s.segment.num_tokens):
            users = self._users(rest, start, state)
            if users:
                stop = start + state.segment.num_tokens
                children = tuple(self.grow(users, stop, self.held(state)))
                yield Branch(tuple(users), start, stop, children, state)
                rest = [i for i in rest if i not in users]
        yield from self._part(rest, start, known=0)

    def _users(self, members: Sequence[int], start: int, state: SegmentState) -> list[int]:
        """Those who run the tokens of `state` and go on with the same token."""
        tokens = state.tokens_on_cpu
        stop = start + tokens.numel()
        fits = [
            i
            for i in members
            if start < stop <= self._stop(i) and torch.equal(self.sequences[i][start:stop], tokens)
        ]
        return [i for i in fits if self._token(i, stop) == self._token(fits[0], stop)]

    def _part(self, members: Sequence[int], start: int, known: int) -> Iterator[Branch]:
        """Cut `members`, who agree on `known` tokens from `start`, where they part."""
        parts: dict[int | None, list[int]] = {}
        for i in members:
            parts.setdefault(self._token(i, start + known), []).append(i)
        for part in parts.values():
            agreed = self._agreed(part, start)
            if all(self.sequences[i].numel() == start + agreed for i in part):
                # One sequence, or several that are equal to the end: run once for all of them.
                yield Branch(tuple(part), start, self._stop(part[0]))
            elif agreed - 1 >= self.min_shared:
                stop = start + agreed - 1
                yield Branch(tuple(part), start, stop, tuple(self.grow(part, stop, ())))
            else:
                yield from self._part(part, start, known=agreed)

    def _agreed(self, members: Sequence[int], start: int) -> int:
        """How many tokens from `start` all of them have in common."""
        first = self.sequences[members[0]][start:]
        agreed = first.numel()
        for i in members[1:]:
            other = self.sequences[i][start : start + agreed]
            same = first[: other.numel()] == other
            agreed = other.numel() if bool(same.all()) else int(same.int().argmin())
        return agreed

    def _stop(self, member: int) -> int:
        return self.sequences[member].numel() - (0 if self.run_last else 1)

    def _token(self, member: int, index: int) -> int | None:
        sequence = self.sequences[member]
        return int(sequence[index]) if index < sequence.numel() else None
