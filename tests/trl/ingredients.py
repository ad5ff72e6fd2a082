"""What the combinations of options are made of: adapters, datasets, rollouts, an optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel
from trl import GRPOTrainer

from tests.trl.parity import (
    RolloutFunction,
    fixed_rollout,
    prompts_dataset,
)


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


def prompts_of_their_own() -> RolloutFunction:
    """Members one and three of a group continue the prompt by a word, two and four by another.

    One more word follows: the last prompt token is not part of the captured state.
    """
    rollout = fixed_rollout()

    def with_own_prompts(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        out = rollout(prompts, trainer)
        out["prompt_ids"] = [[*ids, 50 + i % 2, 40] for i, ids in enumerate(out["prompt_ids"])]
        return out

    return with_own_prompts


class WritesPastAutograd(torch.optim.Optimizer):
    """Gradient descent on `.data`, as some optimizers do: torch does not count such writes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


def take_plain_optimizer(trainer: GRPOTrainer) -> None:
    trainer.optimizer = WritesPastAutograd(trainer.model.parameters())


def reward_at_times(
    completion_ids: list[list[int]], trainer_state: Any, **_: Any
) -> list[float | None]:
    """All alike in the first, third and fifth step."""
    step = trainer_state.global_step
    return [0.5 if step % 2 == 0 else float(len(ids)) for ids in completion_ids]
