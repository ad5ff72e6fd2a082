"""Training with LongStraw gives what training with stock TRL gives: parameters and all metrics.

Both trainers get the same model, prompts and completions and make five optimizer steps. Then, per
parameter, |ours - stock| is at most 1e-4 of how far stock TRL moved it, and every number that stock
TRL logs is logged here and equal to 1e-4. The tolerance is that of fp32: gradients of one step
agree to about 1e-6 (the same sums in another order), and five steps and the optimizer amplify that
to 1e-5 on these well-conditioned models. A mistake (a wrong scale, a lost part of the gradient, a
row too many) is of the order of 1.

Each combination also shows that its option matters: stock TRL without the option ends elsewhere.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

from tests.trl.parity import (
    ADAMW,
    TOLERANCE,
    TWO_LAYERS,
    ModelPath,
    RolloutFunction,
    Setting,
    assert_same_training,
    fixed_rollout,
    length_reward,
    modular_reward,
    prompts_dataset,
    train,
    word_tokenizer,
    worst_metric,
    worst_parameter,
)

# An option counts as having an effect if it changes where stock TRL ends by more than this, relative
# to the movement of the parameter it changes most. 100 times what would be accepted as equal.
EFFECT = 1e-2


@dataclass(frozen=True)
class Combination:
    """Options that both trainers are compared under.

    Attributes:
        setting: the options.
        without: the same without the option that the combination is about. None for options that
            say how a gradient is computed and not which.
    """

    setting: Setting
    without: Setting | None = Setting()


# ---------------------------------------------------------------- the losses

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


# Completions are used twice, so that ratios leave 1 and clipping, gates and weights act; and a group
# comes in two micro-batches of different lengths, so that normalizers differ.
LOSS_OPTIONS = {
    "num_iterations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_trains_as_in_stock_trl(
    loss_type: str, optimizer: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """The loss is TRL's own code; what is shown is that its gradient reaches every parameter."""
    setting = Setting(config={**LOSS_OPTIONS, "loss_type": loss_type})
    if optimizer == "adamw":
        setting = setting.but(**ADAMW)
    assert_same_training(f"{loss_type}, {optimizer}", setting, model_path, tmp_path)


def test_the_losses_compared_above_differ(model_path: ModelPath, tmp_path: Path) -> None:
    """Otherwise equality would say little: under some settings all clipped losses are one.

    Each pair of losses ends with a parameter at least 1e-2 of its movement apart in stock TRL, 100
    times what is accepted as equal.
    """
    stock = [
        train(
            Setting(config={**LOSS_OPTIONS, "loss_type": loss_type}),
            model_path(**TWO_LAYERS),
            tmp_path,
            longstraw=False,
        )
        for loss_type in LOSS_TYPES
    ]
    for a, b in itertools.combinations(stock, 2):
        assert worst_parameter(a.after, b)[0] > EFFECT
    assert 0.05 < max(stock[0].logged("clip_ratio/region_mean")) < 0.95


# ---------------------------------------------------------------- options


