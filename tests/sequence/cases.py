"""Updates that are run by ranks that share a prompt, by name: `LAUNCHES[launch][case]`.

Both the test and the ranks look them up here. Cases of one launch are run one after another in the
same processes, as most of a launch's time goes into imports.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from longstraw import PromptGroup
from tests.engine.compare import random_groups
from tests.models import FAMILIES, VOCAB, Float64Islands, tiny_model

Shapes = Sequence[tuple[int, Sequence[int]]]
"""Prompt length and response lengths of each group."""

# Ragged members, among them responses of one to three tokens; a prompt that is a multiple of no
# chunk size below; two prompts of different length in one update.
RAGGED: Shapes = ((53, (9, 14, 1, 3, 2)), (24, (5, 17)))
# Prompts and responses with fewer tokens than ranks, and an empty state.
SHORT: Shapes = ((1, (1, 2)), (2, (3, 1)), (3, (1, 1)), (4, (2, 5)))
# Passes are many where chunks are of two tokens.
BRIEF: Shapes = ((23, (9, 4, 1)),)
LONG_RESPONSES: Shapes = ((31, (41, 7, 29)),)


@dataclass(frozen=True)
class Case:
    """One update in fp64.

    Attributes:
        family: of the model, in `tests.models`.
        shapes: of the groups; each sequence group of ranks gets its own.
        turns: members share their first turns; see `turn_groups`.
        config: changes of `EngineConfig`.
        lora: train adapters only.
        checkpointing: recompute layers in the backward.
        num_calls: `accumulate` calls that the groups come in, a part of the members each.
    """

    family: str = "llama"
    shapes: Shapes = RAGGED
    turns: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    checkpointing: bool = False
    num_calls: int = 1

    @property
    def prompt_gradient(self) -> str:
        return str(self.config.get("prompt_gradient", "exact"))

    @property
    def with_router(self) -> bool:
        return bool(self.config.get("router_statistics", False))

    def but(self, **config: Any) -> "Case":
        """The same with other engine options."""
        return replace(self, config={**self.config, **config})

    def truth(self) -> "Case":
        """The same as far as the definition is concerned."""
        kept = {key: self.config[key] for key in _DEFINING if key in self.config}
        return replace(self, config=kept, checkpointing=False, num_calls=1)

    def groups(self, dp_rank: int) -> list[PromptGroup]:
        """The groups of one sequence group of ranks."""
        if self.turns:
            return turn_groups(seed=1 + dp_rank)
        return random_groups(self.shapes, seed=1 + dp_rank)

    def model(self) -> nn.Module:
        """The model, the same on every rank."""
        model: nn.Module = tiny_model(self.family).double()
        if self.checkpointing:
            islands = (Float64Islands(), Float64Islands())
            options = {"use_reentrant": False, "context_fn": lambda: islands}
            model.activation_checkpointing_enable(options)  # type: ignore[operator]
            model.train()
        if not self.lora:
            return model
        torch.manual_seed(3)
        adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(model, adapters).double()  # type: ignore[arg-type]


_DEFINING = ("prompt_gradient", "router_statistics")


def turn_groups(seed: int) -> list[PromptGroup]:
    """Four members that have two turns in common, part, and end with a different one each."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(2, VOCAB, (length,), generator=generator)

    first, second = ids(13), [ids(21), ids(6)]
    members = [torch.cat([first, second[i % 2], ids(3 + 4 * i)]) for i in range(4)]
    return [PromptGroup(ids(27), members)]


BASE = {"chunk_size": 16, "page_size": 3, "temperature": 0.7}
STOPPED = {"prompt_gradient": "stopped"}
ZIGZAG = {"sp_layout": "zigzag"}


def _hybrids() -> dict[str, Case]:
    """Heads are divided in place of tokens where a layer is recurrent."""
    hybrid = Case("qwen3_5")
    return {
        "qwen3_5, chunks of 2": Case("qwen3_5", BRIEF).but(chunk_size=2),
        "qwen3_5, zigzag, chunks of 7": hybrid.but(chunk_size=7, **ZIGZAG),
        "qwen3_5, fewer tokens than ranks": Case("qwen3_5", SHORT),
        "qwen3_5, responses of several chunks together": Case("qwen3_5", LONG_RESPONSES).but(
            replay_batch=3
        ),
        "qwen3_5, shared turns": Case("qwen3_5", turns=True).but(min_shared_tokens=4),
        "qwen3_5, checkpointing, host pages": replace(
            hybrid.but(page_device="host"), checkpointing=True
        ),
        "qwen3_5, LoRA, stopped": replace(hybrid.but(**STOPPED), lora=True),
        "qwen3_5_moe, load-balancing loss": Case("qwen3_5_moe", config={"router_statistics": True}),
    }


