"""Completions that come from elsewhere train as in stock TRL: from vLLM, and through tool calls.

vLLM is not installed here. The trainer knows it by one object, `VLLMGeneration`, of which it uses
`sync_weights` and `generate`. A stand-in with these two gives both trainers the same completions
and log-probs; everything that TRL then computes from them is TRL's. Tool calls are real ones: TRL
parses them, runs the tool and appends its answer. Only the sampling of each turn is scripted.
Tolerances as in `test_parity`.
"""

import inspect
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from tests.marks import slow_but
from tests.models import VOCAB
from tests.trl.chat import CHAT_VOCAB, END_OF_TURN, add, call_of, chat_dataset, chat_tokenizer
from tests.trl.parity import (
    TWO_LAYERS,
    ModelPath,
    Setting,
    assert_same_training,
    modular_reward,
    random_completion,
    train,
    worst_parameter,
)

# ---------------------------------------------------------------- vLLM


class FixedVLLM:
    """Stands where `VLLMGeneration` does; gives the same completions whoever asks in turn.

    Log-probs are those of a uniform policy with some noise: far enough from the trained one that
    ratios are truncated and masked at times. Like vLLM's, some are missing.
    """

    def __init__(self, **_: Any) -> None:
        self.num_calls = 0
        self.num_syncs = 0
        self.vllm_client = self

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def sync_weights(self) -> None:
        self.num_syncs += 1

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[Any, ...]:
        self.num_calls += 1
        rng = random.Random(2000 + self.num_calls)
        completions = [random_completion(rng) for _ in prompts]
        logprobs = [[[self._logprob(rng)] for _ in ids] for ids in completions]
        return prompts, completions, logprobs, None

    @staticmethod
    def _logprob(rng: random.Random) -> float | None:
        return None if rng.random() < 0.05 else -math.log(VOCAB) + rng.gauss(0.0, 0.3)


@pytest.fixture
def fixed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", FixedVLLM)


