"""Responses decoded from the captured prompt are those of stock TRL, and cost no prompt pass more.

One random generator serves sampling and TRL's shuffle, so the two trainers draw alike only where
stock TRL shuffles whole groups too (`shuffle="groups"`).
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

import trl_integration.trainer as trainer_module
from tests.marks import slow_but
from tests.trl.chat import CHAT_VOCAB, add, call_of, chat_dataset, chat_tokenizer
from tests.trl.parity import (
    ADAMW,
    LONGEST_COMPLETION,
    TWO_LAYERS,
    ModelPath,
    Outcome,
    Setting,
    assert_same_training,
    make_trainer,
    prompts_dataset,
    train,
)


def by_place(completions: list[Any], **_: Any) -> list[float]:
    """Rewards that differ although greedy responses do not."""
    return [(1.0, 0.3, 0.0, 0.6)[i % 4] for i in range(len(completions))]


# Under greedy decoding the policy gradient of a group cancels; the entropy bonus moves the weights.
SAMPLED = Setting(
    rollout=None, rewards=(by_place,), config={"entropy_coef": 0.5, "learning_rate": 0.3}
)
GREEDY = SAMPLED.but(generation_kwargs={"do_sample": False})


def completions(outcome: Outcome) -> list[Any]:
    """Those of the last generation batch, as logged."""
    return list(outcome.trainer._logs["completion"])


def assert_same_rollout(
    name: str, setting: Setting, model_path: ModelPath, tmp_path: Path
) -> tuple[Outcome, Outcome]:
    """As `assert_same_training`, and the same completions."""
    stock, ours = assert_same_training(name, setting, model_path, tmp_path, shuffle="groups")
    assert completions(ours) == completions(stock)
    return stock, ours


# ---------------------------------------------------------------- the same tokens

GREEDY_SETTINGS = {
    "one group": GREEDY,
    "two groups": GREEDY.but(per_device_train_batch_size=8),
    "half a group at a time": GREEDY.but(
        per_device_train_batch_size=2, gradient_accumulation_steps=2
    ),
    "adamw, beta": GREEDY.but(**ADAMW, beta=0.2),
    "repetition penalty": GREEDY.but(repetition_penalty=1.5),
    "logits processors": GREEDY.but(
        generation_kwargs={
            "do_sample": False,
            "min_new_tokens": 3,
            "no_repeat_ngram_size": 2,
            "suppress_tokens": [11, 73],
        }
    ),
    "LoRA": replace(
        GREEDY,
        trainer=lambda: {
            "peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        },
    ),
    "gradient checkpointing": GREEDY.but(gradient_checkpointing=True),
    "tied embeddings": replace(GREEDY, family="smollm2"),
    "sliding window": replace(
        GREEDY, family="mistral", variant={**TWO_LAYERS, "sliding_window": 6}
    ),
    "experts": replace(GREEDY, family="qwen3_moe").but(router_aux_loss_coef=0.5),
}


@pytest.mark.parametrize(
    "name",
    slow_but(["half a group at a time", "logits processors", "LoRA", "experts"], GREEDY_SETTINGS),
)
def test_greedy_responses_and_the_training_on_them_are_stock_trls(
    name: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """Token for token over five steps, with weights that the steps before have changed.

    Logits agree to 1e-6; the closest call between two tokens here is far wider.
    """
    _, ours = assert_same_rollout(f"greedy, {name}", GREEDY_SETTINGS[name], model_path, tmp_path)
    assert ours.trainer._shares_rollout


SAMPLED_SETTINGS = {
    "plain": SAMPLED,
    "temperature, top-k, top-p, min-p": SAMPLED.but(
        temperature=0.8, top_k=20, top_p=0.8, min_p=0.02
    ),
    "beta, num_iterations 2": SAMPLED.but(beta=0.2, num_iterations=2),
    "shorter than allowed": SAMPLED.but(generation_kwargs={"max_new_tokens": 4}),
    "prefill in chunks": SAMPLED.but(generation_kwargs={"prefill_chunk_size": 4}),
}


@pytest.mark.parametrize(
    "name",
    slow_but(["temperature, top-k, top-p, min-p"], SAMPLED_SETTINGS),
)
def test_sampled_responses_of_one_group_are_stock_trls(
    name: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """With one group per generation both trainers draw the same numbers in the same order.

    With several, TRL draws for all rows of the batch at once and LongStraw group by group.
    """
    _, ours = assert_same_rollout(f"sampled, {name}", SAMPLED_SETTINGS[name], model_path, tmp_path)
    assert ours.trainer._shares_rollout
    assert len(set(completions(ours))) > 1, "members of a group are samples, not copies"


def test_sampled_responses_reproduce_with_a_seed(model_path: ModelPath, tmp_path: Path) -> None:
    """Two groups per generation. The same seed gives the same run to the last bit, another not."""
    setting = SAMPLED.but(per_device_train_batch_size=8, max_steps=3)
    path = model_path(**TWO_LAYERS)
    first, again, other = (
        train(setting.but(seed=seed), path, tmp_path, longstraw=True) for seed in (5, 5, 6)
    )
    assert completions(first) == completions(again) != completions(other)
    assert all(bool((first.after[n] == p).all()) for n, p in again.after.items())


def test_responses_end_with_any_end_of_sequence_token(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """A model may declare several, such as an end of turn; TRL ends a completion at each."""

    def declare(model: Any) -> Any:
        model.generation_config.eos_token_id = list(range(1, 40))
        return model

    setting = replace(SAMPLED, wrap_model=declare)
    _, ours = assert_same_rollout("several ends", setting, model_path, tmp_path)
    assert min(ours.logged("completions/clipped_ratio")) == 0.0
    assert min(ours.logged("completions/mean_length")) < LONGEST_COMPLETION / 2


def test_evaluation_generates_as_stock_trl(model_path: ModelPath, tmp_path: Path) -> None:
    """Groups of another size, and nothing of them is kept for training."""
    setting = replace(
        GREEDY, trainer=lambda: {"eval_dataset": prompts_dataset((4, 19, 11), seed=9)}
    ).but(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=6, num_generations_eval=2)
    _, ours = assert_same_rollout("greedy, evaluation", setting, model_path, tmp_path)
    assert ours.trainer.engine.store.bytes_in_use == 0


# ---------------------------------------------------------------- one prompt pass


def test_one_capture_serves_rollout_score_and_replay(model_path: ModelPath, tmp_path: Path) -> None:
    """Three steps of two groups, trained in halves: six captures in all.

    No prompt of one token among them, which has no state to capture.
    """
    setting = replace(SAMPLED, dataset=lambda: prompts_dataset((7, 12, 23, 17))).but(
        max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=4
    )
    ours = train(setting, model_path(**TWO_LAYERS), tmp_path, longstraw=True)
    ledger = ours.trainer.engine.ledger
    assert ledger.num_captures == 6
    records = {record["phase"]: record for record in ledger.table()}
    assert records["capture"]["calls"] == records["prompt_backward"]["calls"] == 6
    assert records["rollout"]["calls"] == 3  # both groups of a step together
    # The rollout adds response tokens only; the prompt's are counted where they were captured.
    assert records["rollout"]["tokens"] <= 3 * 8 * LONGEST_COMPLETION


def test_a_used_up_policy_is_captured_anew(model_path: ModelPath, tmp_path: Path) -> None:
    """Rollout, old log-probs and first replay under one version; second replay under another."""
    setting = SAMPLED.but(max_steps=4, num_iterations=2)
    ours = train(setting, model_path(**TWO_LAYERS), tmp_path, longstraw=True)
    assert ours.trainer.engine.ledger.num_captures == 4


# ---------------------------------------------------------------- where TRL generates


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """What the trainer's module logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    trainer_module.logger.addHandler(handler)
    yield lines
    trainer_module.logger.removeHandler(handler)


