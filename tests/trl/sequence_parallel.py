"""What each rank of `test_sequence_parallel` runs:
`python -m tests.trl.sequence_parallel PART MODEL CHAT_MODEL FOLDER`.

A part trains its settings one after the other in one process group, and writes what this rank ended
with to `FOLDER/NAME-RANK.pt`.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOTrainer

from longstraw import LongStrawError
from tests.trl.ingredients import as_stream, lora, tiny_reward_model
from tests.trl.parity import (
    TWO_LAYERS,
    RolloutFunction,
    Setting,
    make_trainer,
    modular_reward,
    prompts_dataset,
    random_completion,
    train,
    word_tokenizer,
)
from tests.trl.resuming import ACCUMULATED, resumed, uninterrupted
from tests.trl.test_rollout import CONVERSATION, SAMPLED, Script, by_place, read_page
from trl_integration import LongStrawGRPOConfig

VARIANT = TWO_LAYERS
CHAT_VARIANT = {**CONVERSATION.variant, "max_position_embeddings": 8192}
RESUMED = 3
"""The step that a run is resumed from: in the middle of a generation's use."""


def completions_of_prompts(*, masked: bool = False) -> RolloutFunction:
    """Completions that depend on the prompt and the place in its group alone.

    One process that has the rows of two groups gets the same ones as two that have one each.
    """

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        seen: Counter[str] = Counter()
        completions, masks = [], []
        for text in prompts:
            seen[text] += 1
            rng = random.Random(f"{seen[text]} {text}")
            completions.append(random_completion(rng))
            masks.append([1, *(int(rng.random() < 0.6) for _ in completions[-1][1:])])
        out = {
            "prompt_ids": [trainer.processing_class(text)["input_ids"] for text in prompts],
            "completion_ids": completions,
            "logprobs": None,
        }
        return {**out, "env_mask": masks} if masked else out

    return rollout


@dataclass(frozen=True)
class Shared:
    """A setting in which ranks share prompts.

    Attributes:
        sp_size: how many.
        setting: of this run.
        one_process: fields of the config with which one process of stock TRL does the same.
    """

    sp_size: int
    setting: Setting
    one_process: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> Setting:
        options = {"longstraw_sp_size": self.sp_size, **self.setting.longstraw}
        return replace(self.setting, longstraw=options)

    @property
    def stock(self) -> Setting:
        return self.setting.but(**self.one_process)


_BASE = Setting(rollout=completions_of_prompts).but(max_steps=3)
_TWICE = {"per_device_train_batch_size": 8}
_WITH_EVALUATION = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}


def _evaluated() -> dict[str, Any]:
    """As many prompts as a batch of all groups has rows: of a last batch that is not full
    transformers counts the first losses alone, which are one process's."""
    return {"eval_dataset": prompts_dataset((4, 19, 1, 11, 8, 3, 14, 6), seed=9)}


