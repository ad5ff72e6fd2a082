"""Questions about a fact hidden in real documents, and a reward that a program can check.

A prompt is a run of the Python language reference, which ships with Python (`pydoc_data.topics`);
nothing is downloaded. In it stands one inserted sentence, "The special magic number is 4821.", and
at its end a question about that sentence:

    dataset = make_dataset(tokenizer, num_prompts=20, prompt_tokens=2048, seed=0)
    trainer = LongStrawGRPOTrainer(..., train_dataset=dataset, reward_funcs=short_and_right)

`prompt_tokens` may be any length the model takes: the documents start over when they are used up.
"""

import random
from itertools import count
from pydoc_data.topics import topics

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]

FACT = "The special magic number is {code}."
QUESTION = "What is the special magic number? Answer with the number only."

MARGIN = 64
"""A rendered prompt has at least `prompt_tokens` and fewer than `prompt_tokens + MARGIN` tokens."""


def make_dataset(
    tokenizer: PreTrainedTokenizerBase, num_prompts: int, prompt_tokens: int = 2048, seed: int = 0
) -> Dataset:
    """Build prompts that hide a four-digit code in real text.

    The same arguments on the same Python version give the same rows.

    Args:
        tokenizer: has a chat template; it decides what a token is.
        num_prompts: rows to make.
        prompt_tokens: least length of each prompt in tokens, chat template included.
        seed: of the codes, the passages and the places of the fact.

    Returns:
        Columns `prompt` (one user message, TRL's conversational format), `answer` (the code) and
        `num_tokens` (the rendered prompt's length, below `prompt_tokens + MARGIN`).
    """
    rng = random.Random(seed)
    documents = Documents(tokenizer)
    rows = [make_row(documents, tokenizer, prompt_tokens, rng) for _ in range(num_prompts)]
    return Dataset.from_list(rows)


class Documents:
    """The Python language reference as lines with their lengths in tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        text = "\n\n".join(topics[title].strip() for title in sorted(topics)) + "\n\n"
        self.lines = text.splitlines(keepends=True)
        self.num_tokens = [len(ids) for ids in tokenizer(self.lines)["input_ids"]]

    def read(self, start: int, num_tokens: int) -> list[str]:
        """Take lines from line `start` on, the last one being that which reaches `num_tokens`."""
        taken: list[str] = []
        for line in count(start):
            if num_tokens <= 0:
                return taken
            taken.append(self.lines[line % len(self.lines)])
            num_tokens -= self.num_tokens[line % len(self.lines)]
        raise AssertionError("count() does not end")


def make_row(
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    rng: random.Random,
) -> dict[str, Messages | str | int]:
    """Hide one fact at a random depth of a random passage that fills the prompt to its length.

    Raises:
        ValueError: `prompt_tokens` is too small to hold the fact and the question.
    """
    code = str(rng.randint(1000, 9999))
    start, depth = rng.randrange(len(documents.lines)), rng.random()
    budget = prompt_tokens
    for _ in range(20):
        lines = insert(FACT.format(code=code), documents.read(start, budget), depth)
        content = "".join(lines).strip() + "\n\n" + QUESTION
        prompt = [{"role": "user", "content": content}]
        num_tokens = count_tokens(tokenizer, prompt)
        if prompt_tokens <= num_tokens < prompt_tokens + MARGIN:
            return {"prompt": prompt, "answer": code, "num_tokens": num_tokens}
        # the sum over lines is not the length of their join, and the template comes on top
        budget += prompt_tokens - num_tokens
    raise ValueError(
        f"could not make a prompt of {prompt_tokens} tokens, the last try had {num_tokens}.\n"
        f"  Needed: at least {prompt_tokens} and fewer than {prompt_tokens + MARGIN}, with the "
        f"chat template, the fact and the question.\n  Raise prompt_tokens."
    )


def insert(fact: str, lines: list[str], depth: float) -> list[str]:
    """Put the fact between two paragraphs; `depth` 0 is before the first line, 1 after the last."""
    gaps = [0, *(i + 1 for i, line in enumerate(lines) if not line.strip()), len(lines)]
    gap = gaps[min(int(depth * len(gaps)), len(gaps) - 1)]
    return [*lines[:gap], f"\n{fact}\n\n", *lines[gap:]]


def count_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Messages) -> int:
    """Length of the prompt as the model sees it, up to where the reply starts."""
    rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def short_and_right(
    completions: list[Messages], answer: list[str], **kwargs: object
) -> list[float]:
    """Reward a right reply, and among right ones the shorter.

        reward = 0.5 + 0.5 * max(0, 1 - extra / 50)   the code is in the reply, with `extra` other
                                                      characters; 1 for exactly the code
                 0                                    it is not

    The slope is what makes it learnable to the end: a model that nearly always answers in one
    sentence learns nothing from a reward that is 1 for the bare code and a constant for the rest,
    since no sample of a group is better than another.
    """
    replies = [completion[-1]["content"].strip() for completion in completions]
    return [score(reply, code) for reply, code in zip(replies, answer, strict=True)]


def has_code(completions: list[Messages], answer: list[str], **kwargs: object) -> list[float]:
    """Reward 1 for a reply that contains the code, 0 for another."""
    replies = [completion[-1]["content"] for completion in completions]
    return [float(code in reply) for reply, code in zip(replies, answer, strict=True)]


def score(reply: str, code: str) -> float:
    """The reward of one reply by `short_and_right`."""
    if code not in reply:
        return 0.0
    return 0.5 + 0.5 * max(0.0, 1 - (len(reply) - len(code)) / 50)


if __name__ == "__main__":
    from transformers import AutoTokenizer

    from smollm2 import load_smollm2

    row = make_dataset(AutoTokenizer.from_pretrained(load_smollm2()), num_prompts=1)[0]
    print(row["prompt"][0]["content"])
    print(f"\n{row['num_tokens']} tokens, answer {row['answer']}")
