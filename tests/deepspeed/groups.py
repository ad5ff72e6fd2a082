"""Data whose groups say themselves what happens to them, whichever process asks.

With `shuffle_dataset=False` step s of two processes trains group 2s on rank 0 and group 2s + 1 on
rank 1, and step s of one process with twice the batch trains both: the union. Completions and
rewards depend on the prompt and the member only, so all three see the same rows.

Knows TRL's data; knows nothing of DeepSpeed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from trl import GRPOTrainer

from tests.models import VOCAB
from tests.trl.parity import EOS, FIRST_WORD, RewardFunction, RolloutFunction

GROUP_SIZE = 4


@dataclass(frozen=True)
class Group:
    """One prompt and what its members get.

    Attributes:
        prompt_len: tokens.
        completion_lens: of each member; ends with an end-of-sequence token unless `is_cut`.
        rewards: of each member. All alike: no member has an advantage.
        is_cut: members whose completion counts as truncated.
    """

    prompt_len: int
    completion_lens: tuple[int, ...] = (9, 4, 1, 6)
    rewards: tuple[float, ...] = (0.0, 1.0, 0.3, 0.8)
    is_cut: tuple[bool, ...] = (False,) * GROUP_SIZE


FLAT = (0.5,) * GROUP_SIZE
HALF_FLAT = (1.0, 0.0, 0.5, 0.5)
"""Two members at the mean of the group: no advantage, exactly."""

# Chunks hold 8 tokens, so prompts have 0 to 4 chunks and responses 1 or 2, differently per rank.
UNEQUAL = (
    Group(30),
    Group(1, (3, 9, 9, 2), HALF_FLAT),
    # Rank 0 has nothing to replay.
    Group(12, rewards=FLAT),
    Group(17, (2, 5, 9, 7)),
    # Nobody has.
    Group(5, rewards=FLAT),
    Group(9, rewards=FLAT),
    Group(7, (1, 1, 8, 9), (0.2, 0.9, 0.1, 0.7)),
    Group(23, (6, 2, 4, 3), HALF_FLAT),
)
NUM_STEPS = len(UNEQUAL) // 2


def groups_dataset(groups: Sequence[Group], seed: int = 0) -> Dataset:
    """A random prompt for each group, and its number as a column."""
    texts = _texts(groups, seed)
    return Dataset.from_dict({"prompt": texts, "number": list(range(len(groups)))})


def groups_rollout(groups: Sequence[Group], seed: int = 0) -> RolloutFunction:
    """Completions of the lengths that the groups ask for; of others, up to 9 tokens."""
    numbers = {text: number for number, text in enumerate(_texts(groups, seed))}

    def complete(text: str, member: int) -> list[int]:
        rng = random.Random(f"{text} {member}")
        if text not in numbers:
            return [*(rng.randrange(FIRST_WORD, VOCAB) for _ in range(rng.randint(0, 7))), EOS]
        group = groups[numbers[text]]
        ids = [rng.randrange(FIRST_WORD, VOCAB) for _ in range(group.completion_lens[member])]
        return ids if group.is_cut[member] else [*ids[:-1], EOS]

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        completions = [complete(text, member) for text, member in _count(prompts)]
        return {
            "prompt_ids": [trainer.processing_class(text)["input_ids"] for text in prompts],
            "completion_ids": completions,
            "logprobs": [[-1.0] * len(ids) for ids in completions],
        }

    return rollout


def groups_reward(groups: Sequence[Group]) -> RewardFunction:
    """The rewards that the groups ask for."""

    def planned(number: list[int], **_: Any) -> list[float | None]:
        return [groups[n].rewards[member] for n, member in _count(number)]

    return planned


def _count(items: list[Any]) -> list[tuple[Any, int]]:
    """Each item and how many like it came before, modulo the group size."""
    seen: dict[Any, int] = {}
    counted = []
    for item in items:
        counted.append((item, seen.get(item, 0) % GROUP_SIZE))
        seen[item] = seen.get(item, 0) + 1
    return counted


def _texts(groups: Sequence[Group], seed: int) -> list[str]:
    rng = random.Random(seed)
    return [
        " ".join(f"w{rng.randrange(FIRST_WORD, VOCAB)}" for _ in range(group.prompt_len))
        for group in groups
    ]
