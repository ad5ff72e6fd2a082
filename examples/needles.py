"""Questions about a fact hidden in real documents, and a reward that a program can check.

A prompt is a run of the Python language reference (it ships with Python as `pydoc_data.topics`, so
nothing is downloaded), one inserted sentence such as "The secret code of the river is 4821.", and a
question about that sentence at the end:

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

NAMES = "apple cloud eagle forest garden harbor island lemon mirror piano river stone tiger".split()
FACT = "The secret code of the {name} is {code}."
QUESTION = "What is the secret code of the {name}? Answer with the number only."

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
        seed: of the names, codes, places and passages.

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
    name, code = rng.choice(NAMES), str(rng.randint(1000, 9999))
    start, depth = rng.randrange(len(documents.lines)), rng.random()
    budget = prompt_tokens
    for _ in range(20):
        lines = insert(FACT.format(name=name, code=code), documents.read(start, budget), depth)
        content = "".join(lines).strip() + "\n\n" + QUESTION.format(name=name)
        prompt = [{"role": "user", "content": content}]
        num_tokens = count_tokens(tokenizer, prompt)
        if prompt_tokens <= num_tokens < prompt_tokens + MARGIN:
            return {"prompt": prompt, "answer": code, "num_tokens": num_tokens}
        # the sum over lines is not the length of their join, and the template comes on top
        budget += prompt_tokens - num_tokens
    raise ValueError(
        f"could not make a prompt of {prompt_tokens} tokens, the last try had {num_tokens}.\n"
        f"  Needed: at least {prompt_tokens} and fewer than {prompt_tokens + MARGIN}, with the chat "
        f"template, the fact and the question.\n  Raise prompt_tokens."
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
    """Reward 1 for exactly the code, less for a longer reply that contains it, 0 without it.

        reward = 1                               reply == code
                 max(0.1, 0.9 - len(reply) / 50) code in reply
                 0                               otherwise

    The slope is what makes it learnable: a model that says "The secret code is 4821." nearly always
    gets no signal from a reward that is 1 for exact replies and constant for the others, since no
    sample of a group is better than another.
    """
    return [score(reply[-1]["content"].strip(), code) for reply, code in zip(completions, answer)]


def score(reply: str, code: str) -> float:
    """The reward of one reply."""
    if reply == code:
        return 1.0
    return max(0.1, 0.9 - len(reply) / 50) if code in reply else 0.0
