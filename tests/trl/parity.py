"""Running stock TRL and LongStraw on the same completions, and comparing what they did.

A `Setting` is one combination of options. `train` runs it with either trainer; `worst_parameter`
and `worst_metric` say how far apart two runs are. Completions come from a rollout function that
gives both trainers the same ones, so a difference is one of scoring, loss or gradient.

Knows both trainers; knows nothing of the engine.
"""

import contextlib
import logging
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from tests.models import VOCAB, tiny_model
from trl_integration import LongStrawGRPOConfig, LongStrawGRPOTrainer
from trl_integration.seams import whole_groups

logger = logging.getLogger("tests.parity")

PAD, EOS, UNK = 0, 1, 2
FIRST_WORD = 3
LONGEST_COMPLETION = 9
PROMPT_LENGTHS = (1, 7, 12, 23, 17, 30, 5, 9)
"""One token, less than a chunk (8), and more chunks than one; no two alike."""

TWO_LAYERS = {"num_hidden_layers": 2}
TOLERANCE = 1e-4
"""Of parameters and metrics; `test_parity` says why it is what it is."""

ModelPath = Callable[..., Path]
"""The fixture `model_path`."""
RolloutFunction = Callable[[list[Any], GRPOTrainer], dict[str, Any]]
RewardFunction = Callable[..., list[float | None]]

# ---------------------------------------------------------------- models


def make_model(family: str, **changes: object) -> PreTrainedModel:
    """A tiny random model of `family` with well-conditioned weights.

    Weights have variance 1 / fan-in. The sharper ones of `tests.models` suit fp64; in fp32 their
    rounding grows by 1e2 over five steps, to 1e-4 .. 1e-3 of a parameter's movement, and would hide
    mistakes of that size. With these it stays below 5e-5.
    """
    model = tiny_model(family, **changes)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                continue  # norms, biases and sinks as `tests.models` made them
            is_table = any(table in name for table in ("embed", "wte", "wpe"))
            fan_in = 1 if is_table and not is_tied else parameter.shape[-1]
            parameter.normal_(0.0, fan_in**-0.5, generator=generator)
    return model


def save_model(family: str, folder: Path, **changes: object) -> Path:
    """Write the model of `make_model` to `folder`."""
    make_model(family, **changes).save_pretrained(folder)
    return folder


def load_model(folder: Path) -> PreTrainedModel:
    """The model at `folder`, in fp32; TRL loads its reference from there as well."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # the same operators on every machine
    return model


# ---------------------------------------------------------------- data


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words `w3` ... `w96`, one token each."""
    words = {f"w{i}": i for i in range(FIRST_WORD, VOCAB)}
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNK, **words}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def prompts_dataset(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> Dataset:
    """A random prompt of each length, and its number as a column for reward functions."""
    rng = random.Random(seed)
    texts = [" ".join(f"w{rng.randrange(FIRST_WORD, VOCAB)}" for _ in range(n)) for n in lengths]
    return Dataset.from_dict({"prompt": texts, "number": list(range(len(texts)))})


def random_completion(rng: random.Random, shortest: int = 1) -> list[int]:
    """`shortest` ... 9 tokens; the longest are truncated, the others end with EOS."""
    length = rng.randint(shortest, LONGEST_COMPLETION)
    ids = [rng.randrange(FIRST_WORD, VOCAB) for _ in range(length)]
    return ids if length == LONGEST_COMPLETION else [*ids[:-1], EOS]


def fixed_rollout(
    env_mask: Callable[[random.Random, int], list[int]] | None = None, *, shortest: int = 1
) -> RolloutFunction:
    """A rollout function that gives the same completions to every trainer that asks in turn.

    Processes get different ones.

    Args:
        env_mask: from a random generator and a length, which tokens are the policy's own.
        shortest: see `random_completion`.
    """
    calls = 0

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        rng = random.Random(1000 * (1 + trainer.accelerator.process_index) + calls)
        completions = [random_completion(rng, shortest) for _ in prompts]
        out = {
            "prompt_ids": [trainer.processing_class(text)["input_ids"] for text in prompts],
            "completion_ids": completions,
            "logprobs": [[-rng.random() * 3 for _ in ids] for ids in completions],
        }
        if env_mask is not None:
            out["env_mask"] = [env_mask(rng, len(ids)) for ids in completions]
        return out

    return rollout


def modular_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A number that differs between most completions."""
    return [(sum(ids) % 7) / 3 for ids in completion_ids]


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Shorter is better; completions of 4 tokens are not scored."""
    return [None if len(ids) == 4 else -0.1 * len(ids) for ids in completion_ids]


# ---------------------------------------------------------------- one combination of options


@dataclass(frozen=True)
class Setting:
    """One combination of options, for both trainers.

    Attributes:
        family: of the model, in `tests.models`.
        variant: changes of the model's config.
        config: fields of `GRPOConfig` that differ from `BASE`.
        longstraw: `longstraw_*` fields.
        trainer: makes keyword arguments of the trainer, anew for each run.
        rollout: makes the rollout function, anew for each run; None generates.
        prepare: called with each trainer before training.
        wrap_model: called with the loaded model.
    """

    family: str = "llama"
    variant: dict[str, Any] = field(default_factory=TWO_LAYERS.copy)
    config: dict[str, Any] = field(default_factory=dict)
    longstraw: dict[str, Any] = field(default_factory=dict)
    trainer: Callable[[], dict[str, Any]] = dict
    rewards: tuple[RewardFunction | nn.Module, ...] = (modular_reward,)
    rollout: Callable[[], RolloutFunction] | None = fixed_rollout
    prepare: Callable[[GRPOTrainer], None] = lambda trainer: None
    wrap_model: Callable[[PreTrainedModel], nn.Module] = lambda model: model
    dataset: Callable[[], Any] = prompts_dataset
    tokenizer: Callable[[], PreTrainedTokenizerFast] = word_tokenizer

    def but(self, **config: Any) -> "Setting":
        """The same with other config fields."""
        return replace(self, config={**self.config, **config})


BASE: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": LONGEST_COMPLETION,
    "max_steps": 5,
    # Large enough that a step is far above the rounding of the weights it changes, and that the
    # policy ratio leaves 1 +- epsilon when completions are used twice.
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "seed": 3,
}
# Adam divides each element by its own size plus epsilon. With the usual 1e-8 a gradient element
# that is 1e-9, and so nothing but rounding, makes a full step (seen: one of 4,656 made 8.8e-4 of
# the whole difference). Elements are typically 1e-2 here, so with 1e-4 it is still Adam.
ADAMW: dict[str, Any] = {
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-4,
    "weight_decay": 0.1,
}
# Chunks and pages that cut prompts and responses alike, and each other.
_SMALL = {"longstraw_chunk_size": 8, "longstraw_page_size": 3}


