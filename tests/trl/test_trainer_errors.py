"""Bad input raises where it enters, and the message names the way out.

Each test gives what a user could give by mistake and asserts on the words that lead out of it.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    ProcessorMixin,
    TrainingArguments,
)
from trl import GRPOConfig

from longstraw import ConfigError, DataError, LongStrawError, MemoryPlanError, UnsupportedModelError
from tests.models import VOCAB
from tests.trl.parity import (
    BASE,
    TWO_LAYERS,
    ModelPath,
    Setting,
    load_model,
    make_trainer,
    modular_reward,
    prompts_dataset,
    word_tokenizer,
)
from trl_integration import LongStrawGRPOConfig, LongStrawGRPOTrainer


def config(tmp_path: Path, **options: Any) -> LongStrawGRPOConfig:
    return LongStrawGRPOConfig(str(tmp_path), **{**BASE, **options})


def ours(setting: Setting, model_path: ModelPath, tmp_path: Path) -> LongStrawGRPOTrainer:
    """Our trainer under `setting`, with generation by transformers."""
    path = model_path(setting.family, **setting.variant)
    return make_trainer(setting, path, tmp_path, longstraw=True)


def assert_tells(error: pytest.ExceptionInfo[LongStrawError], *words: str) -> None:
    """All of `words`, in any order."""
    message = str(error.value)
    missing = [word for word in words if not re.search(word, message)]
    assert not missing, f"{missing} not in: {message}"


# ---------------------------------------------------------------- prompts


def test_an_empty_prompt_is_refused(model_path: ModelPath, tmp_path: Path) -> None:
    """There would be no token whose output scores the first response token."""
    dataset = Dataset.from_dict({"prompt": ["w5 w6", "", "w7"]})
    setting = Setting(rollout=None, dataset=lambda: dataset, config={"shuffle_dataset": False})
    trainer = ours(setting.but(per_device_train_batch_size=8), model_path, tmp_path)
    with pytest.raises(DataError) as error:
        trainer.train()
    assert_tells(error, "prompt", "no tokens", r"dataset\.filter")


def test_an_empty_prompt_of_a_rollout_function_is_refused(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """It does not pass the trainer's own tokenization."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        n = len(prompts)
        return {"prompt_ids": [[]] * n, "completion_ids": [[5, 1]] * n, "logprobs": None}

    trainer = ours(Setting(rollout=lambda: rollout), model_path, tmp_path)
    with pytest.raises(DataError) as error:
        trainer.train()
    assert_tells(error, "prompt", "at least one token", "Remove the empty prompt|BOS")


SHORT = {**TWO_LAYERS, "max_position_embeddings": 32}
LONG_PROMPT = Setting(variant=SHORT, rollout=None, dataset=lambda: prompts_dataset((28,)))