def zero_config(stage: int) -> dict[str, Any]:
    """A DeepSpeed config that leaves to the trainer what it knows."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        **dict.fromkeys((*auto, "gradient_clipping"), "auto"),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


PARITY = {
    "two": {
        "dapo": Shared(2, _BASE),
        "dapo, ZeRO-2, accumulation 2": Shared(
            2,
            _BASE.but(gradient_accumulation_steps=2, deepspeed=zero_config(2)),
            {"deepspeed": None},
        ),
        "reward model, evaluation": Shared(
            2,
            replace(
                _BASE,
                rewards=(tiny_reward_model(), modular_reward),
                trainer=lambda: {
                    **_evaluated(),
                    "reward_processing_classes": [word_tokenizer(), None],
                },
            ).but(**_WITH_EVALUATION),
        ),
    },
    "four": {
        "grpo, LoRA, beta, half groups": Shared(
            4,
            replace(_BASE, trainer=lora()).but(
                loss_type="grpo",
                beta=0.2,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
            ),
        ),
        "bnpo, two groups, two iterations": Shared(
            4,
            _BASE.but(loss_type="bnpo", per_device_train_batch_size=8, num_iterations=2),
        ),
        "dr_grpo, reference model, zigzag": Shared(
            4,
            replace(_BASE, longstraw={"longstraw_sp_layout": "zigzag"}).but(
                loss_type="dr_grpo", beta=0.2
            ),
        ),
        "cispo, masked tokens, entropy bonus": Shared(
            4,
            replace(_BASE, rollout=lambda: completions_of_prompts(masked=True)).but(
                loss_type="cispo", entropy_coef=0.3
            ),
        ),
        "two groups of two, dapo": Shared(2, _BASE, _TWICE),
        "two groups of two, grpo, LoRA, beta, evaluation": Shared(
            2,
            replace(_BASE, trainer=lambda: {**lora()(), **_evaluated()}).but(
                loss_type="grpo", beta=0.2, **_WITH_EVALUATION
            ),
            {**_TWICE, "per_device_eval_batch_size": 8},
        ),
        # The quantile is taken over the entropies of all groups, padded to one length.
        "two groups of two, top_entropy_quantile, a stream": Shared(
            2, replace(_BASE, dataset=as_stream).but(top_entropy_quantile=0.5), _TWICE
        ),
    },
}


# ---------------------------------------------------------------- what happens once per group

_DICE = random.SystemRandom()  # no seed makes two ranks draw alike


def note(file: Path) -> None:
    """Write down that this rank was called."""
    with file.open("a") as lines:
        lines.write(f"{torch.distributed.get_rank()}\n")


def random_setting(folder: Path) -> Setting:
    """Rows, completions and rewards that no two calls have in common; calls are written down."""

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        note(folder / "rollouts")
        rng = random.Random(_DICE.random())
        torch.rand(())  # the shuffle of groups draws from the same generator
        return {
            "prompt_ids": [trainer.processing_class(text)["input_ids"] for text in prompts],
            "completion_ids": [random_completion(rng) for _ in prompts],
            "logprobs": None,
            "difficulty": [_DICE.random() for _ in prompts],
            "unsendable": (lambda: None),
        }

    def reward(completion_ids: Any, difficulty: list[float], **kwargs: Any) -> list[float | None]:
        note(folder / "rewards")
        kwargs["log_metric"]("luck", _DICE.random())
        kwargs["log_extra"]("difficulty", difficulty)
        return [random.random() + float(torch.rand(())) + d for d in difficulty]

    async def async_reward(completions: list[Any], **_: Any) -> list[float | None]:
        note(folder / "async rewards")
        return [None if _DICE.random() < 0.3 else _DICE.random() for _ in completions]

    def with_a_random_word(rows: dict[str, list[str]]) -> dict[str, list[str]]:
        words = [f" w{_DICE.randrange(3, 97)}" for _ in rows["prompt"]]
        return {"prompt": [text + word for text, word in zip(rows["prompt"], words, strict=True)]}

    def rows() -> Dataset:
        return prompts_dataset().with_transform(with_a_random_word)

    return Setting(rewards=(reward, async_reward), rollout=lambda: rollout, dataset=rows).but(
        max_steps=3,
        steps_per_generation=4,  # four groups, which can be shuffled in 24 ways
        gradient_accumulation_steps=1,
        remove_unused_columns=False,
        log_completions=True,
    )


def five_turns(scripts: list[Script]) -> Setting:
    """A conversation with four calls of a tool and answers longer than a chunk."""

    def prepare(trainer: GRPOTrainer) -> None:
        scripts.append(Script())
        scripts[-1](trainer)

    return replace(
        CONVERSATION,
        trainer=lambda: {"tools": [read_page]},
        prepare=prepare,
        variant=CHAT_VARIANT,
        longstraw={"longstraw_chunk_size": 256, "longstraw_page_size": 64},
    ).but(max_completion_length=4000, max_steps=2)


def own_loop() -> RolloutFunction:
    """A rollout of one's own that samples two turns with a word between."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = [trainer.processing_class(text)["input_ids"] for text in prompts]
        first = trainer.generate_turn(prompt_ids)
        contexts = [[*p, *ids, 40] for p, ids in zip(prompt_ids, first, strict=True)]
        second = trainer.generate_turn(contexts)
        pairs = list(zip(first, second, strict=True))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [[*a, 40, *b] for a, b in pairs],
            "logprobs": None,
            "env_mask": [[1] * len(a) + [0] + [1] * len(b) for a, b in pairs],
        }

    return rollout


# Compared with one process of LongStraw under the same seed.
GENERATED: dict[str, Callable[[], Setting]] = {
    "sampled": lambda: SAMPLED.but(max_steps=3, per_device_train_batch_size=8),
    "five turns with tools": lambda: five_turns([]),
    "a loop of one's own": lambda: replace(SAMPLED, rollout=own_loop, rewards=(by_place,)).but(
        max_steps=2
    ),
}


# ---------------------------------------------------------------- what fails

_CALLS = Counter[str]()


