"""The nouns of one update: segments of tokens, their chunks, and the group of a prompt.

Dimension letters, for the whole repository:
    G members of a group    P prompt tokens    R response tokens    T tokens    C tokens of a chunk
    H query heads    K key/value heads    D head dim    E hidden size    V vocabulary    L layers
    S page size    B sequences in a batch    N rows after flattening

Knows token ids and positions; knows nothing of models, pages or losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import DataError, ShapeError


@dataclass(frozen=True)
class Chunk:
    """A run of a segment's tokens that is processed in one forward.

    Attributes:
        index: place among the segment's chunks.
        start, stop: token range within the segment.
    """

    index: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Segment:
    """A batch of token runs that continue the same history.

    A prompt is a segment of one row without history. Responses are rows of a segment whose history
    is the prompt; they are right-padded, which is safe under causal attention: no real token sees
    a pad, and a pad's outputs are never used.

    Attributes:
        token_ids: `[B, T]`, right-padded.
        lengths: real tokens of each row.
        start: absolute position of the first token.
    """

    token_ids: Tensor
    lengths: tuple[int, ...]
    start: int = 0

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """T, the tokens of the longest row."""
        return self.token_ids.shape[1]

    @property
    def end(self) -> int:
        """Absolute position after the last token."""
        return self.start + self.num_tokens

    def chunks(self, chunk_size: int) -> list[Chunk]:
        """The segment cut into runs of `chunk_size` tokens; the last may be shorter."""
        starts = range(0, self.num_tokens, chunk_size)
        return [
            Chunk(index, start, min(start + chunk_size, self.num_tokens))
            for index, start in enumerate(starts)
        ]

    def real_tokens(self, chunk: Chunk) -> Tensor:
        """`[B, C]` bool: which tokens of `chunk` are not padding."""
        lengths = torch.tensor(self.lengths, device=self.token_ids.device)
        positions = torch.arange(chunk.start, chunk.stop, device=self.token_ids.device)
        return positions < lengths.unsqueeze(1)


@dataclass(frozen=True)
class PromptGroup:
    """One prompt and responses to it.

    The last prompt token is not part of the captured prompt: its logits score the first response
    token, so it is run again at the head of each response.

    Attributes:
        prompt_ids: `[P]`, P >= 1.
        completion_ids: per member `[R_i]`; an empty one has no score and no gradient.
        loss_masks: per member `[R_i]`, nonzero at tokens that the loss looks at; None: at all.
            Other tokens (a tool's answer) are context: they need no score.
        is_complete: no other members of this group follow under the same policy version, so the
            prompt's own backward can run. False keeps the prompt's state and its cotangents.
    """

    prompt_ids: Tensor
    completion_ids: Sequence[Tensor]
    is_complete: bool = field(default=True)
    loss_masks: Sequence[Tensor] | None = None

    def __post_init__(self) -> None:
        if self.prompt_ids.dim() != 1 or self.prompt_ids.numel() == 0:
            raise DataError(
                f"prompt_ids has shape {list(self.prompt_ids.shape)}: a prompt is a 1-D tensor of "
                "at least one token, since its last token scores the first response token. "
                "Remove the empty prompt from the dataset or give it a BOS token."
            )
        for member, ids in enumerate(self.completion_ids):
            if ids.dim() != 1:
                raise ShapeError(
                    f"completion_ids[{member}] has shape {list(ids.shape)}: give each member as a "
                    "1-D tensor without padding."
                )
        masks = self.loss_masks
        if masks is not None and [len(m) for m in masks] != [
            len(ids) for ids in self.completion_ids
        ]:
            raise ShapeError(
                f"loss_masks of {[len(m) for m in masks]} tokens for responses of "
                f"{[len(ids) for ids in self.completion_ids]}: give one value for each token."
            )

    @property
    def prompt_len(self) -> int:
        return self.prompt_ids.numel()

    def sequence(self, member: int) -> Tensor:
        """`[R_i + 1]`: the last prompt token, then the response. Each token predicts the next."""
        return torch.cat([self.prompt_ids[-1:], self.completion_ids[member]])

    def has_score(self, member: int, index: int) -> bool:
        """Whether the loss looks at token `index` of a response."""
        if index >= self.completion_ids[member].numel():
            return False
        return self.loss_masks is None or bool(self.loss_masks[member][index])

    def targets(self, members: Sequence[int], run: slice) -> Tensor:
        """What the tokens `run` of a sequence that `members` share have to predict.

        -1 where no loss of theirs looks at it.
        """
        ids = self.completion_ids[members[0]][run]
        if self.loss_masks is None:
            return ids
        wanted = torch.stack([self.loss_masks[i][run].bool() for i in members]).any(0)
        return ids.masked_fill(~wanted, -1)


def right_pad(rows: Sequence[Tensor], value: int = 0, num_tokens: int | None = None) -> Tensor:
    """Rows of different lengths as one tensor `[B, num_tokens]`, by default of the longest."""
    width = max(row.numel() for row in rows) if num_tokens is None else num_tokens
    padded = rows[0].new_full((len(rows), width), value)
    for row, ids in zip(padded, rows, strict=True):
        row[: ids.numel()] = ids
    return padded
