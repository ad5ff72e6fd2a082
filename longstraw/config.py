"""The engine's settings: what a user wrote, validated once."""

import difflib
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from .errors import ConfigError

PROMPT_GRADIENTS = ("exact", "stopped")
ATTENTION_IMPLS = ("auto", "reference", "torch_flash")
PAGE_DEVICES = ("model", "host")


@dataclass(frozen=True)
class EngineConfig:
    """How prompts are captured, held and replayed. None of these change an exact gradient.

    Attributes:
        prompt_gradient: "exact": every parameter's gradient equals the full-sequence step's.
            "stopped": the prompt's state is held constant, as in the LongStraw paper; saves the
            second pass over the prompt, and is a different gradient.
        chunk_size: tokens run at a time. Bounds the graph that exists during a backward; larger
            chunks read the pages before them less often.
        page_size: tokens per page of captured state, the unit that is read and moved.
        replay_batch: responses of one prompt replayed (and scored) together, right-padded.
        page_device: where pages live: "model" (the model's device) or "host" memory.
        state_budget_bytes: most bytes that captured state and its cotangents may take; None sets
            no limit. States that can be captured again are dropped first, an update that still
            does not fit raises `MemoryPlanError` before it starts.
        logprob_chunk_size: rows whose `[rows, V]` logits exist at a time.
        attention: "auto" takes the fastest implementation that can compute each block.
        temperature: logits are divided by it before the softmax, as TRL does.
        fp32_head: compute logits in fp32 under mixed precision too; needs an fp32 head.
        log_gradient_gap: measure what "stopped" leaves out; costs a prompt backward and one copy
            of the gradients.
        router_statistics: keep the routing sums that an auxiliary load-balancing loss needs.
        allow_extrapolation: run positions beyond the model's `max_position_embeddings`.
        progress: show a progress bar for passes over many tokens.
    """

    prompt_gradient: Literal["exact", "stopped"] = "exact"
    chunk_size: int = 2048
    page_size: int = 512
    replay_batch: int = 1
    page_device: Literal["model", "host"] = "model"
    state_budget_bytes: int | None = None
    logprob_chunk_size: int = 256
    attention: str = "auto"
    temperature: float = 1.0
    fp32_head: bool = False
    log_gradient_gap: bool = False
    router_statistics: bool = False
    allow_extrapolation: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        _one_of("prompt_gradient", self.prompt_gradient, PROMPT_GRADIENTS)
        _one_of("attention", self.attention, ATTENTION_IMPLS)
        _one_of("page_device", self.page_device, PAGE_DEVICES)
        for name in ("chunk_size", "page_size", "replay_batch", "logprob_chunk_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: a whole number of at least 1 is needed.")
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature={self.temperature!r}: log-probs are those of logits / temperature, "
                "so a positive number is needed."
            )
        if self.state_budget_bytes is not None and self.state_budget_bytes <= 0:
            raise ConfigError(
                f"state_budget_bytes={self.state_budget_bytes!r}: give the bytes that captured "
                "state may take, or None for no limit."
            )

    @property
    def needs_prompt_backward(self) -> bool:
        """Whether the prompt's own backward runs, for the gradient or to measure the gap."""
        return self.prompt_gradient == "exact" or self.log_gradient_gap

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "EngineConfig":
        """The config with these fields; an unknown key raises and names the nearest known one."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown option {key!r}.{hint} Known: {', '.join(known)}.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, for receipts."""
        return asdict(self)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}.{hint}")
