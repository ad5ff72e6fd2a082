"""What an audit is made on: a prompt, replies to it, and the policy loss over them."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from ..engine import Engine
from ..errors import DataError
from ..members import GroupScores
from ..rollout import generate_rows
from ..segments import PromptGroup
from .policy import PolicySource
from .precision import whole_precision

_MOST_CHARACTERS_PER_TOKEN = 40


@dataclass(frozen=True)
class PolicyLoss:
    """The policy loss of GRPO where the policy is the one that sampled: every ratio is 1.

        loss = -scale * sum_it(advantage_i * logp_it) / num_tokens

    A sum over members, so its gradient may be added up member by member.
    """

    advantages: Tensor
    num_tokens: int
    scale: float = 1.0

    def __call__(self, scores: list[GroupScores]) -> Tensor:
        logps = scores[0].logps
        weights = self.advantages.to(logps)[:, None]
        return -self.scale * (weights * logps).sum() / self.num_tokens


@dataclass(frozen=True)
class AuditCase:
    """One prompt with its replies and their advantages."""

    group: PromptGroup
    advantages: Tensor

    @property
    def num_tokens(self) -> int:
        """Of all replies."""
        return sum(ids.numel() for ids in self.group.completion_ids)

    @property
    def loss(self) -> PolicyLoss:
        return PolicyLoss(self.advantages, self.num_tokens)

    @property
    def sha256(self) -> str:
        """Of the tokens and the advantages."""
        digest = hashlib.sha256()
        for ids in (self.group.prompt_ids, *self.group.completion_ids):
            digest.update(f"{ids.numel()} ".encode() + ids.cpu().long().numpy().tobytes())
        digest.update(self.advantages.cpu().double().numpy().tobytes())
        return digest.hexdigest()

    def members(self) -> Iterator[tuple[PromptGroup, PolicyLoss]]:
        """Each member by itself, with its part of the loss."""
        for i, ids in enumerate(self.group.completion_ids):
            part = PromptGroup(self.group.prompt_ids, [ids])
            yield part, PolicyLoss(self.advantages[i : i + 1], self.num_tokens)

    def share(self, rank: int, num_ranks: int) -> tuple[PromptGroup, PolicyLoss]:
        """The members of one of several data-parallel ranks.

        Its part of the loss is as many times as large: ranks take the mean.
        """
        group = PromptGroup(self.group.prompt_ids, self.group.completion_ids[rank::num_ranks])
        return group, PolicyLoss(self.advantages[rank::num_ranks], self.num_tokens, num_ranks)

    def to(self, device: torch.device | str) -> "AuditCase":
        """The same on another device."""
        replies = [ids.to(device) for ids in self.group.completion_ids]
        return AuditCase(
            PromptGroup(self.group.prompt_ids.to(device), replies), self.advantages.to(device)
        )


def sample_case(
    engine: Engine, prompt_ids: Tensor, *, group_size: int, response_tokens: int, seed: int
) -> AuditCase:
    """Replies that the model samples, up to their end, and random advantages of mean zero.

    Advantages are random because a gradient is audited for any of them, and no reward is at hand.
    """
    model: Any = engine.decoder.model
    torch.manual_seed(seed)
    with whole_precision(model):
        rows = generate_rows(
            engine,
            [prompt_ids] * group_size,
            max_new_tokens=response_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    engine.release()
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    draws = torch.randn(group_size, generator=torch.Generator().manual_seed(seed))
    advantages = (draws - draws.mean()) / (draws.std() + 1e-4)
    replies = [_until_end(ids, ends) for ids in rows]
    return AuditCase(PromptGroup(prompt_ids, replies), advantages.to(prompt_ids.device))


def _until_end(ids: Tensor, ends: set[int | None]) -> Tensor:
    for index, token in enumerate(ids.tolist()):
        if token in ends:
            return ids[: index + 1]
    return ids


class TokenSource:
    """The tokens that prompts are cut from.

    Args:
        policy: whose tokenizer makes them; a tiny random model gets random ones.
        path: `.txt`: one text. `.jsonl`: the "prompt" (or "text") of each line, a text or chat
            messages. None: the Python language reference, which ships with Python.
        most_tokens: how many will be asked for.

    Attributes:
        name: what they are, for people.
        sha256: of the file, or of the text.
        ids: `[N]`.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(self, policy: PolicySource, path: Path | None, most_tokens: int) -> None:
        if policy.source is None:
            generator = torch.Generator().manual_seed(policy.seed + 1)
            self.name = "random tokens"
            self.ids = torch.randint(2, 97, (most_tokens,), generator=generator)
            self.sha256 = hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()
            return
        if path is None:
            self.name = "the Python language reference (pydoc_data.topics)"
            text = "\n\n".join(topics[title].strip() for title in sorted(topics))
            content = text.encode()
        else:
            self.name = str(path)
            content = _read(path)
            text = _join_rows(content, path) if path.suffix == ".jsonl" else content.decode("utf-8")
        self.sha256 = hashlib.sha256(content).hexdigest()
        text = text[: _MOST_CHARACTERS_PER_TOKEN * most_tokens]
        ids = policy.load_tokenizer()(text, verbose=False)["input_ids"]
        self.ids = torch.tensor(ids, dtype=torch.long)

    def prompt(self, num_tokens: int) -> Tensor:
        """The first `num_tokens` of them.

        Raises:
            DataError: there are not as many.
        """
        if num_tokens > self.ids.numel():
            raise DataError(
                f"{self.name} has {self.ids.numel():,} tokens, and --prompt-tokens asks for "
                f"{num_tokens:,}. Give a longer file, or a shorter prompt."
            )
        return self.ids[:num_tokens]


def _read(path: Path) -> bytes:
    if path.suffix not in (".txt", ".jsonl"):
        raise DataError(
            f"--data {path}: a file that ends in .txt (one text) or .jsonl (a line for each row, "
            'with "prompt" or "text") is needed.'
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"--data {path} cannot be read: {error.strerror}.") from error


def _join_rows(content: bytes, path: Path) -> str:
    texts = []
    for number, line in enumerate(content.decode("utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}).") from error
        keys: Sequence[str] = list(row) if isinstance(row, dict) else []
        value = next((row[key] for key in ("prompt", "text") if key in keys), None)
        if isinstance(value, list):  # chat messages
            value = "\n\n".join(str(message.get("content", "")) for message in value)
        if not isinstance(value, str):
            found = ", ".join(keys) or type(row).__name__
            raise DataError(
                f'{path}, line {number}: found {found}; an object with a "prompt" or a "text" is '
                "needed, which is a text or a list of chat messages."
            )
        texts.append(value)
    return "\n\n".join(texts)