VLLM = Setting(rollout=None, config={"use_vllm": True, "vllm_mode": "colocate"})
VLLM_OPTIONS: dict[str, dict[str, Any]] = {
    "token_truncate": {},
    "token_mask": {},
    # Random sequences are less likely to the policy than to a uniform one: ratios are 1e-3 .. 1.
    "sequence_truncate": {
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 0.3,
    },
    "sequence_mask": {
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 0.3,
    },
    "token_truncate, both bounds, num_iterations 2": {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": 0.5,
        "vllm_importance_sampling_clip_max": 1.5,
        "num_iterations": 2,
    },
    "sequence_mask, both bounds, half a group at a time": {
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_min": 0.1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    },
    "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.3},
    "server, beta": {"vllm_mode": "server", "beta": 0.2},
    "no correction": {"vllm_importance_sampling_correction": False},
}


@pytest.mark.parametrize(
    "name",
    slow_but(
        [
            "sequence_truncate",
            "token_truncate, both bounds, num_iterations 2",
            "server, beta",
            "no correction",
        ],
        VLLM_OPTIONS,
    ),
)
@pytest.mark.usefixtures("fixed_vllm")
def test_vllm_log_probs_correct_the_loss_as_in_stock_trl(
    name: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """The ratio of the policy's log-probs to vLLM's needs scores of the sampling policy.

    Without the correction stock TRL ends elsewhere, so it acts.
    """
    options = VLLM_OPTIONS[name] or {"vllm_importance_sampling_mode": name}
    setting = VLLM.but(**options)
    stock, ours = assert_same_training(f"vLLM, {name}", setting, model_path, tmp_path)
    for trainer in (stock.trainer, ours.trainer):
        # A new policy is sent once, however many steps its completions serve.
        generations = trainer.vllm_generation.num_calls
        assert trainer.vllm_generation.num_syncs == generations
    if name == "no correction":
        assert not stock.logged("sampling/importance_sampling_ratio/mean")
        return
    assert ours.logged("sampling/importance_sampling_ratio/mean")
    path = model_path(setting.family, **setting.variant)
    without = setting.but(vllm_importance_sampling_correction=False)
    if name != "vespo":  # whose clamp at log(1e-8) may hide it
        plain = train(without, path, tmp_path / "plain", longstraw=False)
        assert worst_parameter(plain.after, stock)[0] > 1e-2


def test_the_stand_in_for_vllm_has_the_interface_of_the_real_one() -> None:
    """Otherwise the tests above would pass with a trainer that could not use vLLM."""
    for method in ("generate", "sync_weights"):
        real = inspect.signature(getattr(VLLMGeneration, method)).parameters
        assert list(inspect.signature(getattr(FixedVLLM, method)).parameters) == list(real)


# ---------------------------------------------------------------- tools


class ScriptedTurns:
    """Replaces the sampling of a turn: each row calls the tool some times, then answers.

    Scripts cover what TRL treats apart: no call, one, two in a row, an unknown tool, a wrong
    argument and no end, and text that only begins like a call.
    """

    SCRIPTS = (
        ["The answer is three." + END_OF_TURN],
        [call_of("add", a=1, b=2), "So it is 3." + END_OF_TURN],
        [call_of("add", a=20, b=22), call_of("add", a=42, b=1), "43" + END_OF_TURN],
        [call_of("subtract", a=1, b=2), "I cannot." + END_OF_TURN],
        [call_of("add", a=1), "Something is missing, and this does not end"],
        ["<tool_call>\nnothing" + END_OF_TURN],
    )

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.tokenizer = trainer.processing_class
        self.num_rows = 0

    def __call__(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        **_: Any,
    ) -> tuple[list[list[int]], list[list[float]]]:
        turns = [self._next_turn(self.tokenizer.decode(ids)) for ids in prompt_ids]
        completions = [self.tokenizer(turn)["input_ids"] for turn in turns]
        return completions, [[-1.0] * len(ids) for ids in completions]

    def _next_turn(self, text: str) -> str:
        for script in self.SCRIPTS:
            if script[0] in text:
                return script[sum(turn in text for turn in script)]
        self.num_rows += 1  # the first turn of a new row
        return self.SCRIPTS[self.num_rows % len(self.SCRIPTS)][0]


def script_turns(trainer: GRPOTrainer) -> None:
    trainer._generate_single_turn = ScriptedTurns(trainer)


class Calculator:
    """An environment: its method is a tool, and it keeps what it was asked."""

    def reset(self, **_: Any) -> None:
        self.total = 0

    def add(self, a: int, b: int) -> int:
        """
        Add.

        Args:
            a: First.
            b: Second.

        Returns:
            The sum.
        """
        self.total += a + b
        return a + b


def total_reward(environments: list[Calculator], **_: Any) -> list[float | None]:
    return [float(environment.total) for environment in environments]


TOOLS = Setting(
    variant={**TWO_LAYERS, "vocab_size": CHAT_VOCAB},
    rollout=None,
    dataset=chat_dataset,
    tokenizer=chat_tokenizer,
    trainer=lambda: {"tools": [add]},
    prepare=script_turns,
    config={"max_completion_length": 400},
    # The tool's description makes prompts of several hundred bytes.
    longstraw={"longstraw_chunk_size": 160, "longstraw_page_size": 64},
)
TOOL_OPTIONS = {
    "tools": TOOLS,
    "tools, half a group at a time, beta": TOOLS.but(
        per_device_train_batch_size=2, gradient_accumulation_steps=2, beta=0.2
    ),
    "tools, a budget that cuts conversations": TOOLS.but(max_completion_length=150),
    "an environment": replace(
        TOOLS,
        trainer=lambda: {"environment_factory": Calculator},
        rewards=(modular_reward, total_reward),
    ),
}


@pytest.mark.parametrize(
    "name", slow_but(["tools, a budget that cuts conversations", "an environment"], TOOL_OPTIONS)
)
def test_tool_calls_train_as_in_stock_trl(name: str, model_path: ModelPath, tmp_path: Path) -> None:
    """Answers of tools are read by later tokens and are not trained on.

    Three steps: the claim is about masks and segments, and prompts are long here.
    """
    setting = TOOL_OPTIONS[name].but(max_steps=3)
    stock, ours = assert_same_training(name, setting, model_path, tmp_path)
    assert min(ours.logged("tools/call_frequency")) > 0
    assert max(ours.logged("tools/failure_frequency")) > 0
