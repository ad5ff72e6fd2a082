"""TRL's padded rows as prompt groups, and scores of groups as TRL's rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw import GroupScores, PromptGroup, RouterSums


@dataclass(frozen=True)
class RowGroups:
    """A batch of TRL's rows, cut into runs that share a prompt.

    Attributes:
        groups: in row order; their members are the rows in order.
        num_columns: width of TRL's completion tensors.
    """

    groups: list[PromptGroup]
    num_columns: int

    @classmethod
    def from_batch(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        num_columns: int,
        *,
        complete: Sequence[bool] = (),
    ) -> "RowGroups":
        """Unpad rows and join neighbours with the same prompt.

        Args:
            input_ids, attention_mask: `[B, P + C]`, prompt left-padded, completion right-padded.
            num_columns: C.
            complete: per row, whether no members of its prompt are to come if it is the last.
        """
        runs: list[tuple[Tensor, list[Tensor], int]] = []
        split = input_ids.shape[1] - num_columns
        for row, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
            prompt = ids[:split][mask[:split]]
            completion = ids[split:][mask[split:]]
            if not runs or not torch.equal(prompt, runs[-1][0]):
                runs.append((prompt, [], row))
            runs[-1][1].append(completion)
            runs[-1] = (*runs[-1][:2], row)
        groups = [
            PromptGroup(prompt, completions, complete[last] if complete else True)
            for prompt, completions, last in runs
        ]
        return cls(groups, num_columns)

    def to_columns(self, scores: Sequence[GroupScores]) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies as TRL's `[B, C]`, zero at masked positions; differentiable."""
        logps = torch.cat([self._widen(group.logps) for group in scores])
        entropies = torch.cat([self._widen(group.entropies) for group in scores])
        return logps, entropies

    def _widen(self, values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, self.num_columns - values.shape[1]))


def all_router_sums(scores: Sequence[GroupScores]) -> RouterSums:
    """The routing sums of every row of the batch."""
    return RouterSums.cat([group.router for group in scores if group.router is not None])
