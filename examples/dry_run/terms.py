"""The terms of one rank's memory that are alike for every model, each with its arithmetic.

Knows models, shapes and bytes; knows nothing of options or of what fits where.
"""

from dataclasses import dataclass
from math import ceil

from longstraw import EngineConfig
from longstraw.distributed import Ownership
from longstraw.models import Decoder

GIB = 2**30
BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Term:
    """A line of the table.

    Attributes:
        name: what it is.
        num_bytes: on one rank.
        arithmetic: how they come about.
    """

    name: str
    num_bytes: int
    arithmetic: str

    def __str__(self) -> str:
        return f"{self.name:<34} {self.num_bytes / GIB:8.2f}   {self.arithmetic}"


def total(terms: list[Term]) -> int:
    """Bytes of all of them."""
    return sum(term.num_bytes for term in terms)


def adapter_terms(num_trained: int, world_size: int, maker: str = "TRL") -> list[Term]:
    """Under ZeRO-1, which divides the optimizer over all ranks.

    Args:
        maker: who makes them bf16.
    """
    return [
        Term("adapters", num_trained * BF16, f"{num_trained:,} x 2 B, bf16 as {maker} makes them"),
        Term("their gradients", num_trained * FP32, f"{num_trained:,} x 4 B, added up in fp32"),
        Term(
            "optimizer (ZeRO-1)",
            ceil(num_trained * 3 * FP32 / world_size),
            f"{num_trained:,} x 12 B / {world_size} ranks: fp32 weights and Adam's two moments",
        ),
    ]


def tokens_here(engine: EngineConfig, num_rows: int, num_tokens: int) -> int:
    """Of rows of a chunk, on the rank that has most of them."""
    return num_rows * Ownership(num_tokens, engine.sp_size, engine.sp_layout).width


def layer_inputs_term(decoder: Decoder, here: int) -> Term:
    """What gradient checkpointing keeps of `here` tokens."""
    num_layers, width = decoder.num_layers, decoder.config.hidden_size
    return Term(
        "layer inputs",
        num_layers * here * width * BF16,
        f"{num_layers} x {here:,} tokens x {width:,} x 2 B",
    )
