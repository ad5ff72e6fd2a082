"""What each rank decodes for `test_sequence_rollout`; one process decodes the same.

Ranks are seeded differently: the leader as one process alone, the others not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from longstraw import ConfigError, Engine, EngineConfig, generate, generate_rows
from tests.models import VOCAB, tiny_model

FAMILIES = ("llama", "gemma2", "gpt_oss", "gpt2", "qwen3_5")
"""Plain; with windows and softcaps; with sinks; with learned positions; with recurrent layers."""
SEED = 11
NUM_NEW = 6
GREEDY = {"max_new_tokens": NUM_NEW, "do_sample": False}
SAMPLED = {"max_new_tokens": NUM_NEW, "do_sample": True, "top_k": 0, "temperature": 4.0}


def run(sp_size: int) -> dict[str, Any]:
    """Everything, by family."""
    record: dict[str, Any] = {family: decode(family, sp_size) for family in families(sp_size)}
    return record | {"processors": with_processors(sp_size), "refused": refuse_max_time(sp_size)}


def families(sp_size: int) -> tuple[str, ...]:
    """Those that so many ranks can share: the tiny hybrid has two key heads to divide."""
    return FAMILIES if sp_size <= 2 else FAMILIES[:-1]


def decode(family: str, sp_size: int) -> dict[str, Any]:
    """Tokens by kind of generation, and what was run for them."""
    engine = make_engine(family, sp_size)
    rank = engine.axes.sequence.rank
    prompt, record = random_ids(45), {}

    def seeded(rows: Callable[[], list[Tensor]]) -> list[list[int]]:
        torch.manual_seed(SEED + rank)
        return [row.tolist() for row in rows()]

    record["greedy"] = seeded(lambda: list(generate(engine, prompt, 2, **GREEDY)))
    record["sampled"] = seeded(lambda: list(generate(engine, prompt, 2, **SAMPLED)))
    contexts = different_contexts(prompt)
    record["rows, greedy"] = seeded(lambda: generate_rows(engine, contexts, **GREEDY))
    record["rows, sampled"] = seeded(lambda: generate_rows(engine, contexts, **SAMPLED))
    turns = [
        torch.cat([context, torch.tensor(tokens), random_ids(5 + i, seed=20 + i)])
        for i, (context, tokens) in enumerate(zip(contexts, record["rows, greedy"], strict=True))
    ]
    record["turns, greedy"] = seeded(lambda: generate_rows(engine, turns, **GREEDY))
    record["turns, sampled"] = seeded(lambda: generate_rows(engine, turns, **SAMPLED))
    record["drawn next"] = torch.rand(3).tolist()
    record["num_captures"] = engine.ledger.num_captures
    record["tokens"] = {str(row["phase"]): row["tokens"] for row in engine.ledger.table()}
    engine.release()
    assert engine.store.bytes_in_use == 0
    return record


def make_engine(family: str, sp_size: int) -> Engine:
    """In fp64: ranks add up in another order, which must not decide between two tokens."""
    config = EngineConfig(chunk_size=16, page_size=8, min_shared_tokens=4, sp_size=sp_size)
    return Engine(tiny_model(family).double(), config)


def random_ids(length: int, seed: int = 2) -> Tensor:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def different_contexts(prompt: Tensor) -> list[Tensor]:
    """Two conversations that have gone different ways, a third prompt, one of two tokens (one rank
    owns its state) and one of a single token, which has no state."""
    first = [torch.cat([prompt, random_ids(9 + 7 * i, seed=3 + i)]) for i in range(2)]
    return [*first, random_ids(12, seed=8), random_ids(2, seed=10), random_ids(1, seed=9)]


# ---------------------------------------------------------------- options of generate


class OddTokensOnly(LogitsProcessor):
    """A user's: allows half of the tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, ::2] = -torch.inf
        return scores


class OwnScores(LogitsProcessor):
    """What devices that differ do to scores, exaggerated: only the leader's are right."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(self.rank, dims=-1)


def with_processors(sp_size: int) -> dict[str, Any]:
    """A user's logits processors; the list that is given stays as it is."""
    engine = make_engine("llama", sp_size)
    prompt, record = random_ids(45), {}
    for name, processor in (
        ("odd tokens", OddTokensOnly()),
        ("own scores", OwnScores(engine.axes.sequence.rank)),
    ):
        given = LogitsProcessorList([processor])
        torch.manual_seed(SEED + engine.axes.sequence.rank)
        found = generate(engine, prompt, 2, **SAMPLED, logits_processor=given)
        assert len(given) == 1, "the user's list was written to"
        record[name] = found[:, prompt.numel() :].tolist()
    return record


def refuse_max_time(sp_size: int) -> list[str]:
    """What is said to `max_time`, as an option and in a generation config."""
    engine = make_engine("llama", sp_size)
    said = []
    for options in (
        {**GREEDY, "max_time": 60.0},
        {"generation_config": GenerationConfig(max_new_tokens=2, max_time=60.0)},
    ):
        try:
            generate(engine, random_ids(9), 1, **options)
            said.append("nothing")
        except ConfigError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