def failing_rollout() -> RolloutFunction:
    rollout = completions_of_prompts()

    def fails_second(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        _CALLS["rollout"] += 1
        if _CALLS["rollout"] == 2:
            raise KeyError("the environment is gone")
        return rollout(prompts, trainer)

    return fails_second


def failing_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    _CALLS["reward"] += 1
    if _CALLS["reward"] == 2:
        raise KeyError("the judge is gone")
    return modular_reward(completion_ids)


def bad_prompt() -> Dataset:
    return Dataset.from_dict({"prompt": ["w5", ""]})


FAILURES = {
    "rollout": Shared(2, replace(_BASE, rollout=failing_rollout)),
    "reward": Shared(2, replace(_BASE, rewards=(failing_reward,))),
    "empty prompt": Shared(2, replace(_BASE, rollout=None, dataset=bad_prompt)),
    "three ranks": Shared(3, _BASE),
    "switched off": Shared(
        2, replace(_BASE, rollout=None, longstraw={"longstraw_shared_rollout": False})
    ),
    "beams": Shared(2, replace(_BASE, rollout=None).but(generation_kwargs={"num_beams": 2})),
}


def error_of(shared: Shared, model_path: Path, out: Path) -> str:
    """Type and text of what a training raises."""
    try:
        train(shared.ours, model_path, out, longstraw=True)
    except (LongStrawError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---------------------------------------------------------------- the parts


def record_of(setting: Setting, model_path: Path, out: Path) -> dict[str, Any]:
    """What a training under `setting` left on this rank."""
    outcome = train(setting, model_path, out, longstraw=True)
    return {
        "after": outcome.after,
        "logs": outcome.logs,
        "advantages": outcome.advantages,
        "state_bytes": outcome.trainer.engine.ledger.state_bytes,
        "completions": list(outcome.trainer._logs["completion"]),
        "extra": {key: list(column) for key, column in outcome.trainer._logs["extra"].items()},
    }


def counts_of(model_path: Path, out: Path) -> dict[str, Any]:
    """How a trainer under sequence parallelism counts."""
    setting = Shared(2, _BASE.but(gradient_accumulation_steps=2)).ours
    trainer = make_trainer(setting, model_path, out, longstraw=True)
    args: LongStrawGRPOConfig = trainer.args
    return {
        "seed": torch.initial_seed(),
        "world_size": args.world_size,
        "generation_batch_size": args.generation_batch_size,
        "total": trainer.get_total_train_batch_size(args),
        "processes": trainer.accelerator.num_processes,
        "index": trainer.accelerator.process_index,
        "is_main": trainer.accelerator.is_main_process,
        "is_last": trainer.accelerator.is_last_process,
        "batches": len(trainer.get_train_dataloader()),
        "rows": [row["number"] for row in next(iter(trainer.get_train_dataloader()))],
        "gathered": trainer.accelerator.gather(torch.tensor(float(args.process_index))),
        "mean": trainer.accelerator.reduce(torch.tensor(float(args.process_index)), "mean"),
        "objects": trainer.accelerator.gather_object([args.process_index]),
        "padded": trainer.accelerator.pad_across_processes(torch.ones(1 + args.process_index // 2)),
    }


def run(part: str, model_path: Path, chat_path: Path, folder: Path) -> None:
    """All of one part."""
    rank = torch.distributed.get_rank()

    def write(name: str, record: Any) -> None:
        torch.save(record, folder / f"{name}-{rank}.pt")

    for name, shared in PARITY[part].items():
        write(name, record_of(shared.ours, model_path, folder / "out"))
    shared = Shared(2, random_setting(folder))
    write("random", record_of(shared.ours, model_path, folder / "random"))
    if part == "four":
        write("counts", counts_of(model_path, folder / "out"))
        return
    for name, make in GENERATED.items():
        path = chat_path if "tools" in name else model_path
        write(name, record_of(Shared(2, make()).ours, path, folder / "out"))
    setting = Shared(2, ACCUMULATED).ours
    whole = uninterrupted(setting, model_path, folder / "run")
    again = resumed(setting, model_path, folder / "run" / f"checkpoint-{RESUMED}")
    earlier = tuple(f"step {logged} " for logged in range(1, RESUMED + 1))
    write("resumed", [d for d in whole.differences(again) if not d.startswith(earlier)])
    for name, shared in FAILURES.items():
        write(f"error {name}", error_of(shared, model_path, folder / "out"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    run(sys.argv[1], *map(Path, sys.argv[2:]))
    torch.distributed.destroy_process_group()
