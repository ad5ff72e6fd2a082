"""One rank's memory in an update: what is held, the most of it, and the longest prompt that fits.

Knows terms and room; knows nothing of how the terms come about.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .model_shape import ModelShape
from .options import PlanOptions
from .phases import Phase, phases
from .sizes import GIB
from .terms import total

RESERVED_PART = 20
"""One part in this many is for CUDA, NCCL and the allocator's rounding, which are not counted."""
MOST_TOKENS = 2**40


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank holds, phase by phase.

    Attributes:
        phases: in order.
        page_device: where the state is.
        room_bytes, host_room_bytes: what is there; None for a host of unknown size.
        ranks: whose state is on one host.
    """

    phases: list[Phase]
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
            phases(shape, options),
            options.engine.page_device,
            int(options.device_gib * GIB * (1 - 1 / RESERVED_PART)),
            None if options.host_gib is None else int(options.host_gib * GIB),
            options.ranks,
        )

    @property
    def largest(self) -> Phase:
        """The phase that takes most of the device."""
        return max(self.phases, key=lambda phase: phase.device_bytes(self.page_device))

    @property
    def device_bytes(self) -> int:
        """Most bytes on the device."""
        return self.largest.device_bytes(self.page_device)

    @property
    def host_bytes(self) -> int:
        """Most bytes of pages in host memory, of all ranks."""
        if self.page_device == "model":
            return 0
        return max(total(phase.state) for phase in self.phases) * self.ranks

    @property
    def limit(self) -> str:
        """What there is too much of where the update does not fit: "host memory" or "device"."""
        is_host = self.host_room_bytes is not None and self.host_bytes > self.host_room_bytes
        return "host memory" if is_host else "device"

    @property
    def fits(self) -> bool:
        return self.limit == "device" and self.device_bytes <= self.room_bytes

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "phases": [
                {
                    "name": phase.name,
                    "device_bytes": phase.device_bytes(self.page_device),
                    "terms": [asdict(term) for term in phase.terms],
                }
                for phase in self.phases
            ],
            "largest": self.largest.name,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "room_bytes": self.room_bytes,
            "fits": self.fits,
        }


def choose_stage(
    shape: ModelShape, options: PlanOptions, stages: Sequence[int]
) -> tuple[MemoryPlan, PlanOptions]:
    """The plan of the first of these ZeRO stages that fits, else of the last; and its options.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    for stage in stages:
        chosen = replace(options, zero_stage=stage)
        plan = MemoryPlan.of(shape, chosen)
        if plan.fits:
            break
    return plan, chosen


def longest_prompt(
    shape: ModelShape, options: PlanOptions, stages: Sequence[int]
) -> tuple[int, str]:
    """Most prompt tokens that fit at one of the stages, 0 if none do; and what is largest of that
    which grows with the prompt, in the phase where one more token does not fit."""

    def plan(num_tokens: int) -> MemoryPlan:
        return choose_stage(shape, replace(options, prompt_tokens=num_tokens), stages)[0]

    tokens = _last(lambda num_tokens: plan(num_tokens).fits)
    terms = plan(tokens + 1).largest.terms
    growing = [term for term in terms if term.grows]
    return tokens, max(growing if tokens and growing else terms, key=lambda x: x.num_bytes).name


def _last(is_good: Callable[[int], bool]) -> int:
    """The largest number for which a condition that ends somewhere still holds; 0 for none."""
    low, high = 0, 1
    while high < MOST_TOKENS and is_good(high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return low
