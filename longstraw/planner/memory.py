"""One rank's memory in an update: what is held, the most of it, and the longest prompt that fits.

Knows terms and room; knows nothing of how the terms come about.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from .model_shape import ModelShape
from .options import PlanOptions
from .sizes import GIB
from .terms import Term, fixed_terms, state_terms, total

RESERVED_PART = 20
"""One part in this many is for CUDA, NCCL and the allocator's rounding, which are not counted."""
MOST_TOKENS = 2**40


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank holds.

    Attributes:
        name: of the sum.
        fixed: alike for every prompt.
        state: of the prompt.
        page_device: where the state is.
        room_bytes, host_room_bytes: what is there; None for a host of unknown size.
        ranks: whose state is on one host.
    """

    name: str
    fixed: list[Term]
    state: list[Term]
    page_device: str
    room_bytes: int
    host_room_bytes: int | None
    ranks: int

    @classmethod
    def of(cls, shape: ModelShape, options: PlanOptions) -> "MemoryPlan":
        """That of an update.

        Raises:
            ConfigError: the model cannot be divided so.
        """
        options.check(shape)
        return cls(
            "held, without a chunk's graph",
            fixed_terms(shape, options),
            state_terms(shape, options, options.prompt_tokens),
            options.engine.page_device,
            int(options.device_gib * GIB * (1 - 1 / RESERVED_PART)),
            None if options.host_gib is None else int(options.host_gib * GIB),
            options.ranks,
        )

    @property
    def terms(self) -> list[Term]:
        return [*self.fixed, *self.state]

    @property
    def device_bytes(self) -> int:
        """Most bytes on the device."""
        return total(self.fixed) + (total(self.state) if self.page_device == "model" else 0)

    @property
    def host_bytes(self) -> int:
        """Bytes of pages in host memory, of all ranks."""
        return total(self.state) * self.ranks if self.page_device == "host" else 0

    @property
    def fits(self) -> bool:
        if self.host_room_bytes is not None and self.host_bytes > self.host_room_bytes:
            return False
        return self.device_bytes <= self.room_bytes

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "terms": [asdict(term) for term in self.terms],
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "room_bytes": self.room_bytes,
            "fits": self.fits,
        }


def longest_prompt(shape: ModelShape, options: PlanOptions) -> tuple[int, str]:
    """Most prompt tokens that fit, and the largest term there; 0 if nothing does."""

    def plan(num_tokens: int) -> MemoryPlan:
        return MemoryPlan.of(shape, replace(options, prompt_tokens=num_tokens))

    tokens = _last(lambda num_tokens: plan(num_tokens).fits)
    at = plan(max(tokens, 1))
    growing = [term for term in at.terms if term.grows] if tokens else at.terms
    if not growing:
        return tokens, "none"
    return tokens, max(growing, key=lambda term: term.num_bytes).name


def _last(is_good: Callable[[int], bool]) -> int:
    """The largest number for which a condition that ends somewhere still holds; 0 for none."""
    low, high = 0, 1
    while high < MOST_TOKENS and is_good(high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return low