def lora(**changes: Any) -> Callable[[], dict[str, Any]]:
    """Keyword arguments with a LoRA adapter."""
    # init_lora_weights=False makes both factors random, so that both get gradients from the start
    # and the policy differs from its reference.
    options = {"r": 4, "lora_alpha": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return lambda: {"peft_config": LoraConfig(**{**options, **changes})}


def trained_adapter(model: PreTrainedModel) -> nn.Module:
    """`model` with an adapter that already does something, as when training is taken up again."""
    return get_peft_model(model, lora()()["peft_config"])


def with_eval_dataset() -> dict[str, Any]:
    return {"eval_dataset": prompts_dataset((4, 19, 11), seed=9)}


def twice_the_same_prompts() -> Any:
    """Prompts of which each comes twice in a batch of two groups."""
    prompts = prompts_dataset((23, 9))
    return prompts.select([0, 0, 1, 1, 0, 0, 1, 1])


def as_stream() -> Any:
    return prompts_dataset().to_iterable_dataset()


def tiny_reward_model() -> nn.Module:
    """A reward model: a sequence classifier with its own copy of the tokenizer's ids."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0, num_labels=1, name_or_path="tiny-reward",
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config).eval()


async def async_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [float(len(set(ids))) for ids in completion_ids]


def some_tokens_only() -> RolloutFunction:
    """Completions of which 60 % of the tokens are the policy's own.

    The first always is: a completion without any is a mean of nothing, which TRL logs as NaN.
    """
    return fixed_rollout(lambda rng, n: [1, *(int(rng.random() < 0.6) for _ in range(n - 1))])


def later_tokens_only() -> RolloutFunction:
    """Completions whose first token does not count."""
    return fixed_rollout(lambda _, n: [0] + [1] * (n - 1), shortest=2)


def reward_at_times(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float | None]:
    """All alike in the first, third and fifth step."""
    step = trainer_state.global_step
    return [0.5 if step % 2 == 0 else float(len(ids)) for ids in completion_ids]


TWO_REWARDS = (modular_reward, length_reward)
KL = {"beta": 0.2}
GEMMA3 = {**TWO_LAYERS, "layer_types": ["sliding_attention", "full_attention"]}
TWICE = {"num_iterations": 2}
BUDGET_KIB = 44
_lora = Setting(trainer=lora())
_twice = Setting(config=TWICE)
_two_rewards = Setting(rewards=TWO_REWARDS, config={"reward_weights": [1.0, 0.5]})

COMBINATIONS: dict[str, Combination] = {
    # The reference policy.
    "beta, reference model": Combination(Setting(config=KL)),
    "beta, reference model, adamw": Combination(Setting(config={**KL, **ADAMW}), Setting(config=ADAMW)),
    "beta, KL without bias correction": Combination(
        Setting(config={**KL, **TWICE, "use_bias_correction_kl": False}),
        Setting(config={**KL, **TWICE}),
    ),
    "beta, reference model synced": Combination(
        Setting(
            config={
                **KL,
                "sync_ref_model": True,
                "ref_model_sync_steps": 1,
                "ref_model_mixup_alpha": 1.0,
            }
        ),
        Setting(config=KL),
    ),
    "beta, LoRA switched off for the reference": Combination(replace(_lora, config=KL), _lora),
    "beta, a trained adapter copied as reference": Combination(
        Setting(wrap_model=trained_adapter, config=KL), None
    ),
    # Adapters.
    "LoRA": Combination(_lora, None),
    "LoRA, adamw": Combination(_lora.but(**ADAMW), None),
    "LoRA, gradient checkpointing": Combination(_lora.but(gradient_checkpointing=True), None),
    "LoRA, embeddings trained": Combination(
        Setting(trainer=lora(modules_to_save=["embed_tokens"], target_modules=["q_proj", "v_proj"])),
        None,
    ),
    "DoRA": Combination(Setting(trainer=lora(use_dora=True)), None),
    # Ratios, and completions used more than once.
    "num_iterations 2": Combination(_twice),
    "GSPO": Combination(
        Setting(config={**TWICE, "loss_type": "grpo", "importance_sampling_level": "sequence"}),
        Setting(config={**TWICE, "loss_type": "grpo"}),
    ),
    "luspo on sequences": Combination(
        Setting(config={**TWICE, "loss_type": "luspo", "importance_sampling_level": "sequence"}),
        Setting(config={**TWICE, "loss_type": "luspo"}),
    ),
    "delta, two-sided clipping": Combination(
        Setting(config={**TWICE, "delta": 1.05, "epsilon_high": 0.5}),
        Setting(config={**TWICE, "epsilon_high": 0.5}),
    ),
    "epsilon_high": Combination(Setting(config={**TWICE, "epsilon_high": 0.01}), _twice),
    "off_policy_mask_threshold": Combination(
        Setting(config={**TWICE, "off_policy_mask_threshold": 3.0}), _twice
    ),
    # How a generation batch is cut into micro-batches and steps.
    "accumulation 2, whole groups": Combination(Setting(config={"gradient_accumulation_steps": 2})),
    "accumulation 4, one member at a time": Combination(
        Setting(config={"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}), None
    ),
    "accumulation 2, half a group at a time": Combination(
        Setting(config={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}), None
    ),
    "accumulation 4, half a group at a time": Combination(
        Setting(config={"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2})
    ),
    "accumulation 4, bnpo": Combination(
        Setting(
            config={
                "gradient_accumulation_steps": 4,
                "per_device_train_batch_size": 2,
                "loss_type": "bnpo",
            }
        )
    ),
    "steps_per_generation 4, accumulation 1": Combination(
        Setting(config={"steps_per_generation": 4, "gradient_accumulation_steps": 1})
    ),
    "steps_per_generation 4, accumulation 2, grpo": Combination(
        Setting(
            config={
                "steps_per_generation": 4,
                "gradient_accumulation_steps": 2,
                "loss_type": "grpo",
                "max_steps": 8,
            }
        )
    ),
    "steps_per_generation 2, accumulation 4": Combination(
        Setting(
            config={
                "steps_per_generation": 2,
                "gradient_accumulation_steps": 4,
                "per_device_train_batch_size": 2,
            }
        )
    ),
    "steps_per_generation 2, accumulation 3": Combination(
        Setting(
            config={
                "steps_per_generation": 2,
                "gradient_accumulation_steps": 3,
                "per_device_train_batch_size": 2,
            }
        )
    ),
    "a group cut by an optimizer step": Combination(
        Setting(config={"steps_per_generation": 2, "per_device_train_batch_size": 2})
    ),
    "two groups in a micro-batch": Combination(Setting(config={"per_device_train_batch_size": 8})),
    "two groups in a micro-batch, accumulation 2, num_iterations 2": Combination(
        Setting(
            config={**TWICE, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
        )
    ),
    "one prompt in both groups of a micro-batch": Combination(
        Setting(
            dataset=twice_the_same_prompts,
            config={"per_device_train_batch_size": 8, "shuffle_dataset": False},
        ),
        Setting(config={"per_device_train_batch_size": 8, "shuffle_dataset": False}),
    ),
    "one prompt in groups of two micro-batches": Combination(
        Setting(
            dataset=twice_the_same_prompts,
            config={"gradient_accumulation_steps": 2, "shuffle_dataset": False},
        ),
        Setting(config={"gradient_accumulation_steps": 2, "shuffle_dataset": False}),
    ),
    "last step of an epoch accumulates less": Combination(
        Setting(
            dataset=lambda: prompts_dataset((12, 7, 30)),
            config={"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": -1,
                    "num_train_epochs": 2},
        )
    ),  # fmt: skip
    # Rewards and advantages.
    "scale_rewards batch": Combination(
        Setting(config={"scale_rewards": "batch", "per_device_train_batch_size": 8}),
        Setting(config={"per_device_train_batch_size": 8}),
    ),
    "scale_rewards none": Combination(Setting(config={"scale_rewards": "none"})),
    "two rewards, weighted": Combination(_two_rewards),
    "normalize_then_sum": Combination(
        _two_rewards.but(multi_objective_aggregation="normalize_then_sum"), _two_rewards
    ),
    "completions that no function scores": Combination(Setting(rewards=(length_reward,))),
    "updates without any advantage, adamw": Combination(
        Setting(rewards=(reward_at_times,), config=ADAMW), Setting(config=ADAMW)
    ),
    "updates without any advantage, LoRA, accumulation 2, adamw": Combination(
        Setting(
            rewards=(reward_at_times,),
            trainer=lora(),
            config={**ADAMW, "gradient_accumulation_steps": 2},
        ),
        None,
    ),
    "an async reward": Combination(Setting(rewards=(modular_reward, async_reward))),
    "a reward model": Combination(
        Setting(
            rewards=(tiny_reward_model(),),
            trainer=lambda: {"reward_processing_classes": [word_tokenizer()]},
        )
    ),
    # Entropy.
    "entropy bonus": Combination(Setting(config={"entropy_coef": 0.5})),
    "entropy bonus, adaptive, accumulation 2": Combination(
        Setting(
            config={
                "use_adaptive_entropy": True,
                "entropy_coef": 0.3,
                "entropy_coef_delta": 0.1,
                "entropy_target": 5.0,
                "gradient_accumulation_steps": 2,
            }
        ),
        Setting(config={"gradient_accumulation_steps": 2}),
    ),
    # First tokens of a group have one distribution and so one entropy; where the quantile falls on
    # it, rounding decides which of them count. They are left out here.
    "top_entropy_quantile": Combination(
        Setting(rollout=later_tokens_only, config={"top_entropy_quantile": 0.5}),
        Setting(rollout=later_tokens_only),
    ),
    "top_entropy_quantile, entropy bonus, two groups": Combination(
        Setting(
            rollout=later_tokens_only,
            config={
                "top_entropy_quantile": 0.5,
                "entropy_coef": 0.5,
                "per_device_train_batch_size": 8,
            },
        ),
        Setting(
            rollout=later_tokens_only,
            config={"entropy_coef": 0.5, "per_device_train_batch_size": 8},
        ),
    ),
    # Masks.
    "environment mask": Combination(Setting(rollout=some_tokens_only)),
    "mask_truncated_completions": Combination(Setting(config={"mask_truncated_completions": True})),
    "environment mask, truncated completions masked, beta": Combination(
        Setting(
            rollout=some_tokens_only,
            config={**KL, "mask_truncated_completions": True},
        )
    ),
    "pad_to_multiple_of": Combination(Setting(config={"pad_to_multiple_of": 8}), None),
    # The distribution that is scored.
    "temperature": Combination(Setting(config={"temperature": 0.7})),
    "temperature, beta, entropy bonus": Combination(
        Setting(config={**KL, "temperature": 0.7, "entropy_coef": 0.3}),
        Setting(config={**KL, "entropy_coef": 0.3}),
    ),
    "cast_lm_head_to_fp32": Combination(Setting(config={"cast_lm_head_to_fp32": True}), None),
    # Mixtures of experts. Their auxiliary loss couples all rows of a micro-batch.
    "qwen3_moe, auxiliary loss": Combination(
        Setting("qwen3_moe", config={"router_aux_loss_coef": 0.5}),
        Setting("qwen3_moe", config={"router_aux_loss_coef": 0.0}),
    ),
    "qwen3_moe, auxiliary loss, half a group at a time": Combination(
        Setting(
            "qwen3_moe",
            config={
                "router_aux_loss_coef": 0.5,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
            },
        ),
        Setting("qwen3_moe", config={"router_aux_loss_coef": 0.0}),
    ),
    "qwen3_moe, auxiliary loss, masked rows, two groups": Combination(
        Setting(
            "qwen3_moe",
            config={
                "router_aux_loss_coef": 0.5,
                "per_device_train_batch_size": 8,
                "mask_truncated_completions": True,
            },
        ),
        Setting("qwen3_moe", config={"router_aux_loss_coef": 0.0}),
    ),
    "gpt_oss, auxiliary loss": Combination(
        Setting("gpt_oss", config={"router_aux_loss_coef": 0.5}),
        Setting("gpt_oss", config={"router_aux_loss_coef": 0.0}),
    ),
    # Models.
    "tied embeddings": Combination(Setting("smollm2"), None),
    "tied embeddings, adamw": Combination(Setting("smollm2", config=ADAMW), None),
    "tied embeddings, cast_lm_head_to_fp32": Combination(
        Setting("smollm2", config={"cast_lm_head_to_fp32": True}), None
    ),
    "mistral, sliding window": Combination(
        Setting("mistral", {**TWO_LAYERS, "sliding_window": 6}),
        Setting("mistral", {**TWO_LAYERS, "sliding_window": None}),
    ),
    "gemma2, softcap and sliding window": Combination(
        Setting("gemma2", {**TWO_LAYERS, "sliding_window": 6}), Setting("gemma2")
    ),
    "gemma3, sliding window": Combination(
        Setting("gemma3", {**GEMMA3, "sliding_window": 6}), Setting("gemma3", GEMMA3)
    ),
    "qwen2": Combination(Setting("qwen2"), None),
    "qwen3": Combination(Setting("qwen3"), None),
    "smollm3": Combination(Setting("smollm3", {}), None),
    # Learned positions: TRL counts them from the left padding, so only prompts of one length agree.
    "gpt2, two prompts of one length in a micro-batch": Combination(
        Setting(
            "gpt2",
            {},
            dataset=lambda: prompts_dataset((11,) * 8),
            config={"per_device_train_batch_size": 8},
        ),
        None,
    ),
    # How the engine runs.
    "gradient checkpointing": Combination(Setting(config={"gradient_checkpointing": True}), None),
    "replay_batch 3": Combination(Setting(longstraw={"longstraw_replay_batch": 3}), None),
    "replay_batch 3, LoRA, beta, accumulation 2": Combination(
        Setting(
            trainer=lora(),
            config={**KL, "gradient_accumulation_steps": 2},
            longstraw={"longstraw_replay_batch": 3},
        ),
        None,
    ),
    "replay_batch 3, auxiliary loss": Combination(
        Setting(
            "qwen3_moe",
            config={"router_aux_loss_coef": 0.5},
            longstraw={"longstraw_replay_batch": 3},
        ),
        None,
    ),
    "pages on the host": Combination(Setting(longstraw={"longstraw_page_device": "host"}), None),
    "chunks of one token": Combination(Setting(longstraw={"longstraw_chunk_size": 1}), None),
    "one chunk and one page": Combination(
        Setting(longstraw={"longstraw_chunk_size": 64, "longstraw_page_size": 64}), None
    ),
    "reference attention": Combination(
        Setting(longstraw={"longstraw_attention": "reference"}), None
    ),
    "log-probs two rows at a time": Combination(
        Setting(longstraw={"longstraw_logprob_chunk_size": 2}), None
    ),
    # Room for one prompt of 30 tokens with its cotangents (32 KiB) and a response, not for two.
    "a state budget": Combination(
        Setting(
            config={"gradient_accumulation_steps": 2, **KL},
            longstraw={"longstraw_state_budget_gib": BUDGET_KIB / 2**20},
        ),
        None,
    ),
    # The loop around the steps.
    "evaluation at every step": Combination(
        Setting(
            trainer=with_eval_dataset,
            config={"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
        ),
        None,
    ),
    "evaluation, other group size, beta, accumulation 2": Combination(
        Setting(
            trainer=with_eval_dataset,
            config={
                **KL,
                "eval_strategy": "steps",
                "eval_steps": 1,
                "per_device_eval_batch_size": 6,
                "num_generations_eval": 2,
                "gradient_accumulation_steps": 2,
            },
        ),
        None,
    ),
    "evaluation between steps of one generation, auxiliary loss": Combination(
        Setting(
            "qwen3_moe",
            trainer=with_eval_dataset,
            config={
                "router_aux_loss_coef": 0.5,
                "eval_strategy": "steps",
                "eval_steps": 1,
                "per_device_eval_batch_size": 4,
                "steps_per_generation": 2,
                "per_device_train_batch_size": 2,
            },
        ),
        None,
    ),
    "a stream of prompts": Combination(Setting(dataset=as_stream), None),
    "logging every second step": Combination(Setting(config={"logging_steps": 2}), None),
    "completions logged": Combination(Setting(config={"log_completions": True}), None),
    "no gradient clipping": Combination(Setting(config={"max_grad_norm": 0.0}), Setting()),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_options_train_as_in_stock_trl(
    name: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """See the module's docstring for the tolerance.

    A failure in parameters and not in metrics means that the gradient is another than that of the
    logged loss.
    """
    combination = COMBINATIONS[name]
    stock, _ = assert_same_training(name, combination.setting, model_path, tmp_path)
    if combination.without is not None:
        setting = combination.without
        path = model_path(setting.family, **setting.variant)
        without = train(setting, path, tmp_path / "without", longstraw=False)
        assert worst_parameter(without.after, stock)[0] > EFFECT


# ---------------------------------------------------------------- without a hand in stock TRL


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo", "cispo"])
def test_moving_whole_groups_changes_no_gradient(
    loss_type: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """Stock TRL with its own shuffle, which scatters a group over micro-batches, ends the same.

    These losses are sums over all rows of an accumulation window, so it does not matter which rows
    meet in a micro-batch; stock TRL is not touched in this test. Logged means over micro-batches
    do depend on it and are not compared.
    """
    setting = Setting(
        config={
            "loss_type": loss_type,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
        }
    )
    path = model_path(setting.family, **setting.variant)
    stock = train(setting, path, tmp_path / "stock", longstraw=False, own_shuffle=True)
    ours = train(setting, path, tmp_path / "ours", longstraw=True)
    assert worst_parameter(ours.after, stock)[0] <= TOLERANCE
    assert ours.logged("grad_norm") == pytest.approx(stock.logged("grad_norm"), rel=TOLERANCE)


def test_a_checkpoint_of_stock_trl_is_taken_up_as_by_stock_trl(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """Both resume from the checkpoint that stock TRL wrote after two of its five steps.

    AdamW, so that its state has to be loaded. The rollout function starts anew with each trainer.
    """
    setting = Setting(config={**ADAMW, "gradient_accumulation_steps": 2})
    path = model_path(setting.family, **setting.variant)
    saving = setting.but(max_steps=2, save_strategy="steps", save_steps=2)
    train(saving, path, tmp_path, longstraw=False)
    checkpoint = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    stock = train(setting, path, tmp_path / "stock", longstraw=False, **checkpoint)
    ours = train(setting, path, tmp_path / "ours", longstraw=True, **checkpoint)
    assert ours.trainer.state.global_step == 5
    assert worst_parameter(ours.after, stock)[0] <= TOLERANCE
    assert worst_metric(ours.logs, stock.logs)[0] <= TOLERANCE
