"""How far a prompt's state in use is from one that is captured now.

Knows prompts that are captured and scored; knows nothing of why a state is read for several steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .captured import CapturedSegments
from .ledger import Ledger
from .members import GroupScores, MemberPasses
from .segments import PromptGroup
from .state import PageStore, SegmentState

Scored = tuple[Tensor, Sequence[GroupScores]]
"""A loss and the scores of all groups that it is of."""


@dataclass(frozen=True)
class PromptDrift:
    """What it changes that a prompt's state is not of the present weights.

    Attributes:
        loss: the loss on the state in use, less the same loss function's on a fresh one.
        logps_mean, logps_max: mean and largest |difference| of the log-probs of response tokens
            that the loss looks at; zero where there are none.
    """

    loss: float
    logps_mean: float
    logps_max: float

    @classmethod
    def between(cls, groups: Sequence[PromptGroup], used: Scored, fresh: Scored) -> "PromptDrift":
        """Compare what `groups` have on the states in use with what they have on fresh ones."""
        differences = [torch.zeros(0, device=used[0].device)]
        for group, ours, theirs in zip(groups, used[1], fresh[1], strict=True):
            difference = (ours.logps.detach() - theirs.logps).abs()
            for member, ids in enumerate(group.completion_ids):
                is_scored = torch.ones_like(ids, dtype=torch.bool)
                if group.loss_masks is not None:
                    is_scored = group.loss_masks[member] != 0
                differences.append(difference[member, : ids.numel()][is_scored])
        found = torch.cat(differences)
        loss = float(used[0] - fresh[0])
        return cls(loss, float(found.mean()), float(found.max())) if len(found) else cls(loss, 0, 0)


class PromptDriftMeter:
    """Scores groups on prompts captured under the present weights, and compares.

    Args:
        capture: from a prompt's tokens `[T]` and states that must stay, its state under the weights
            of now, adapters included.
    """

    def __init__(
        self,
        capture: Callable[[Tensor, Sequence[SegmentState]], SegmentState],
        captured: CapturedSegments,
        members: MemberPasses,
        store: PageStore,
        ledger: Ledger,
    ) -> None:
        self._capture = capture
        self._captured = captured
        self._members = members
        self._store = store
        self._ledger = ledger

    def score(
        self, groups: Sequence[PromptGroup], states: Sequence[SegmentState]
    ) -> list[GroupScores]:
        """Scores of `groups` on fresh states, of which one is held at a time beside `states`.

        Raises:
            MemoryPlanError: one of them would not fit.
        """
        found = []
        with self._ledger.measuring("prompt_drift"):
            for group in groups:
                fresh = self._capture(group.prompt_ids[:-1], states)
                beside = sum(self._members.state_bytes(fresh, group, for_backward=False))
                self._captured.make_room(beside, keep=[*states, fresh])
                self._store.require(beside, "scoring on a fresh prompt state (log_prompt_drift)")
                found.append(self._members.score(fresh, group))
                self._captured.drop(fresh)
        return found

    @torch.no_grad()
    def compare(
        self,
        groups: Sequence[PromptGroup],
        loss_of: Callable[[list[GroupScores]], Tensor],
        used: Scored,
        fresh: list[GroupScores],
    ) -> PromptDrift:
        """The drift of `used`, with one more call of the loss function, without gradient."""
        with self._ledger.measuring("prompt_drift"), self._ledger.phase("loss", 0):
            return PromptDrift.between(groups, used, (loss_of(fresh), fresh))