def _sparse() -> dict[str, Case]:
    """Every rank scores and attends to what it owns of one global selection."""
    sparse = Case("glm_moe_dsa")
    return {
        "glm_moe_dsa, chunks of 2": Case("glm_moe_dsa", BRIEF).but(chunk_size=2),
        "glm_moe_dsa, zigzag, chunks of 7": sparse.but(chunk_size=7, **ZIGZAG),
        "glm_moe_dsa, fewer tokens than ranks": Case("glm_moe_dsa", SHORT),
        "glm_moe_dsa, responses of several chunks together": Case(
            "glm_moe_dsa", LONG_RESPONSES
        ).but(replay_batch=3),
        "glm_moe_dsa, shared turns": Case("glm_moe_dsa", turns=True).but(min_shared_tokens=4),
        "glm_moe_dsa, checkpointing, host pages": replace(
            sparse.but(page_device="host"), checkpointing=True
        ),
        "deepseek_v32, LoRA, stopped": replace(
            Case("deepseek_v32").but(chunk_size=5, **STOPPED), lora=True
        ),
    }


def _options() -> dict[str, Case]:
    """What works together with shared prompts."""
    llama = Case()
    moe = Case("qwen3_moe", config={"router_statistics": True})
    cases = {f"chunks of {n}": llama.but(chunk_size=n) for n in (2, 3, 7, 500)}
    cases |= {f"zigzag, chunks of {n}": llama.but(chunk_size=n, **ZIGZAG) for n in (2, 7, 500)}
    return cases | {
        "fewer tokens than ranks": Case(shapes=SHORT),
        "fewer tokens than ranks, zigzag": Case(shapes=SHORT).but(**ZIGZAG),
        "fewer tokens than ranks, gemma3": Case("gemma3", SHORT),
        "host pages": llama.but(page_device="host"),
        "one response at a time": llama.but(replay_batch=1),
        "all responses together": llama.but(replay_batch=8),
        "responses of several chunks": Case(shapes=LONG_RESPONSES),
        "responses of several chunks, stopped": Case(shapes=LONG_RESPONSES).but(**STOPPED),
        "responses of several chunks together": Case(shapes=LONG_RESPONSES).but(replay_batch=3),
        "shared turns": Case(turns=True).but(min_shared_tokens=4),
        "shared turns, zigzag": Case(turns=True).but(min_shared_tokens=4, **ZIGZAG),
        "checkpointing": replace(llama, checkpointing=True),
        "checkpointing, gemma3": replace(Case("gemma3"), checkpointing=True),
        "checkpointing, stopped, host pages": replace(
            llama.but(page_device="host", **STOPPED), checkpointing=True
        ),
        "LoRA": replace(llama, lora=True),
        "LoRA, stopped": replace(llama.but(**STOPPED), lora=True),
        "LoRA, checkpointing, long responses": Case(
            "gpt_oss", LONG_RESPONSES, lora=True, checkpointing=True
        ),
        "load-balancing loss": moe,
        "load-balancing loss, zigzag": moe.but(**ZIGZAG),
        "groups in two calls": replace(llama, num_calls=2),
        "gap measured": llama.but(log_gradient_gap=True, **STOPPED),
    }


_EVERY_FAMILY = {
    f"{family}, {mode}": Case(family).but(prompt_gradient=mode)
    for family in FAMILIES
    for mode in ("exact", "stopped")
    # The others' stopped gradient differs from llama's in nothing that ranks share.
    if mode == "exact" or family in ("llama", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_5")
}


def _some(*names: str) -> dict[str, Case]:
    every = {**_EVERY_FAMILY, **_hybrids(), **_sparse(), **_options()}
    return {name: every[name] for name in names}


_TELLING = (
    "llama, exact",
    "llama, stopped",
    "gemma3, exact",
    "gpt_oss, exact",
    "qwen3_moe, exact",
    "qwen3_5, exact",
    "qwen3_5, stopped",
    "qwen3_5, zigzag, chunks of 7",
    "qwen3_5, fewer tokens than ranks",
    "qwen3_5, checkpointing, host pages",
    "glm_moe_dsa, exact",
    "glm_moe_dsa, zigzag, chunks of 7",
    "glm_moe_dsa, fewer tokens than ranks",
    "glm_moe_dsa, checkpointing, host pages",
    "gap measured",
)
"""Families whose parts are not those of others, and how they are divided."""

LAUNCHES: dict[str, dict[str, Case]] = {
    "dp 1, sp 2": _some(*_TELLING),
    "dp 1, sp 2, options": {**_EVERY_FAMILY, **_hybrids(), **_sparse(), **_options()},
    "dp 1, sp 3": _some(
        "zigzag, chunks of 7",
        "fewer tokens than ranks",
        "shared turns",
        "LoRA",
        "checkpointing, gemma3",
    ),
    "dp 1, sp 4": _some(
        "chunks of 7",
        "fewer tokens than ranks, zigzag",
        "responses of several chunks",
        "load-balancing loss",
        "gemma2, exact",
        "gpt_oss, stopped",
        "glm_moe_dsa, zigzag, chunks of 7",
        "deepseek_v3, exact",
    ),
    "dp 2, sp 1": _some("chunks of 7"),
    "dp 2, sp 2": _some("chunks of 7", "LoRA", "load-balancing loss"),
}


SLOW = {"dp 1, sp 2, options", "dp 1, sp 3", "dp 1, sp 4", "dp 2, sp 1"}
"""Launches that `make test` leaves to `make test-slow`."""


def shape_of(launch: str) -> tuple[int, int]:
    """`(dp, sp)` of a launch."""
    dp, sp = (int(part.split()[1]) for part in launch.split(", ")[:2])
    return dp, sp