FALLBACKS: dict[str, tuple[Setting, str]] = {
    "switched off": (
        replace(SAMPLED, longstraw={"longstraw_shared_rollout": False}),
        "longstraw_shared_rollout=False",
    ),
    "beams": (SAMPLED.but(generation_kwargs={"num_beams": 2}), "beams"),
    # Its cache would take half of the machine's memory by default, and a minute to clear.
    "continuous batching": (
        SAMPLED.but(
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config={"num_blocks": 4, "max_batch_tokens": 64},
        ),
        "use_transformers_continuous_batching=True",
    ),
    "static cache": (SAMPLED.but(cache_implementation="static"), "cache_implementation='static'"),
    "static cache by keyword": (
        SAMPLED.but(generation_kwargs={"cache_implementation": "static"}),
        "cache_implementation='static'",
    ),
    "no cache": (SAMPLED.but(generation_kwargs={"use_cache": False}), "use_cache"),
    "guidance": (SAMPLED.but(generation_kwargs={"guidance_scale": 1.5}), "guidance_scale"),
}


@pytest.mark.parametrize("name", slow_but(["switched off", "beams", "static cache"], FALLBACKS))
def test_what_cannot_decode_from_captured_state_is_left_to_trl_with_a_line(
    name: str, model_path: ModelPath, tmp_path: Path, log_lines: list[str]
) -> None:
    """The training is the same as with stock TRL's generation, because it is TRL's generation."""
    setting, reason = FALLBACKS[name]
    setting = setting.but(max_steps=2)
    _, ours = assert_same_rollout(f"fallback, {name}", setting, model_path, tmp_path)
    lines = [line for line in log_lines if "generated by TRL" in line]
    assert len(lines) == 1 and reason in lines[0], lines
    assert not ours.trainer._shares_rollout


