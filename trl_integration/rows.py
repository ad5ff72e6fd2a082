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
        loss_mask: Tensor | None = None,
    ) -> "RowGroups":
        """Unpad rows and join neighbours with the same prompt.

        Args:
            input_ids, attention_mask: `[B, P + C]`, prompt left-padded, completion right-padded.
            num_columns: C.
            complete: per row, whether no members of its prompt are to come if it is the last.
            loss_mask: `[B, C]`, zero at tokens that are context only (TRL's `tool_mask`).
        """
        split = input_ids.shape[1] - num_columns
        prompts: list[Tensor] = []
        members: list[list[int]] = []  # rows of each
        masks = attention_mask.bool()
        for row, (ids, mask) in enumerate(zip(input_ids, masks, strict=True)):
            prompt = ids[:split][mask[:split]]
            if not prompts or not torch.equal(prompt, prompts[-1]):
                prompts.append(prompt)
                members.append([])
            members[-1].append(row)

        def completions(values: Tensor, rows: list[int]) -> list[Tensor]:
            first = values.shape[1] - num_columns
            return [values[row, first:][masks[row, split:]] for row in rows]

        groups = [
            PromptGroup(
                prompt,
                completions(input_ids, rows),
                is_complete=complete[rows[-1]] if complete else True,
                loss_masks=None if loss_mask is None else completions(loss_mask, rows),
            )
            for prompt, rows in zip(prompts, members, strict=True)
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
