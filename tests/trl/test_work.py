"""What is not computed: prompts are captured once, members without a gradient are not replayed."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from longstraw.captured import CapturedSegments
from longstraw.state import SegmentState
from tests.marks import slow_but
from tests.trl.parity import (
    EOS,
    ModelPath,
    Outcome,
    Setting,
    fixed_rollout,
    prompts_dataset,
    train,
)


def train_ours(setting: Setting, model_path: ModelPath, tmp_path: Path) -> Outcome:
    path = model_path(setting.family, **setting.variant)
    return train(setting, path, tmp_path, longstraw=True)


def calls(outcome: Outcome, phase: str) -> int:
    """How often the policy's engine entered `phase`."""
    records = {record["phase"]: record for record in outcome.trainer.engine.ledger.table()}
    return records[phase]["calls"] if phase in records else 0


def random_adapter() -> dict[str, Any]:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return {"peft_config": config}


# ---------------------------------------------------------------- captures

# name -> (config, captures of the policy's prompts)
# A generation scores the sampling policy's log-probs only where its completions outlive a step;
# that capture then serves the first step's replays too.
SLICINGS: dict[str, tuple[dict[str, Any], int]] = {
    "one group, one micro-batch": ({"max_steps": 5}, 5),
    "one group in four micro-batches": (
        {"max_steps": 3, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        3,
    ),
    "two groups in four micro-batches": (
        {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        6,
    ),
    "two groups in one micro-batch": ({"max_steps": 3, "per_device_train_batch_size": 8}, 6),
    "a micro-batch of one and a half groups": (
        {"max_steps": 2, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2},
        6,
    ),
    # Scored by the sampling policy and trained by it; trained again after the step: 2 per group.
    "completions used twice": ({"max_steps": 6, "num_iterations": 2}, 6),
    # Four groups scored at once under version 0 (4); the first is trained under it, each other one
    # step later (3).
    "four groups, a step after each": ({"max_steps": 4, "steps_per_generation": 4}, 7),
    # Both halves scored and the first trained under version 0, the second under version 1.
    "a step in the middle of a group": (
        {"max_steps": 4, "steps_per_generation": 2, "per_device_train_batch_size": 2},
        4,
    ),
    # The reference model has its own engine.
    "a reference model": ({"max_steps": 3, "beta": 0.1}, 3),
}


@pytest.mark.parametrize(
    "name",
    slow_but(
        [
            "two groups in four micro-batches",
            "a micro-batch of one and a half groups",
            "completions used twice",
            "four groups, a step after each",
        ],
        SLICINGS,
    ),
)
def test_each_prompt_is_captured_once_per_policy_version(
    name: str, model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However TRL slices the batch. The number is exact: groups times versions that run them."""
    held: list[tuple[Any, ...]] = []
    hold = CapturedSegments.hold

    def watched(captured: CapturedSegments, state: SegmentState) -> None:
        ids = tuple(state.segment.token_ids.flatten().tolist())
        held.append((id(captured), ids, state.policy_version))
        hold(captured, state)

    monkeypatch.setattr(CapturedSegments, "hold", watched)
    config, num_captures = SLICINGS[name]
    outcome = train_ours(Setting(config=config), model_path, tmp_path)
    assert outcome.trainer.engine.ledger.num_captures == num_captures
    assert outcome.logged("longstraw/captures")[-1] == num_captures
    assert len(set(held)) == len(held), "a prompt was captured twice under the same weights"


@pytest.mark.parametrize("rollout", slow_but([None], [fixed_rollout, None]))
def test_a_reference_adapter_captures_each_prompt_once_more(
    rollout: Any, model_path: ModelPath, tmp_path: Path
) -> None:
    """With the adapter switched off the weights are others: two versions per group and step.

    A generated rollout captures before the reference is scored; training finds its state again.
    """
    setting = Setting(config={"beta": 0.1, "max_steps": 3}, trainer=random_adapter, rollout=rollout)
    trainer = train_ours(setting, model_path, tmp_path).trainer
    assert trainer.engine.ledger.num_captures == 6
    assert trainer.engine.store.bytes_in_use == 0


def test_one_prompt_in_two_groups_is_captured_once(model_path: ModelPath, tmp_path: Path) -> None:
    """Groups are told apart by their place, prompts by their tokens."""
    setting = Setting(
        dataset=lambda: prompts_dataset((12,)).select([0] * 8),
        config={"max_steps": 3, "per_device_train_batch_size": 8},
    )
    outcome = train_ours(setting, model_path, tmp_path)
    assert outcome.trainer.engine.ledger.num_captures == 3
    assert calls(outcome, "prompt_backward") == 3


def with_evaluation() -> dict[str, Any]:
    return {"eval_dataset": prompts_dataset((9, 4), seed=8)}


EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}


@pytest.mark.parametrize(
    "setting",
    [
        Setting(),
        Setting(config={"num_iterations": 2, "beta": 0.1}),
        # Three of the groups that a generation scored are trained under later weights only.
        Setting(config={"steps_per_generation": 4}),
        Setting(trainer=with_evaluation, config=EVALUATION),
        Setting(trainer=random_adapter, config={"beta": 0.1}),
    ],
    ids=["plain", "reference model", "stale groups", "evaluation", "reference adapter"],
)
def test_no_state_outlives_its_use(setting: Setting, model_path: ModelPath, tmp_path: Path) -> None:
    """Captured state is the largest thing there is. None is left after the last step, whether it
    was replayed, only scored, evaluated, or overtaken by new weights."""
    trainer = train_ours(setting.but(max_steps=4), model_path, tmp_path).trainer
    assert trainer.engine.store.bytes_in_use == 0
    if trainer._ref_engine is not None:
        assert trainer._ref_engine.store.bytes_in_use == 0


# ---------------------------------------------------------------- replays


ONE_AT_A_TIME = {"longstraw_replay_batch": 1}


def two_at_the_mean(completions: list[str], **_: Any) -> list[float]:
    """In each group of four, the second and the fourth get the group's mean: advantage zero."""
    return [(1.0, 0.5, 0.0, 0.5)[i % 4] for i in range(len(completions))]


def all_alike(completions: list[str], **_: Any) -> list[float]:
    return [0.25] * len(completions)


@pytest.mark.parametrize("replay_batch", [1, 3])
def test_members_without_advantage_cost_no_replay(
    replay_batch: int, model_path: ModelPath, tmp_path: Path
) -> None:
    """Two of four have one: two replays per step, or one of both together."""
    setting = Setting(
        rewards=(two_at_the_mean,),
        config={"max_steps": 3},
        longstraw={"longstraw_replay_batch": replay_batch},
    )
    outcome = train_ours(setting, model_path, tmp_path)
    assert outcome.logged("longstraw/members_skipped") == [2.0, 2.0, 2.0]
    assert calls(outcome, "replay") == 3 * (2 if replay_batch == 1 else 1)
    assert calls(outcome, "prompt_backward") == 3


def test_a_group_without_advantages_costs_no_backward(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """All rewards alike: neither members nor prompt are run again after scoring."""
    setting = Setting(rewards=(all_alike,), config={"max_steps": 3}, longstraw=ONE_AT_A_TIME)
    outcome = train_ours(setting, model_path, tmp_path)
    assert outcome.logged("longstraw/members_skipped") == [4.0, 4.0, 4.0]
    assert calls(outcome, "score") == 12
    assert calls(outcome, "replay") == calls(outcome, "prompt_backward") == 0


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"entropy_coef": 0.1}], ids=str)
def test_members_without_advantage_are_replayed_when_something_else_needs_it(
    options: dict[str, Any], model_path: ModelPath, tmp_path: Path
) -> None:
    """The KL term and the entropy bonus have gradients of their own.

    The adapter is random, so that the policy differs from its reference from the start.
    """
    setting = Setting(
        rewards=(all_alike,),
        config={"max_steps": 3, **options},
        trainer=random_adapter,
        longstraw=ONE_AT_A_TIME,
    )
    outcome = train_ours(setting, model_path, tmp_path)
    assert outcome.logged("longstraw/members_skipped") == [0.0, 0.0, 0.0]
    assert calls(outcome, "replay") == 12


def test_masked_completions_are_neither_scored_nor_replayed(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """With mask_truncated_completions no token of a truncated response counts anywhere."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        completions = [[5, 6, 7], [5, 6, EOS], [7, 8, 9], [7, EOS]]  # the first and third end early
        return {
            "prompt_ids": [trainer.processing_class(text)["input_ids"] for text in prompts],
            "completion_ids": completions,
            "logprobs": None,
        }

    setting = Setting(
        rollout=lambda: rollout,
        config={"max_steps": 3, "mask_truncated_completions": True},
        longstraw=ONE_AT_A_TIME,
    )
    outcome = train_ours(setting, model_path, tmp_path)
    assert calls(outcome, "score") == calls(outcome, "replay") == 3 * 2
    assert outcome.logged("longstraw/members_skipped") == [2.0] * 3
