"""The engine's settings: what a user wrote, validated once."""

import difflib
import os
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from .errors import ConfigError

PROMPT_GRADIENTS = ("exact", "stopped")
ATTENTION_IMPLS = ("auto", "reference", "triton", "flash_attn", "torch_flash")
PAGE_DEVICES = ("model", "host")
COTANGENT_DTYPES = ("float32", "bfloat16")
INDEX_TIES = ("first", "last")
SP_LAYOUTS = ("block_cyclic", "zigzag")
PROMPT_REFRESHES = ("every_step", "never")


@dataclass(frozen=True)
class EngineConfig:
    """How prompts are captured, held and replayed. None of these change an exact gradient.

    `prompt_refresh` changes the policy that it is the gradient of.

    Attributes:
        prompt_gradient: "exact": every parameter's gradient equals the full-sequence step's.
            "stopped": the prompt's state is held constant, as in the LongStraw paper; saves the
            second pass over the prompt, and is a different gradient.
        chunk_size: tokens run at a time. Bounds the graph that exists during a backward; larger
            chunks read the pages before them less often.
        page_size: most tokens of a page of captured state, the unit that is read and moved. A
            page never has more than one rank's run of a chunk: `chunk_size / sp_size`.
        replay_batch: most responses of one prompt replayed (and scored) together, right-padded.
            None: as many as have half of `chunk_size` tokens, so that the largest graph is that of
            a chunk of the prompt.
        min_shared_tokens: fewest tokens that several prompts, or several responses to one, begin
            with for which these are captured once and shared; each shared run is a pass of its own.
            What is captured already is shared whatever its length.
        page_device: where pages live: "model" (the model's device) or "host" memory.
        state_budget_bytes: most bytes that captured state and its cotangents may take; None sets
            no limit. States that can be captured again are dropped first, an update that still
            does not fit raises `MemoryPlanError` before it starts.
        spill_dir: folder on a local disk for files of the pages that exceed `state_budget_bytes`,
            or without it the host's free memory; None refuses what exceeds it. Takes pages that
            are on the host.
        spill_budget_bytes: most bytes that these files may take; None sets no limit beside what is
            free there. An update that comes within a few pages of both budgets may be refused in
            its middle instead of before it starts; it leaves nothing behind then either.
        cotangent_dtype: what readers leave on pages adds up in "float32" (fp64 for fp64 pages) or
            in "bfloat16", which takes half and rounds at each reader: the one option here that
            changes an exact gradient.
        logprob_chunk_size: rows whose `[rows, V]` logits exist at a time.
        attention: "auto" takes the fastest implementation that can compute each block.
        temperature: logits are divided by it before the softmax, as TRL does.
        fp32_head: compute logits in fp32 under mixed precision too; needs an fp32 head.
        log_gradient_gap: measure what "stopped" leaves out; costs a prompt backward and one copy
            of the gradients.
        prompt_refresh: for how many optimizer steps a prompt's captured state is read unchanged.
            1 or "every_step": every step makes it stale. N: steps s to s + N - 1 read what step s
            captured; it is of older weights than the responses, so "exact" is not to be had.
            "never": prompts (but for their last token, which is run with the responses) are run
            with adapters switched off, whose training changes nothing of their state; another
            policy than one that is adapted everywhere, with an exact gradient. Prompts that a step
            does not use are freed after it, unless `state_budget_bytes` says how much may stay.
        log_prompt_drift: measure how far the scores on the state in use are from those on one that
            is captured now, adapters on: one more capture and scoring per `accumulate`.
        router_statistics: keep the routing sums that an auxiliary load-balancing loss needs.
        sp_size: ranks that share one prompt: each owns, runs and keeps a part of every chunk's
            tokens (sequence parallel). 1: each rank has prompts of its own. The number of processes
            is a multiple of it; see `rank_axes`.
        sp_layout: how a chunk is divided over them, see `Ownership`. "block_cyclic": one run of
            tokens each. "zigzag": an early and a late one, which evens out the work inside a chunk.
        index_ties: which of several tokens with the same index score sparse attention selects: the
            "first" in the sequence or the "last". For the rule of the engine that generates.
        allow_extrapolation: run positions beyond the model's `max_position_embeddings`.
        progress: show a progress bar for passes over many tokens.
    """

    prompt_gradient: Literal["exact", "stopped"] = "exact"
    chunk_size: int = 2048
    page_size: int = 512
    replay_batch: int | None = None
    min_shared_tokens: int = 256
    page_device: Literal["model", "host"] = "model"
    state_budget_bytes: int | None = None
    spill_dir: str | None = None
    spill_budget_bytes: int | None = None
    cotangent_dtype: Literal["float32", "bfloat16"] = "float32"
    logprob_chunk_size: int = 256
    attention: str = "auto"
    temperature: float = 1.0
    fp32_head: bool = False
    log_gradient_gap: bool = False
    prompt_refresh: int | str = 1
    log_prompt_drift: bool = False
    router_statistics: bool = False
    sp_size: int = 1
    sp_layout: Literal["block_cyclic", "zigzag"] = "block_cyclic"
    index_ties: Literal["first", "last"] = "first"
    allow_extrapolation: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        _one_of("prompt_gradient", self.prompt_gradient, PROMPT_GRADIENTS)
        _one_of("attention", self.attention, ATTENTION_IMPLS)
        _one_of("page_device", self.page_device, PAGE_DEVICES)
        _one_of("cotangent_dtype", self.cotangent_dtype, COTANGENT_DTYPES)
        _one_of("index_ties", self.index_ties, INDEX_TIES)
        _one_of("sp_layout", self.sp_layout, SP_LAYOUTS)
        for name in (
            "chunk_size",
            "page_size",
            "replay_batch",
            "min_shared_tokens",
            "logprob_chunk_size",
            "sp_size",
        ):
            value = getattr(self, name)
            if name == "replay_batch" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: a whole number of at least 1 is needed.")
        self._check_refresh()
        if self.sp_size > self.chunk_size:
            raise ConfigError(
                f"sp_size={self.sp_size} with chunk_size={self.chunk_size}: a chunk is divided "
                "over the ranks, and some would never have a token. Make chunk_size a multiple of "
                "it, with some hundred tokens to a rank."
            )
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature={self.temperature!r}: log-probs are those of logits / temperature, "
                "so a positive number is needed."
            )
        for name in ("state_budget_bytes", "spill_budget_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(
                    f"{name}={value!r}: give the bytes that captured state may take, or None for "
                    "no limit."
                )
        if self.spill_dir is None and self.spill_budget_bytes is not None:
            raise ConfigError(
                f"spill_budget_bytes={self.spill_budget_bytes!r} limits files, and without "
                "spill_dir there are none. Name a folder, or leave the budget out."
            )
        if self.spill_dir is not None and not os.fspath(self.spill_dir):
            raise ConfigError("spill_dir='': name a folder, or None to keep all pages in memory.")

    def _check_refresh(self) -> None:
        steps = self.refresh_steps
        if steps is None or steps == 1:
            return
        reads = (
            f"prompt_refresh={self.prompt_refresh!r} reads a prompt's state in {steps} optimizer "
            "steps, of which all but the first have other weights than it was captured with"
        )
        way_out = (
            "or refresh it every step, or 'never', with adapters, where no weight that is trained "
            "takes part in the prompt."
        )
        if self.prompt_gradient == "exact":
            raise ConfigError(
                f"{reads}: prompt_gradient='exact' would need a backward through weights that are "
                "gone. Set prompt_gradient='stopped' (longstraw_prompt_gradient in the trainer), "
                f"{way_out}"
            )
        if self.log_gradient_gap:
            raise ConfigError(
                f"{reads}: log_gradient_gap=True would need a backward through weights that are "
                "gone. Leave it out (log_prompt_drift says how far the scores are off), "
                f"{way_out}"
            )

    @property
    def refresh_steps(self) -> int | None:
        """Optimizer steps for which a prompt's state is read; None for "never" refreshed.

        Raises:
            ConfigError: `prompt_refresh` is none of what it may be.
        """
        refresh = self.prompt_refresh
        if refresh == "never":
            return None
        if refresh == "every_step":
            return 1
        if isinstance(refresh, str) and refresh.isdecimal():
            refresh = int(refresh)
        if isinstance(refresh, int) and not isinstance(refresh, bool) and refresh >= 1:
            return refresh
        near = difflib.get_close_matches(str(self.prompt_refresh), PROMPT_REFRESHES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"prompt_refresh={self.prompt_refresh!r} is unknown; choose one of "
            f"{', '.join(PROMPT_REFRESHES)}, or a whole number of optimizer steps.{hint}"
        )

    @property
    def needs_prompt_backward(self) -> bool:
        """Whether the prompt's own backward runs, for the gradient or to measure the gap.

        Not where prompts are run without adapters: no weight that is trained takes part in them.
        """
        is_wanted = self.prompt_gradient == "exact" or self.log_gradient_gap
        return is_wanted and self.refresh_steps is not None

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
