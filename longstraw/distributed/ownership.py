"""Which rank of a sequence-parallel group owns which tokens of a chunk: pure functions of lengths.

A token has one owner, which alone computes its hidden states, its keys and values and its scores.
Knows numbers of tokens and ranks; knows nothing of tensors, processes or models.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Layout = Literal["block_cyclic", "zigzag"]


@dataclass(frozen=True)
class Ownership:
    """How the C tokens of one chunk are divided over the ranks of a group.

        block_cyclic    0 0 1 1 2 2 3 3     one run per rank; over chunks, blocks go round
        zigzag          0 1 2 3 3 2 1 0     two runs, an early and a late one

    Each rank gets C / sp tokens, up to one per run more or less, so that every chunk adds the same
    share to every rank's state. Under causality a late token meets more of the chunk's own keys
    than an early one; "zigzag" evens that out, at the price of smaller pages. It is worth something
    where the chunk is not short against what stands before it.

    Attributes:
        num_tokens: C, at least 1.
        num_ranks: sp.
        layout: "block_cyclic" or "zigzag".
    """

    num_tokens: int
    num_ranks: int = 1
    layout: Layout = "block_cyclic"

    @cached_property
    def runs(self) -> tuple[tuple[range, ...], ...]:
        """Per rank its runs of columns, ascending and never empty; no run for a rank without."""
        num_ranks = self.num_ranks
        num_blocks = num_ranks if self.layout == "block_cyclic" else 2 * num_ranks
        cuts = [block * self.num_tokens // num_blocks for block in range(num_blocks + 1)]
        blocks = [range(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
        if self.layout == "block_cyclic":
            owned = [(block,) for block in blocks]
        else:
            owned = [(blocks[r], blocks[-1 - r]) for r in range(num_ranks)]
        return tuple(tuple(run for run in runs if run) for runs in owned)

    def columns(self, rank: int) -> list[int]:
        """The columns that `rank` owns, ascending."""
        return [column for run in self.runs[rank] for column in run]

    @cached_property
    def width(self) -> int:
        """Tokens of the rank that owns most; others are padded to it."""
        return max(sum(len(run) for run in runs) for runs in self.runs)


def most_owned(num_tokens: int, chunk_size: int, num_ranks: int, layout: Layout) -> int:
    """Tokens that the fullest rank may own of `num_tokens` in chunks of `chunk_size`."""
    whole, rest = divmod(num_tokens, chunk_size)
    owned = whole * Ownership(chunk_size, num_ranks, layout).width
    return owned + (Ownership(rest, num_ranks, layout).width if rest else 0)