def test_shared_rollout_says_nothing_of_a_fallback(
    model_path: ModelPath, tmp_path: Path, log_lines: list[str]
) -> None:
    make_trainer(SAMPLED, model_path(**TWO_LAYERS), tmp_path, longstraw=True)
    assert not [line for line in log_lines if "generated by TRL" in line]


# ---------------------------------------------------------------- tools


def call_tool_first(trainer: GRPOTrainer) -> None:
    """Let every row generate, then put a tool call in the place of its first turn.

    A random model does not call tools. The turn after the tool's answer is generated in earnest.
    """
    generate = trainer._generate_single_turn
    call = trainer.processing_class(call_of("add", a=1, b=2))["input_ids"]

    def turn(prompt_ids: Any, images: Any, fields: Any, num_generations: int, **kwargs: Any) -> Any:
        completions, logprobs = generate(prompt_ids, images, fields, num_generations, **kwargs)
        is_first = num_generations > 1
        return ([list(call) for _ in completions] if is_first else completions), logprobs

    trainer._generate_single_turn = turn


CONVERSATION = Setting(
    variant={**TWO_LAYERS, "vocab_size": CHAT_VOCAB},
    rollout=None,
    rewards=(by_place,),
    dataset=chat_dataset,
    tokenizer=chat_tokenizer,
    trainer=lambda: {"tools": [add]},
    prepare=call_tool_first,
    config={
        "max_completion_length": 160,
        "max_steps": 2,
        "learning_rate": 0.5,
        "entropy_coef": 0.5,
        "generation_kwargs": {"do_sample": False, "max_new_tokens": 24},
    },
)


@pytest.mark.parametrize("chunk_size", slow_but([64], [512, 64]))
def test_a_tool_loop_continues_from_the_captured_prompt(
    chunk_size: int, model_path: ModelPath, tmp_path: Path
) -> None:
    """The turn after a tool's answer reads the prompt's pages; what came since becomes a segment of
    its own, whatever its length, and the training replays whole conversations on both.

    All rows of a group make the same call, so the second segment is captured once per group as
    well. Tokens, weights and metrics are stock TRL's.
    """
    setting = replace(CONVERSATION, longstraw={"longstraw_chunk_size": chunk_size,
                                               "longstraw_page_size": 64})  # fmt: skip
    _, ours = assert_same_rollout(f"tool loop, {chunk_size}", setting, model_path, tmp_path)
    assert ours.trainer._shares_rollout
    assert ours.logged("tools/call_frequency") == [1.0, 1.0]
    assert ours.trainer.engine.ledger.num_captures == 4


def read_page(page: int) -> str:
    """
    Read a page.

    Args:
        page: Which.

    Returns:
        Its text, which is longer than the prompt.
    """
    return f"page {page}: " + "lorem ipsum dolor sit amet " * 20


class Script:
    """Members of a group call a tool in four turns; the first two are the same for all of them.

    The fifth turn, and what the policy says in the others, is generated in earnest.

    Attributes:
        contexts: what each turn was generated from, per rollout and turn.
    """

    def __init__(self) -> None:
        self.contexts: list[list[list[list[int]]]] = []

    def __call__(self, trainer: GRPOTrainer) -> None:
        generate = trainer._generate_single_turn

        def turn(prompt_ids: Any, images: Any, fields: Any, num: int, **kwargs: Any) -> Any:
            if num > 1:
                self.contexts.append([])
            self.contexts[-1].append([list(ids) for ids in prompt_ids])
            completions, logprobs = generate(prompt_ids, images, fields, num, **kwargs)
            number = len(self.contexts[-1])
            if number == 5:
                return completions, logprobs
            pages = [number if number <= 2 else 10 * number + i for i in range(len(prompt_ids))]
            texts = [call_of("read_page", page=page) for page in pages]
            return [trainer.processing_class(text)["input_ids"] for text in texts], logprobs

        trainer._generate_single_turn = _with_keyword(turn)


def _with_keyword(turn: Any) -> Any:
    """TRL gives the number of generations by place or by name."""

    def called(ids: Any, images: Any, fields: Any, num_generations: int, **kwargs: Any) -> Any:
        return turn(ids, images, fields, num_generations, **kwargs)

    return called