@dataclass(frozen=True)
class Outcome:
    """What one training left.

    Attributes:
        before, after: parameters by name.
        logs: everything logged on the way.
        advantages: of the last generation batch, in order.
    """

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    logs: list[dict[str, float]]
    advantages: list[float]
    trainer: GRPOTrainer

    def logged(self, key: str) -> list[float]:
        """The values of `key`, in order."""
        return [log[key] for log in self.logs if key in log]


def make_trainer(setting: Setting, model_path: Path, out: Path, *, longstraw: bool) -> GRPOTrainer:
    """Either trainer, ready to train."""
    options = {**BASE, **setting.config}
    trainer_class: type[GRPOTrainer] = GRPOTrainer
    args = GRPOConfig(str(out), **options)
    if longstraw:
        trainer_class = LongStrawGRPOTrainer
        args = LongStrawGRPOConfig(str(out), **options, **{**_SMALL, **setting.longstraw})
    # After the config: under ZeRO-3 a model loaded then is sharded as it is loaded.
    torch.manual_seed(11)  # adapters are initialized before TRL sets its own seed
    model = setting.wrap_model(load_model(model_path))
    trainer = trainer_class(
        model=model,
        reward_funcs=list(setting.rewards),
        args=args,
        train_dataset=setting.dataset(),
        processing_class=setting.tokenizer(),
        **{
            **({} if setting.rollout is None else {"rollout_func": setting.rollout()}),
            **setting.trainer(),
        },
    )
    setting.prepare(trainer)
    return trainer


Shuffle = Literal["as needed", "groups", "rows"]
"""What stock TRL shuffles before it cuts micro-batches."""


@contextlib.contextmanager
def same_micro_batches(trainer: GRPOTrainer, shuffle: Shuffle) -> Iterator[None]:
    """Let stock TRL put the same rows into each micro-batch as LongStraw does.

    TRL shuffles the rows of a generation batch over its micro-batches; LongStraw shuffles whole
    groups. Which rows meet in a micro-batch changes TRL's own numbers where it averages per
    micro-batch (loss types "grpo", "bnpo" with completions of different lengths, the logged means),
    and which optimizer step they belong to. With one micro-batch per generation the order does not
    matter, and "as needed" leaves stock TRL untouched. Both shuffles draw from the random generator
    that sampling draws from; "groups" keeps the two trainers' draws alike.
    """
    is_needed = shuffle == "groups" or (
        shuffle == "as needed" and trainer.args.steps_per_generation > 1
    )
    if isinstance(trainer, LongStrawGRPOTrainer) or not is_needed:
        yield
        return
    with whole_groups(trainer.num_generations):
        yield


