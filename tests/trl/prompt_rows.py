"""Datasets whose prompts are given in every way, and what counts the work done on them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset, load_from_disk

from tests.trl.parity import Setting, prompts_dataset, word_tokenizer
from trl_integration import LongStrawGRPOTrainer

QUESTION = " w9 w10 w11"
"""What follows the document in a prompt."""
FORMS = ("text", "prompt_ids", "document_file", "jsonl", "disk", "stream", "json stream")


def texts() -> list[str]:
    """Eight prompts; the first one comes twice."""
    prompts = prompts_dataset((17, 7, 12, 23, 30, 5, 9))["prompt"]
    return [text + QUESTION for text in (*prompts, prompts[0])]


def text_dataset() -> Dataset:
    return Dataset.from_dict({"prompt": texts(), "number": list(range(8))})


def write_documents(folder: Path) -> list[str]:
    """Write the text of each prompt without its question; equal ones to one file."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    for text in texts():
        document = text.removesuffix(QUESTION)
        name = names.setdefault(document, f"document{len(names)}.txt")
        (folder / name).write_text(document, encoding="utf-8")
    return [names[text.removesuffix(QUESTION)] for text in texts()]


def make_dataset(form: str, folder: Path) -> Dataset | IterableDataset:
    """The prompts of `texts` in one of `FORMS`; what is no ids or text refers to files."""
    if form == "text":
        return text_dataset()
    if form == "prompt_ids":
        ids = word_tokenizer()(texts())["input_ids"]
        return Dataset.from_dict({"prompt_ids": ids, "number": list(range(8))})
    rows = Dataset.from_dict(
        {
            "prompt": ["{document}" + QUESTION] * 8,
            "document_file": write_documents(folder),
            "number": list(range(8)),
        }
    )
    if form == "document_file":
        return rows
    if form == "stream":
        return rows.to_iterable_dataset()
    if form == "disk":
        rows.save_to_disk(folder / "disk")
        return load_from_disk(folder / "disk")
    file = str(folder / "rows.jsonl")
    rows.to_json(file)
    cache = str(folder / "cache")
    is_stream = form == "json stream"
    return load_dataset(
        "json", data_files=file, split="train", streaming=is_stream, cache_dir=cache
    )


class CountingTokenizer:
    """A tokenizer that counts the texts and conversations it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.num_prompts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: Sequence[str], **kwargs: Any) -> Any:
        self.num_prompts += len(text)
        return self.tokenizer(text, **kwargs)

    def apply_chat_template(self, conversation: Sequence[Any], **kwargs: Any) -> Any:
        self.num_prompts += len(conversation)
        return self.tokenizer.apply_chat_template(conversation, **kwargs)


def count_tokenized(trainer: LongStrawGRPOTrainer) -> CountingTokenizer:
    """Let a counting tokenizer stand in for the trainer's."""
    counting = CountingTokenizer(trainer.processing_class)
    trainer.processing_class = counting
    return counting


def prompts_seen(seen: list[Any]) -> Callable[..., list[float]]:
    """A reward function that keeps the prompts it is given."""

    def keep(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        seen.append(prompts)
        return [float(i % 4) for i in range(len(completions))]

    return keep


def by_place(completions: list[Any], **_: Any) -> list[float | None]:
    """Rewards that differ although greedy responses do not."""
    return [(1.0, 0.3, 0.0, 0.6)[i % 4] for i in range(len(completions))]


# Under greedy decoding the policy gradient of a group cancels; the entropy bonus moves the weights.
GREEDY = Setting(rollout=None, rewards=(by_place,)).but(
    entropy_coef=0.5,
    learning_rate=0.3,
    per_device_train_batch_size=8,
    max_steps=3,
    generation_kwargs={"do_sample": False},
)