def test_five_turns_are_captured_once_and_train_as_stock_trl(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """Four members that share two turns, tool answers longer than the prompt and than a chunk.

    After two steps weights and metrics are stock TRL's. Captured is each new token of each
    context once, for all members that have the context.
    """
    scripts: list[Script] = []

    def prepare(trainer: GRPOTrainer) -> None:
        scripts.append(Script())
        scripts[-1](trainer)

    setting = replace(
        CONVERSATION,
        trainer=lambda: {"tools": [read_page]},
        prepare=prepare,
        longstraw={"longstraw_chunk_size": 256, "longstraw_page_size": 128},
    ).but(max_completion_length=4000, max_steps=2)
    setting = replace(setting, variant={**setting.variant, "max_position_embeddings": 8192})
    _, ours = assert_same_rollout("five turns", setting, model_path, tmp_path)
    assert ours.logged("tools/call_frequency") == [4.0] * 2
    expected = 0
    for turns in scripts[-1].contexts:
        before = [1] * len(turns[0])  # the last token of a context is run with what follows it
        for contexts in turns:
            new = {tuple(ids): len(ids) - n for ids, n in zip(contexts, before, strict=True)}
            expected += sum(new.values())
            before = [len(ids) for ids in contexts]
    captured = [r for r in ours.trainer.engine.ledger.table() if r["phase"] == "capture"]
    assert captured[0]["tokens"] == expected


class AgentRollout:
    """A loop of one's own: three turns with an answer of some environment after each.

    With `generate_turn` where there is one; both trainers decode greedily, so they say the same.

    Attributes:
        num_context_tokens: what a loop that runs each context whole would run.
    """

    def __init__(self) -> None:
        self.num_context_tokens = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        prompt_ids = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        contexts, masks = [list(ids) for ids in prompt_ids], [[] for _ in prompts]
        answer = tokenizer("\n<tool_response>" + "so it is " * 15 + "</tool_response>\n")[
            "input_ids"
        ]
        for number in range(3):
            self.num_context_tokens += sum(len(ids) for ids in contexts)
            if hasattr(trainer, "generate_turn"):
                said = trainer.generate_turn(contexts)
            else:
                said, _ = trainer._generate_single_turn(contexts, None, {}, 1)
            for i, ids in enumerate(said):
                reply = [] if number == 2 else answer[: 20 + 30 * (i % 4)]
                contexts[i] += list(ids) + reply
                masks[i] += [1] * len(ids) + [0] * len(reply)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [ids[len(p) :] for ids, p in zip(contexts, prompt_ids, strict=True)],
            "logprobs": None,
            "env_mask": masks,
        }


def test_a_rollout_func_grows_contexts_from_captured_state(
    model_path: ModelPath, tmp_path: Path
) -> None:
    rollouts: list[AgentRollout] = []

    def rollout_func() -> dict[str, Any]:
        rollouts.append(AgentRollout())
        return {"rollout_func": rollouts[-1]}

    setting = replace(
        CONVERSATION,
        trainer=rollout_func,
        prepare=lambda trainer: None,
        longstraw={"longstraw_chunk_size": 64, "longstraw_page_size": 32},
    ).but(max_completion_length=600, max_steps=3)
    _, ours = assert_same_rollout("rollout_func", setting, model_path, tmp_path)
    captured = [r for r in ours.trainer.engine.ledger.table() if r["phase"] == "capture"]
    assert captured[0]["tokens"] < rollouts[-1].num_context_tokens / 2


def test_context_tokens_have_no_ratio() -> None:
    """Old log-probs of a tool's tokens are real, new ones are not computed: exp(0 - old) would be
    infinite, and times the mask NaN."""
    old = torch.tensor([[-1.0, -95.0, -2.0]])
    batch = {"tool_mask": torch.tensor([[1, 0, 1]]), "old_per_token_logps": old, "advantages": old}
    found = trainer_module._without_context_logps(batch)
    assert found["old_per_token_logps"].tolist() == [[-1.0, 0.0, -2.0]]
    assert found["advantages"] is old
    assert trainer_module._without_context_logps({"advantages": old}) == {"advantages": old}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_iterations": 2}, marks=pytest.mark.slow),
        {"beta": 0.1, "num_iterations": 2},
    ],
    ids=str,
)
def test_tools_train_as_in_stock_trl_with_old_and_reference_log_probs(
    options: dict[str, Any], model_path: ModelPath, tmp_path: Path
) -> None:
    chunks = {"longstraw_chunk_size": 64, "longstraw_page_size": 64}
    setting = replace(CONVERSATION, longstraw=chunks).but(**options, max_steps=3)
    assert_same_rollout(f"tool loop, {options}", setting, model_path, tmp_path)
