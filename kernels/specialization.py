"""One compiled form of a Triton kernel: what `python -m longstraw_kernels.compile` reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Specialization:
    """A kernel with the types, constants and launch options of one real use.

    Attributes:
        name: e.g. "page_attention forward, bf16, D 128".
        kernel: the function under `@triton.jit`.
        types: per argument that is no constant, Triton's name of its type: "*bf16", "*fp32",
            "*i64", "i32", "fp32".
        constants: per `tl.constexpr` argument, its value.
        num_warps, num_stages: as at launch.
        divisible: arguments that are multiples of 16 at launch (pointers are).
        may_spill: registers may spill to local memory; elsewhere that is a failure.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    divisible: tuple[str, ...] = ()
    may_spill: bool = False