def test_a_prompt_beyond_the_models_positions_is_refused_before_it_runs(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """28 + 9 tokens on 32 positions. The response counts too: it would be cut while generating."""
    trainer = ours(LONG_PROMPT, model_path, tmp_path)
    with pytest.raises(DataError) as error:
        trainer.train()
    assert_tells(
        error,
        "37",
        "max_position_embeddings=32",
        "longstraw_allow_extrapolation",
        "Shorten",
        "rope",
        "[Nn]othing was truncated",
    )
    assert trainer.engine.ledger.num_captures == 0


def test_positions_are_exceeded_knowingly(model_path: ModelPath, tmp_path: Path) -> None:
    """Rotary positions go on; TRL runs such prompts without a word."""
    setting = Setting(
        variant=SHORT,
        rollout=None,
        dataset=lambda: prompts_dataset((28,)),
        config={"max_steps": 1},
        longstraw={"longstraw_allow_extrapolation": True},
    )
    trainer = ours(setting, model_path, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("which", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_dataset_without_prompts_is_refused(
    which: str, kind: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """The likeliest mistake: a column of another name, which the message repeats."""
    bad: Dataset | IterableDataset = Dataset.from_dict({"question": ["w5"], "answer": ["w6"]})
    if kind == "stream":
        bad = bad.to_iterable_dataset()
    datasets = {"train_dataset": prompts_dataset(), which: bad}
    with pytest.raises(DataError) as error:
        LongStrawGRPOTrainer(
            model=load_model(model_path(**TWO_LAYERS)),
            reward_funcs=modular_reward,
            args=config(tmp_path),
            processing_class=word_tokenizer(),
            **datasets,
        )
    assert_tells(error, which, "question", "answer", "'prompt'", "rename_column")


# ---------------------------------------------------------------- rewards


def short_by_one(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


def not_a_list(completions: list[str], **_: Any) -> float:
    return 1.0


def a_scalar_tensor(completions: list[str], **_: Any) -> torch.Tensor:
    return torch.tensor(1.0)


def nothing(completions: list[str], **_: Any) -> None:
    return None


def text(completions: list[str], **_: Any) -> list[str]:
    return ["good"] * len(completions)


def lists(completions: list[str], **_: Any) -> list[list[float]]:
    return [[1.0, 2.0]] * len(completions)


def not_a_number(completions: list[str], **_: Any) -> list[float]:
    return [0.5, float("nan"), 0.5, 0.5][: len(completions)]


def infinite(completions: list[str], **_: Any) -> list[float]:
    return [0.5, float("inf"), 0.5, 0.5][: len(completions)]


async def short_by_one_later(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


class RewardObject:
    """A callable object, which has no `__name__` of its own."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [1.0]


BAD_REWARDS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "too few": (short_by_one, ("'short_by_one'", "3 rewards", "4 completions", "one number")),
    "too few, async": (short_by_one_later, ("'short_by_one_later'", "3 rewards", "4 completions")),
    "too few, from an object": (RewardObject(), ("RewardObject", "1 rewards", "4 completions")),
    "a number": (not_a_list, ("'not_a_list'", "float", "list")),
    "a scalar tensor": (a_scalar_tensor, ("'a_scalar_tensor'", "Tensor", "list")),
    "None": (nothing, ("'nothing'", "NoneType", "list")),
    "texts": (text, ("'text'", "'good'", "number")),
    "a list per completion": (lists, ("'lists'", "list", "number")),
    "NaN": (not_a_number, ("'not_a_number'", "[Nn]a[Nn]", "completion 1", "None")),
    "infinity": (infinite, ("'infinite'", "inf", "completion 1")),
}


@pytest.mark.parametrize("name", BAD_REWARDS)
def test_what_is_no_reward_per_completion_is_refused(
    name: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """A NaN or an infinity would spread through its group's baseline into all weights."""
    function, words = BAD_REWARDS[name]
    trainer = ours(Setting(rewards=(function,)), model_path, tmp_path)
    with pytest.raises(DataError) as error:
        trainer.train()
    assert_tells(error, *words)


# ---------------------------------------------------------------- options


BAD_OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "prompt gradient": (
        {"longstraw_prompt_gradient": "exakt"},
        ("prompt_gradient='exakt'", "Did you mean 'exact'"),
    ),
    "page device": ({"longstraw_page_device": "cpu"}, ("page_device='cpu'", "model, host")),
    "attention": (
        {"longstraw_attention": "flash"},
        ("attention='flash'", "Did you mean 'flash_attn'"),
    ),
    "ties of index scores": (
        {"longstraw_index_ties": "frist"},
        ("longstraw_index_ties='frist'", "Did you mean 'first'"),
    ),
    "chunk size": ({"longstraw_chunk_size": 0}, ("chunk_size=0", "at least 1")),
    "page size": ({"longstraw_page_size": -4}, ("page_size=-4", "at least 1")),
    "replay batch": ({"longstraw_replay_batch": 1.5}, ("replay_batch=1.5", "whole number")),
    "budget": ({"longstraw_state_budget_gib": 0.0}, ("longstraw_state_budget_gib", "None")),
    "temperature": ({"temperature": 0.0}, ("temperature=0.0", "positive")),
    "fp16": ({"fp16": True}, ("fp16=True", "bf16")),
    "torch_compile": ({"torch_compile": True}, ("torch_compile=True", "off")),
    "liger": ({"use_liger_kernel": True}, ("use_liger_kernel=True", "off")),
    "neftune": ({"neftune_noise_alpha": 5.0}, ("neftune_noise_alpha", "Leave it out")),
    "re-entrant checkpointing": (
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
        ("use_reentrant", "False"),
    ),
    "an optimizer that steps in backward": ({"optim": "adalomo"}, ("adalomo", "adamw_torch")),
    "fsdp": ({"fsdp": "full_shard"}, ("fsdp", "zero3.yaml")),
    "deepspeed without a launcher": (
        {"deepspeed": {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}},
        ("deepspeed", "accelerate launch"),
    ),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_an_option_that_cannot_be_honoured_is_refused_at_construction(
    name: str, tmp_path: Path
) -> None:
    """Of the config, before a model is loaded."""
    options, words = BAD_OPTIONS[name]
    with pytest.raises(ConfigError) as error:
        config(tmp_path, **options)
    assert_tells(error, *words)


def test_a_group_split_over_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL allows it, since it gathers rewards; each process would have to capture the prompt."""
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 2))
    with pytest.raises(ConfigError) as error:
        config(tmp_path, per_device_train_batch_size=2, num_generations=4)
    assert_tells(
        error,
        "per_device_train_batch_size",
        "num_generations=4",
        "split over processes",
        "gradient_accumulation_steps=4",
    )
    config(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4)  # the way out


def test_an_unknown_option_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="longstraw_chunksize"):
        config(tmp_path, longstraw_chunksize=8)


def test_trls_own_config_is_refused(model_path: ModelPath, tmp_path: Path) -> None:
    """It has no longstraw_* fields, and did not pass the checks above."""
    with pytest.raises(ConfigError) as error:
        LongStrawGRPOTrainer(
            model=load_model(model_path(**TWO_LAYERS)),
            reward_funcs=modular_reward,
            args=GRPOConfig(str(tmp_path), **BASE),
            train_dataset=prompts_dataset(),
            processing_class=word_tokenizer(),
        )
    assert_tells(error, "GRPOConfig", "LongStrawGRPOConfig", "same fields")


# ---------------------------------------------------------------- models and adapters


def refused(
    kind: type[LongStrawError],
    model: PreTrainedModel,
    tmp_path: Path,
    *,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> pytest.ExceptionInfo[LongStrawError]:
    """The error with which a trainer around `model` is refused."""
    keywords = {"processing_class": word_tokenizer(), **(trainer or {})}
    with pytest.raises(kind) as error:
        LongStrawGRPOTrainer(
            model=model,
            reward_funcs=modular_reward,
            args=config(tmp_path, **options),
            train_dataset=prompts_dataset(),
            **keywords,
        )
    return error


def test_dropout_in_the_model_is_refused(tmp_path: Path) -> None:
    """A replay would draw another mask than the capture. TRL draws one per pass as well."""
    gpt2 = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.1)
    model = AutoModelForCausalLM.from_config(gpt2)
    error = refused(ConfigError, model, tmp_path)
    assert_tells(error, r"dropout 0\.1", "replay", "disable_dropout=True")


def test_dropout_is_switched_off_by_trls_option(model_path: ModelPath, tmp_path: Path) -> None:
    """What the refusals of dropout advise."""
    setting = Setting(
        trainer=lambda: {"peft_config": LoraConfig(r=2, lora_dropout=0.1)},
        config={"disable_dropout": True},
    )
    ours(setting, model_path, tmp_path)


def test_dropout_in_the_adapter_is_refused(model_path: ModelPath, tmp_path: Path) -> None:
    adapter = {"peft_config": LoraConfig(r=2, lora_dropout=0.1)}
    error = refused(ConfigError, load_model(model_path()), tmp_path, trainer=adapter)
    assert_tells(error, r"lora_dropout.* has dropout 0\.1", "adapter", "disable_dropout=True")


@pytest.mark.parametrize("disable_dropout", [False, True])
def test_dropout_of_attention_is_refused(
    disable_dropout: bool, model_path: ModelPath, tmp_path: Path
) -> None:
    """TRL's disable_dropout does not reach it: it is a number and no module."""
    model = load_model(model_path(**TWO_LAYERS, attention_dropout=0.1))
    error = refused(ConfigError, model, tmp_path, disable_dropout=disable_dropout)
    assert_tells(error, r"attention_dropout 0\.1", "replay", r"attention_dropout=0\.0")


def test_rope_that_depends_on_the_length_is_refused(model_path: ModelPath, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = load_model(model_path(**TWO_LAYERS, rope_parameters=rope))
    error = refused(UnsupportedModelError, model, tmp_path)
    assert_tells(error, "dynamic", "length", "yarn", "linear")


@pytest.mark.parametrize(
    "model",
    [
        BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)),
        MambaForCausalLM(
            MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
        ),
    ],
    ids=["bloom", "mamba"],
)
def test_a_family_that_is_not_served_is_refused_by_name(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """Bloom's positions and Mamba's state are not what pages hold; both would be silently wrong."""
    name = model.config.model_type
    error = refused(UnsupportedModelError, model, tmp_path)
    assert_tells(error, f"model_type='{name}'", "llama", "qwen3", "GRPOTrainer")


@pytest.mark.parametrize(
    "adapter",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=["prompt tuning", "prefix tuning"],
)
def test_prompt_learning_is_refused(adapter: Any, model_path: ModelPath, tmp_path: Path) -> None:
    model = load_model(model_path(**TWO_LAYERS))
    error = refused(ConfigError, model, tmp_path, trainer={"peft_config": adapter})
    assert_tells(error, type(adapter).__name__, "LoRA")


class TinyProcessor(ProcessorMixin):
    """A multimodal processor, as far as TRL looks at it."""

    def __init__(self) -> None:
        self.tokenizer = word_tokenizer()
        self.chat_template = None


def test_a_multimodal_processor_is_refused(model_path: ModelPath, tmp_path: Path) -> None:
    """Images have no place in a prompt's token ids."""
    model = load_model(model_path(**TWO_LAYERS))
    error = refused(ConfigError, model, tmp_path, trainer={"processing_class": TinyProcessor()})
    assert_tells(error, "images", r"processor\.tokenizer", "GRPOTrainer")


def test_gradient_checkpointing_that_drops_the_cache_is_refused(tmp_path: Path) -> None:
    """At construction, before a prompt has been captured in vain."""
    gpt2 = GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(gpt2)
    error = refused(ConfigError, model, tmp_path, gradient_checkpointing=True)
    assert_tells(error, "gpt2", "gradient_checkpointing=False")


def test_a_state_that_exceeds_its_budget_is_refused_before_the_update(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """30 tokens of 1 KiB on a budget of 8 KiB."""
    setting = Setting(
        dataset=lambda: prompts_dataset((30,)),
        longstraw={"longstraw_state_budget_gib": 8 / 2**20},
    )
    trainer = ours(setting, model_path, tmp_path)
    with pytest.raises(MemoryPlanError) as error:
        trainer.train()
    assert_tells(error, "8,192", "longstraw_state_budget_gib|state_budget", "host", "stopped")
