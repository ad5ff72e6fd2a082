"""`GroupRollout`: one rank of a sequence group runs the rollout, the others serve it.

Tools and rollout functions have side effects, and what they answer may be random, so they run once
per group. What a rollout needs all ranks for (decoding a turn, meeting the ranks of other groups)
its rank announces, and the others join. Knows nothing of what a rollout does in between.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longstraw import (
    LongStrawError,
    RankLostError,
    RanksAbortedError,
    SequenceGroup,
    is_of_the_group,
)

_DONE, _FAILED = "done", "failed"


class GroupRollout:
    """Runs rollouts. In a group of one it only calls them.

    Args:
        sequence: the group; its leader runs the rollout.
        joined: by name, what the others do when the leader announces it, with what it sent.
    """

    def __init__(
        self, sequence: SequenceGroup, joined: Mapping[str, Callable[[Any], object]]
    ) -> None:
        self.sequence = sequence
        self.joined = joined
        self._is_leading = False
        self._are_others_lost = False  # in work that only this rank could not do

    def run(self, rollout: Callable[[], "RolloutResults"]) -> "RolloutResults":
        """What `rollout` returns on the leader, which alone calls it. Collective.

        Raises:
            RanksAbortedError: it failed there.
        """
        if self.sequence.is_alone:
            return rollout()
        if not self.sequence.is_leader:
            return self._serve()
        self._is_leading, self._are_others_lost = True, False
        try:
            results = rollout()
            self.sequence.share((_DONE, results.packed()))
        except Exception as error:
            if not self._are_others_lost:
                self.sequence.share((_FAILED, f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._is_leading = False
        return results

    @contextmanager
    def announced(
        self, name: str, content: Callable[[], Any], *, tells_errors: bool = False
    ) -> Iterator[None]:
        """Work that all ranks of the group do; within a rollout the others are called to it.

        The rollout may catch an error of the work that all of them have, and go on.

        Args:
            content: makes what `joined[name]` is called with.
            tells_errors: the work itself tells the others of an error that only this rank has.
        """
        if not self._is_leading:
            yield
            return
        self.sequence.share((name, content()))
        try:
            yield
        except Exception as error:
            is_lost = isinstance(error, RankLostError)
            self._are_others_lost = is_lost or not (tells_errors or is_of_the_group(error))
            raise

    def _serve(self) -> "RolloutResults":
        held: LongStrawError | None = None  # of the last work, which the leader may catch
        while True:
            name, content = self.sequence.share(None)
            if name == _DONE:
                return RolloutResults.unpacked(content)
            if name == _FAILED and held is not None:
                raise held
            if name == _FAILED:
                raise RanksAbortedError(
                    "the rollout failed on the first rank of this sequence group, which runs it "
                    f"for all {self.sequence.size}. It said: {content}"
                )
            held = None
            try:
                self.joined[name](content)
            except LongStrawError as error:
                if not is_of_the_group(error):
                    raise
                held = error


@dataclass(frozen=True)
class PackedIds:
    """Lists of token ids for sending: each distinct one once, in 4 bytes per token.

    Members of a group share prompts, and a prompt may have a million tokens.
    """

    distinct: list[np.ndarray]
    order: list[int]

    @classmethod
    def of(cls, rows: Sequence[Any]) -> "PackedIds":
        """Pack `rows`: lists, arrays or tensors."""
        rows = list(rows)  # of a tensor each access makes another row
        seen: dict[int, int] = {}  # by identity, which spares reading what is shared
        found: dict[bytes, int] = {}
        distinct: list[np.ndarray] = []
        for row in rows:
            if id(row) not in seen:
                array = torch.as_tensor(row, dtype=torch.int32).cpu().numpy()
                place = found.setdefault(array.tobytes(), len(distinct))
                if place == len(distinct):
                    distinct.append(array)
                seen[id(row)] = place
        return cls(distinct, [seen[id(row)] for row in rows])

    def lists(self) -> list[list[int]]:
        """The rows; equal ones are one list."""
        distinct = [array.tolist() for array in self.distinct]
        return [distinct[place] for place in self.order]


@dataclass(frozen=True)
class RolloutResults:
    """What TRL's `_generate` returns, in its order."""

    prompt_ids: Sequence[Any]
    completion_ids: Sequence[Any]
    tool_mask: Any
    completions: Any
    logps: Any
    extra_fields: dict[str, Any]
    """For reward functions, which run where the rollout ran."""
    images: Any
    tool_images: Any

    def packed(self) -> tuple[Any, ...]:
        """For sending."""
        ids = PackedIds.of(self.prompt_ids), PackedIds.of(self.completion_ids)
        others = self.tool_mask, self.completions, self.logps, {}, self.images, self.tool_images
        return (*ids, *others)

    @classmethod
    def unpacked(cls, packed: tuple[Any, ...]) -> "RolloutResults":
        prompt_ids, completion_ids, *others = packed
        return cls(prompt_ids.lists(), completion_ids.lists(), *others)
