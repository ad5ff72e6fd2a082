"""What `longstraw plan` says of an update against what the tensors of that update take.

Updates under DeepSpeed on CPU ranks, counted storage by storage; `pytest -rP` prints the table. The
numbers of the plan come from the config alone, the coefficients of a layer's work from models of
other widths (`longstraw.planner.count_work`).
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from longstraw.config import EngineConfig
from longstraw.planner.measured import measure
from longstraw.planner.memory import MemoryPlan
from longstraw.planner.model_shape import ModelShape
from longstraw.planner.options import PlanOptions
from tests.models import tiny_model

WITHIN = 0.05
WIDER = {
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
"""Than the models of other tests, whose smallest tensors are as large as their largest."""
HEADS = {"head_dim": 32}


@dataclass(frozen=True)
class Run:
    """One update.

    Attributes:
        family: of a model.
        engine: settings that differ from chunks of 1,024 tokens and pages of 128.
        ranks: processes; `sp_size` of them share a prompt.
        changes: of the model.
    """

    family: str
    prompt_tokens: int = 4096
    response_tokens: int = 128
    group_size: int = 4
    ranks: int = 1
    zero_stage: int = 0
    lora_rank: int = 0
    engine: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        heads = {} if "deepseek" in self.family or "glm" in self.family else HEADS
        sizes = {**WIDER, **heads, **self.changes}
        return json.loads(tiny_model(self.family, **sizes).config.to_json_string(use_diff=False))

    @property
    def options(self) -> PlanOptions:
        settings = {"chunk_size": 1024, "page_size": 128, "allow_extrapolation": True}
        return PlanOptions(
            self.prompt_tokens,
            self.response_tokens,
            self.group_size,
            ranks=self.ranks,
            zero_stage=self.zero_stage,
            lora_rank=self.lora_rank,
            has_kernels=False,
            decodes=False,
            engine=EngineConfig(**{**settings, **self.engine}),
        )

    def __str__(self) -> str:
        parts = [self.family, f"P {self.prompt_tokens:,}", f"G {self.group_size}"]
        parts += [f"R {self.response_tokens}"] if self.response_tokens != 128 else []
        parts += [f"{k.removesuffix('_size')} {v}" for k, v in self.engine.items()]
        parts += [f"LoRA {self.lora_rank}"] if self.lora_rank else []
        return ", ".join([*parts, f"{self.ranks} ranks", f"ZeRO-{self.zero_stage}"])


QUICK = [
    Run("llama"),
    Run("qwen3", prompt_tokens=8192, lora_rank=8),
    Run("qwen3_5", group_size=8),
    Run("llama", engine={"prompt_gradient": "stopped"}),
]
SLOW = [
    Run("llama", prompt_tokens=16384, engine={"chunk_size": 2048}),
    Run("qwen3", response_tokens=1500, group_size=2),
    Run("qwen3", lora_rank=8, engine={"prompt_gradient": "stopped"}, group_size=16),
    Run("gemma3", prompt_tokens=8192),
    Run("qwen3_moe", prompt_tokens=8192),
    Run("glm_moe_dsa", prompt_tokens=2048, engine={"chunk_size": 512}),
    Run("deepseek_v3", prompt_tokens=2048, engine={"chunk_size": 512}),
    Run("llama", engine={"cotangent_dtype": "bfloat16"}),
    Run("mistral", changes={"sliding_window": 256}),
]
ON_RANKS = [
    Run("llama", ranks=2, zero_stage=2),
    Run("qwen3", ranks=2, zero_stage=1, engine={"sp_size": 2}, lora_rank=8),
]
SLOW_ON_RANKS = [
    Run("llama", ranks=2, zero_stage=3, engine={"sp_size": 2}),
    Run("llama", prompt_tokens=8192, ranks=2, zero_stage=1),
    Run("qwen3_5", ranks=2, zero_stage=3, engine={"sp_size": 2}),
    Run("qwen3_5", ranks=2, zero_stage=1, engine={"sp_size": 2}, lora_rank=8),
    Run("llama", ranks=4, zero_stage=2, engine={"sp_size": 2}, prompt_tokens=8192),
]


def marked(runs: list[Run], *marks: Any) -> list[Any]:
    return [pytest.param(run, id=str(run), marks=marks) for run in runs]


@pytest.mark.parametrize(
    "run",
    [
        *marked(QUICK),
        *marked(SLOW, pytest.mark.slow),
        *marked(ON_RANKS, pytest.mark.ranks),
        *marked(SLOW_ON_RANKS, pytest.mark.ranks, pytest.mark.slow),
    ],
)
def test_the_peak_is_the_planned_one(run: Run) -> None:
    """Of the rank that holds most, in a step that has all an optimizer keeps."""
    said = MemoryPlan.of(ModelShape.from_config(run.config), run.options)
    found = max(measure(run.config, run.options))
    error = said.device_bytes / found - 1
    print(f"{run}: predicted {said.device_bytes:,} B, measured {found:,} B, {error:+.1%}")  # noqa: T201  (-rP)
    assert abs(error) <= WITHIN, said.largest.name
