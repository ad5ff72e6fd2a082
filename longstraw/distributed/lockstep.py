"""Ranks whose passes contain collectives make them together; ranks that fail say so.

Under ZeRO-3 every forward gathers weights, and with partitioned gradients every backward reduces
them: all ranks must make the same passes in the same order, although their prompts, members and
chunks differ. Agreeing on counts beforehand would need every count to be known; instead each rank
says before a pass which kind it wants, all make the lowest kind that anyone wants, and those who
wanted another make it with zero weight.

Knows ranks and kinds of passes; knows nothing of models or of what a pass does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from ..errors import RankLostError, RanksAbortedError
from .watch import RankWatch


class Pass(IntEnum):
    """What a rank wants next. The lowest wish of all ranks is what all do."""

    FAILED = 0
    CAPTURE = 1
    """Forward of the decoder, no graph."""
    SCORE = 2
    """Forward of decoder and head, no graph."""
    BACKWARD = 3
    """Forward and backward of decoder and head."""
    FINISHED = 4


def _do_nothing(kind: Pass) -> None:
    pass


class LockStep:
    """Takes turns with the other ranks.

    Args:
        turns: the kinds of passes that contain collectives. Others need no turn.
        run_idle: makes a pass of a kind with zero weight.
        timeout_seconds: how long to wait for a rank without a sign of life.
        watch: told of every exchange, and asked which rank is missing when one fails.

    Attributes:
        world_size: ranks that take turns; 1 where no process group exists.
    """

    _num_made = 0  # the same on every rank, as making one is collective

    def __init__(
        self,
        *,
        turns: frozenset[Pass] = frozenset(),
        run_idle: Callable[[Pass], None] = _do_nothing,
        timeout_seconds: float = 1800.0,
        watch: RankWatch | None = None,
    ) -> None:
        self.turns = turns
        self.run_idle = run_idle
        self.watch = watch or RankWatch()
        self.num_idle = 0
        self._depth = 0
        self._is_suspended = False
        self._is_reachable = True
        is_distributed = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size() if is_distributed else 1
        self._timeout_seconds = timeout_seconds
        self._name = f"lockstep {LockStep._num_made}"
        self._num_exchanges = 0
        self._group = None
        if self.world_size > 1:
            # A group of its own, on CPU tensors: no device is synchronized to exchange a number,
            # and its timeout holds (groups made by libraries often have another).
            timeout = timedelta(seconds=timeout_seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
            LockStep._num_made += 1

    @contextmanager
    def together(self, what: str = "the update") -> Iterator[None]:
        """Work that every rank enters, and leaves when all have finished theirs.

        A rank that is done early makes zero-weight passes until the last one is done. If one
        raises, all do: its own error there, `RanksAbortedError` elsewhere. Nested uses belong to
        the outermost.

        Collective. Other collectives inside must be the same on every rank; one that fails before
        its part in them is noticed by the others at their timeout only.
        """
        if self._depth or self.world_size == 1:
            with self._deeper():
                yield
            return
        try:
            with self._deeper():
                yield
        except BaseException as error:
            self._announce_failure(error, what)
            raise
        self._wait_for_others(what)

    @contextmanager
    def turn(self, kind: Pass) -> Iterator[bool]:
        """One pass of this kind, made when all ranks make one; yields whether it has collectives.

        Raises:
            RanksAbortedError: another rank failed.
        """
        self.watch.sign_of_life()
        if self.world_size == 1 or self._is_suspended or kind not in self.turns:
            yield False
            return
        assert self._depth, "a pass with collectives outside `together`"
        while (now := self._next(kind, "the update")) is not kind:
            self._idle(now)
        # Until the pass is over the peers are in its collectives, where no exchange reaches them.
        self._is_reachable = False
        yield True
        self._is_reachable = True

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Passes inside need no turn: whatever made them collective is switched off."""
        before, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = before

    def agree(self, error: Exception | None, what: str) -> None:
        """Raise on every rank if `error` is set on any. Collective."""
        with self.together(what):
            if error is not None:
                raise error

    # ---------------------------------------------------------------- exchanges

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _wait_for_others(self, what: str) -> None:
        while (now := self._next(Pass.FINISHED, what)) is not Pass.FINISHED:
            with self._deeper():
                try:
                    self._idle(now)
                except Exception as error:
                    self._announce_failure(error, what)
                    raise

    def _idle(self, kind: Pass) -> None:
        self.num_idle += 1
        self.run_idle(kind)

    def _next(self, wish: Pass, what: str) -> Pass:
        """The lowest wish of all ranks."""
        wishes = self._exchange(wish)
        failed = [rank for rank, other in enumerate(wishes) if other is Pass.FAILED]
        if failed:
            reasons = self._gather_text("")
            raise RanksAbortedError(_aborted(what, failed, reasons))
        return min(wishes)

    def _announce_failure(self, error: BaseException, what: str) -> None:
        # Peers inside a pass end when this rank does, or at their timeout.
        is_told = isinstance(error, RanksAbortedError | RankLostError)
        if is_told or not isinstance(error, Exception) or not self._is_reachable:
            return
        self._exchange(Pass.FAILED)
        self._gather_text(f"{type(error).__name__}: {error}")

    def _exchange(self, wish: Pass) -> list[Pass]:
        self._num_exchanges += 1
        self.watch.meet(self._name, self._num_exchanges, self._timeout_seconds)
        mine = torch.tensor([int(wish)])
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self.watch.collective(f"agreeing on the next pass (wanted {wish.name.lower()})"):
            dist.all_gather(everyone, mine, group=self._group)
        return [Pass(int(other)) for other in everyone]

    def _gather_text(self, text: str) -> list[str]:
        texts: list[str | None] = [None] * self.world_size
        with self.watch.collective("exchanging error messages"):
            dist.all_gather_object(texts, text, group=self._group)
        return [text or "" for text in texts]


def _aborted(what: str, failed: list[int], reasons: list[str]) -> str:
    first = failed[0]
    others = f" (and ranks {failed[1:]})" if failed[1:] else ""
    return (
        f"rank {first}{others} failed in {what}, so it was given up on every rank. "
        f"Rank {first} said: {reasons[first]}"
    )
