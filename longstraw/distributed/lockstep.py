"""Ranks whose passes contain collectives make them together; ranks that fail say so.

Under ZeRO-3 every forward gathers weights, and with partitioned gradients every backward reduces
them: all ranks must make the same passes in the same order, although their prompts, members and
chunks differ. Agreeing on counts beforehand would need every count to be known; instead each rank
says before a pass which kind it wants, all make the lowest kind that anyone wants, and those who
wanted another make it with zero weight.

Knows ranks and kinds of passes; knows nothing of models or of what a pass does.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from ..errors import PromptStateError, RankLostError, RanksAbortedError, is_of_the_group
from .meeting import Meeting
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
    """Takes turns with the other ranks. Making one is collective.

    Args:
        turns: the kinds of passes that contain collectives. Others need no turn.
        run_idle: makes a pass of a kind with zero weight.
        timeout_seconds: how long to wait for a rank without a sign of life.
        watch: knows where this rank and the others are.
        shares_passes: whether ranks that share a prompt make every pass together.

    Attributes:
        num_idle: passes made with zero weight.
    """

    _num_made = 0  # the same on every rank

    def __init__(
        self,
        *,
        turns: frozenset[Pass] = frozenset(),
        run_idle: Callable[[Pass], None] = _do_nothing,
        timeout_seconds: float = 1800.0,
        watch: RankWatch | None = None,
        shares_passes: bool = False,
    ) -> None:
        self.turns = turns
        self.run_idle = run_idle
        self.watch = watch or RankWatch()
        self.shares_passes = shares_passes
        self.num_idle = 0
        self._work: str | None = None  # what the outermost `together` is about
        self._is_suspended = False
        self._is_reachable = True
        LockStep._num_made += 1
        self._meeting = Meeting(f"lockstep {LockStep._num_made}", timeout_seconds, self.watch)

    @property
    def world_size(self) -> int:
        """Ranks that take turns; 1 where no process group exists."""
        return self.watch.world_size

    # ---------------------------------------------------------------- work of all ranks

    @contextmanager
    def together(
        self,
        work: str = "the update",
        *,
        has_collectives: bool = False,
        has_passes: bool = False,
    ) -> Iterator[None]:
        """Work that every rank enters, and leaves when all have finished theirs.

        A rank that is done early makes zero-weight passes until the last one is done. If one
        raises, all do: its own error there, `RanksAbortedError` elsewhere. Nested uses belong to
        the outermost.

        Collective.

        Args:
            has_collectives: the work contains other collectives than those of passes. A rank that
                fails cannot tell the others then, who may stand in one; they end when its process
                does, or at their timeout.
            has_passes: it contains passes. Where ranks share them, the same holds for an error that
                one rank has alone; those that the ranks of a group have together are told.
        """
        if self._work is not None or self.world_size == 1:
            yield
            return
        self._work, self._is_reachable = work, not has_collectives
        try:
            yield
            while (now := self._agree_on(Pass.FINISHED)) is not Pass.FINISHED:
                self._idle(now)
        except Exception as error:
            is_told = isinstance(error, RanksAbortedError | RankLostError)
            is_alone = has_passes and self.shares_passes and not is_of_the_group(error)
            if self._is_reachable and not is_told and not is_alone:
                self._agree_on(Pass.FAILED, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._work, self._is_reachable = None, True

    def agree(self, error: Exception | None, work: str) -> None:
        """Raise on every rank if `error` is set on any. Collective."""
        with self.together(work):
            if error is not None:
                raise error

    # ---------------------------------------------------------------- passes

    @contextmanager
    def turn(self, kind: Pass) -> Iterator[bool]:
        """One pass of this kind, made when all ranks make one; yields whether it has collectives.

        Raises:
            RanksAbortedError: another rank failed.
        """
        self.watch.sign_of_life()
        if self._is_suspended or kind not in self.turns:
            yield False
            return
        if self.world_size == 1:
            yield True
            return
        if self._work is None:
            raise PromptStateError(
                f"a {kind.name.lower()} pass gathers weights from all ranks, and the others do not "
                "know of it. Bring the weights together and say so (engine.weights_gathered()), or "
                "let all ranks come (engine.lockstep.together())."
            )
        while (now := self._agree_on(kind)) is not kind:
            self._idle(now)
        with self._among_peers():
            yield True

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Passes inside need no turn: whatever made them collective is switched off."""
        before, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = before

    def _idle(self, kind: Pass) -> None:
        self.num_idle += 1
        self.watch.sign_of_life()
        with self._among_peers():
            self.run_idle(kind)

    @contextmanager
    def _among_peers(self) -> Iterator[None]:
        """Until the pass is over the peers are in its collectives, where no word reaches them."""
        self._is_reachable = False
        yield
        self._is_reachable = True

    # ---------------------------------------------------------------- words

    def _agree_on(self, wish: Pass, reason: str = "") -> Pass:
        """The lowest wish of all ranks.

        Raises:
            RanksAbortedError: another rank failed, or is at other work.
        """
        words = [
            json.loads(w) for w in self._meeting.exchange(json.dumps([wish, self._work, reason]))
        ]
        failed = [rank for rank, (other, _, _) in enumerate(words) if other == Pass.FAILED]
        if wish is Pass.FAILED:
            return wish  # this rank raises its own error
        if failed:
            first = failed[0]
            also = f" (and ranks {failed[1:]})" if failed[1:] else ""
            raise RanksAbortedError(
                f"rank {first}{also} failed in {words[first][1]}, so it was given up on every "
                f"rank. Rank {first} said: {words[first][2]}"
            )
        works = {work for _, work, _ in words}
        if len(works) > 1:
            each = "; ".join(f"rank {rank}: {work}" for rank, (_, work, _) in enumerate(words))
            raise RanksAbortedError(
                f"ranks are at different work ({each}). All must call the engine the same number "
                "of times and in the same order."
            )
        return Pass(min(other for other, _, _ in words))
