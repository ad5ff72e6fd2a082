"""The combinations of options under which test_parity compares both trainers."""

from dataclasses import dataclass, replace

from tests.trl.ingredients import (
    as_stream,
    async_reward,
    later_tokens_only,
    lora,
    prompts_of_their_own,
    reward_at_times,
    some_tokens_only,
    take_plain_optimizer,
    tiny_reward_model,
    trained_adapter,
    twice_the_same_prompts,
    with_eval_dataset,
)
from tests.trl.parity import (
    ADAMW,
    TWO_LAYERS,
    Setting,
    length_reward,
    modular_reward,
    prompts_dataset,
    word_tokenizer,
)


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


TWO_REWARDS = (modular_reward, length_reward)
KL = {"beta": 1.0}
GEMMA3 = {**TWO_LAYERS, "layer_types": ["sliding_attention", "full_attention"]}
TWICE = {"num_iterations": 2}
BUDGET_KIB = 44
_lora = Setting(trainer=lora())
_twice = Setting(config=TWICE)
_two_rewards = Setting(rewards=TWO_REWARDS, config={"reward_weights": [1.0, 0.5]})

COMBINATIONS: dict[str, Combination] = {
    # The reference policy.
    "beta, reference model": Combination(Setting(config=KL)),
    "beta, reference model, adamw": Combination(
        Setting(config={**KL, **ADAMW}), Setting(config=ADAMW)
    ),
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
        Setting(
            trainer=lora(modules_to_save=["embed_tokens"], target_modules=["q_proj", "v_proj"])
        ),
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
    "a micro-batch of one and a half groups": Combination(
        Setting(config={"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2})
    ),
    # As an environment may give them that answers each member's reset() in its own way.
    "prompts that differ within a group": Combination(Setting(rollout=prompts_of_their_own)),
    "prompts that differ within a group, half a group at a time": Combination(
        Setting(
            rollout=prompts_of_their_own,
            config={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        ),
        None,
    ),
    # A prompt of the first group that no later micro-batch has: its backward is left to the end.
    "prompts that differ within a group, accumulation 4": Combination(
        Setting(
            rollout=prompts_of_their_own,
            config={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        ),
        None,
    ),
    "last step of an epoch accumulates less": Combination(
        Setting(
            dataset=lambda: prompts_dataset((12, 7, 30)),
            config={
                "steps_per_generation": 1,
                "gradient_accumulation_steps": 2,
                "max_steps": -1,
                "num_train_epochs": 2,
            },
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
    # The first tokens of a group have one distribution and so one entropy. The quantile falls on it
    # in some of these steps: they count all or not at all, and rounding must not tell them apart.
    "top_entropy_quantile": Combination(Setting(config={"top_entropy_quantile": 0.5, "seed": 1})),
    "top_entropy_quantile, first tokens left out": Combination(
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
    # Gated DeltaNet below attention.
    "qwen3_5": Combination(Setting("qwen3_5"), None),
    "qwen3_5, LoRA, adamw": Combination(Setting("qwen3_5", trainer=lora(), config=ADAMW), None),
    "qwen3_5, checkpointing, half a group at a time, beta": Combination(
        Setting(
            "qwen3_5",
            config={
                **KL,
                "gradient_checkpointing": True,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
            },
        ),
        None,
    ),
    "qwen3_5_moe, auxiliary loss": Combination(
        Setting("qwen3_5_moe", config={"router_aux_loss_coef": 0.5}),
        Setting("qwen3_5_moe", config={"router_aux_loss_coef": 0.0}),
    ),
    "qwen3_next, auxiliary loss, half a group at a time": Combination(
        Setting(
            "qwen3_next",
            config={
                "router_aux_loss_coef": 0.5,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
            },
        ),
        Setting("qwen3_next", config={"router_aux_loss_coef": 0.0}),
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
    "an optimizer that writes past autograd": Combination(
        Setting(config={"steps_per_generation": 4}, prepare=take_plain_optimizer), None
    ),
    "no gradient clipping": Combination(Setting(config={"max_grad_norm": 0.0}), Setting()),
}