def train(
    setting: Setting,
    model_path: Path,
    out: Path,
    *,
    longstraw: bool,
    shuffle: Shuffle = "as needed",
    **options: Any,
) -> Outcome:
    """Train the model at `model_path` under `setting`.

    Args:
        shuffle: see `same_micro_batches`.
        options: for `Trainer.train`.
    """
    trainer = make_trainer(setting, model_path, out, longstraw=longstraw)
    before = _parameters(trainer)
    with same_micro_batches(trainer, shuffle):
        trainer.train(**options)
    advantages = list(trainer._logs["advantages"])
    return Outcome(before, _parameters(trainer), trainer.state.log_history, advantages, trainer)


def _parameters(trainer: GRPOTrainer) -> dict[str, Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---------------------------------------------------------------- comparison

Worst = tuple[float, str]
"""The largest difference and where it is."""


def worst_parameter(ours: dict[str, Tensor], stock: Outcome) -> Worst:
    """Largest |ours - stock| / |stock's movement| over parameters, in the L2 norm of each.

    Relative to how far stock TRL moved the parameter, not to its size: a gradient that is lost
    altogether then counts as 1 however small the learning rate. Parameters that moved less than
    1e-3 of the whole are held against that; frozen ones thus have to stay where they are.
    """
    assert ours.keys() == stock.after.keys(), ours.keys() ^ stock.after.keys()
    assert torch.stack([p.isfinite().all() for p in ours.values()]).all()
    moved = {name: (stock.after[name] - p).norm() for name, p in stock.before.items()}
    total = torch.stack(list(moved.values())).norm()
    assert 0 < total < math.inf, f"stock TRL moved the parameters by {total}"
    worst: Worst = (0.0, "")
    for name, after in stock.after.items():
        error = float((ours[name] - after).norm() / torch.maximum(moved[name], 1e-3 * total))
        assert math.isfinite(error), f"{name} is not finite"
        worst = max(worst, (error, name))
    return worst


_NOT_COMPARED = ("runtime", "samples_per_second", "steps_per_second", "step_time", "total_flos")
"""Logged times, and the flops that `Trainer` estimates from inputs that GRPO does not have."""


def worst_metric(ours: list[dict[str, float]], stock: list[dict[str, float]]) -> Worst:
    """Largest relative difference over all logged numbers.

    Relative to the number, or to 0.1 if it is smaller: losses are small differences of terms of
    order 1 to 10. A key that only stock TRL logs counts as infinite, and so does one that only
    LongStraw logs unless it begins with `longstraw/`.
    """
    assert len(ours) == len(stock), f"{len(ours)} logs against {len(stock)}"
    worst: Worst = (0.0, "")
    for our_log, log in zip(ours, stock, strict=True):
        for key in our_log.keys() | log.keys():
            if "longstraw/" in key or any(name in key for name in _NOT_COMPARED):
                continue
            error = math.inf
            if key in our_log and key in log:
                error = _relative(our_log[key], log[key])
            worst = max(worst, (error, key))
    return worst


def _relative(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return abs(a - b) / max(abs(b), 0.1)


def log_row(name: str, parameter: Worst, metric: Worst) -> None:
    """A row of the table of all combinations:

    `pytest tests/trl --log-cli-level=INFO --log-cli-format='%(message)s' | grep '^|'`
    """
    logger.info(f"| {name} | {parameter[0]:.1e} {parameter[1]} | {metric[0]:.1e} {metric[1]} |")


def assert_same_training(
    name: str,
    setting: Setting,
    model_path: ModelPath,
    tmp_path: Path,
    *,
    shuffle: Shuffle = "as needed",
) -> tuple[Outcome, Outcome]:
    """Train with both trainers, compare all that they did, and return (stock, ours)."""
    path = model_path(setting.family, **setting.variant)
    stock = train(setting, path, tmp_path / "stock", longstraw=False, shuffle=shuffle)
    ours = train(setting, path, tmp_path / "ours", longstraw=True)
    parameter, metric = worst_parameter(ours.after, stock), worst_metric(ours.logs, stock.logs)
    log_row(name, parameter, metric)
    assert parameter[0] <= TOLERANCE, parameter
    assert metric[0] <= TOLERANCE, metric
    assert ours.advantages == pytest.approx(stock.advantages, rel=TOLERANCE, abs=1e-6)
    return stock, ours
