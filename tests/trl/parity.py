"""Running stock TRL and LongStraw on the same completions, and comparing what they did."""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl_integration import LongStrawGRPOConfig, LongStrawGRPOTrainer
from trl_integration.seams import whole_groups

VOCAB = 97
EOS = 1
PROMPT_LENGTHS = (1, 7, 12, 23, 17, 30, 5, 9)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words `w2` ... `w96`, one token each."""
    vocab = {"<pad>": 0, "<eos>": EOS, **{f"w{i}": i for i in range(2, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w2"
    )


def prompts_dataset(num_prompts: int = 8, seed: int = 0) -> Dataset:
    rng = random.Random(seed)
    lengths = [PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)] for i in range(num_prompts)]
    texts = [" ".join(f"w{rng.randrange(2, VOCAB)}" for _ in range(n)) for n in lengths]
    return Dataset.from_dict({"prompt": texts, "number": list(range(num_prompts))})


def fixed_rollout(*, with_env_mask: bool = False) -> Callable[..., dict[str, Any]]:
    """A rollout function that gives the same completions to every trainer that asks in turn."""
    calls = 0

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        rng = random.Random(1000 + calls)
        prompt_ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
        completions = []
        for _ in prompts:
            length = rng.randint(1, 9)
            ids = [rng.randrange(2, VOCAB) for _ in range(length)]
            completions.append(ids if length == 9 else [*ids, EOS])  # 9: truncated, no EOS
        out = {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": [[-rng.random() * 3 for _ in ids] for ids in completions],
        }
        if with_env_mask:
            out["env_mask"] = [[int(rng.random() < 0.7) for _ in ids] for ids in completions]
        return out

    return rollout


def modular_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A number that differs between most completions."""
    return [float((sum(ids) % 7) / 3) for ids in completion_ids]


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Shorter is better; completions of 4 tokens are not scored."""
    return [None if len(ids) == 4 else -0.1 * len(ids) for ids in completion_ids]


@dataclass
class Setting:
    """One combination of options, for both trainers.

    Attributes:
        config: fields of `GRPOConfig` that differ from the base.
        longstraw: `longstraw_*` fields.
        trainer: keyword arguments of the trainer, made anew for each.
        prepare: called with each trainer before training.
    """

    config: dict[str, Any] = field(default_factory=dict)
    longstraw: dict[str, Any] = field(default_factory=dict)
    trainer: Callable[[], dict[str, Any]] = dict
    prepare: Callable[[GRPOTrainer], None] = lambda trainer: None
    rewards: tuple[Callable[..., Any], ...] = (modular_reward,)
    with_env_mask: bool = False
    wrap_model: Callable[[Any], Any] = lambda model: model


@dataclass
class Outcome:
    """Parameters after training and everything logged on the way."""

    parameters: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    logs: list[dict[str, float]]
    trainer: GRPOTrainer


_BASE = dict(
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=9,
    max_steps=5,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    optim="sgd",
    max_grad_norm=1.0,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    disable_tqdm=True,
    seed=3,
)


def run(setting: Setting, model_path: Path, out: Path, *, longstraw: bool) -> Outcome:
    """Train the model at `model_path` under `setting` with either trainer."""
    options = {**_BASE, **setting.config}
    model = setting.wrap_model(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32))
    if longstraw:
        small = dict(longstraw_chunk_size=8, longstraw_page_size=3)
        args = LongStrawGRPOConfig(str(out), **options, **{**small, **setting.longstraw})
        trainer_class = LongStrawGRPOTrainer
    else:
        args, trainer_class = GRPOConfig(str(out), **options), GRPOTrainer
    keywords = {"rollout_func": fixed_rollout(with_env_mask=setting.with_env_mask)}
    trainer = trainer_class(
        model=model,
        reward_funcs=list(setting.rewards),
        args=args,
        train_dataset=prompts_dataset(),
        processing_class=word_tokenizer(),
        **{**keywords, **setting.trainer()},
    )
    setting.prepare(trainer)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    # Stock TRL shuffles rows; to compare the same micro-batches both shuffle whole groups.
    with contextlib.nullcontext() if longstraw else whole_groups(options["num_generations"]):
        trainer.train()
    after = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    return Outcome(after, before, trainer.state.log_history, trainer)


def worst_parameter(ours: Outcome, stock: Outcome) -> tuple[float, str]:
    """Largest |difference| / |movement| over the trained parameters, in the L2 norm.

    Relative to how far stock TRL moved the parameter, not to its size: a gradient that is lost
    altogether then counts as 1 however small the learning rate.
    """
    worst = (0.0, "")
    total = sum((stock.parameters[n] - b).norm() ** 2 for n, b in stock.before.items()) ** 0.5
    for name, before in stock.before.items():
        moved = (stock.parameters[name] - before).norm()
        error = (ours.parameters[name] - stock.parameters[name]).norm()
        worst = max(worst, (float(error / max(moved, 1e-3 * total)), name))
    return worst


IGNORED_LOGS = ("runtime", "samples_per_second", "steps_per_second", "step_time", "total_flos")


def worst_metric(ours: Outcome, stock: Outcome) -> tuple[float, str]:
    """Largest relative difference over all logged numbers; a missing one counts as infinite."""
    worst = (0.0, "")
    for our_log, log in zip(ours.logs, stock.logs, strict=True):
        for key, value in log.items():
            if any(name in key for name in IGNORED_LOGS) or value is None:
                continue
            error = float("inf")
            if our_log.get(key) is not None:
                error = abs(our_log[key] - value) / max(1.0, abs(value))
            worst = max(worst, (error, key))
    return worst
