"""One token of a long prompt decides the answer, and another rank than its owner asks for it.

A llama whose weights are set by hand: a query looks for the only token that is marked as a needle
and copies what that carries to its output. Small noise in all weights gives every parameter a
gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from longstraw import Engine, EngineConfig, GroupScores, PromptGroup, generate
from longstraw.distributed import ChunkTravel, DecodeTravel, Ownership
from tests.engine.compare import gradients
from tests.models import Float64Islands, tiny_model

NUM_RANKS = 3
CHUNK, PAGE = 12, 3
NUM_VALUES = 8
FILLER, QUERY, NEEDLES, ANSWERS = range(2, 40), 41, range(50, 58), range(60, 68)
"""Token ids: needle v is answered by answer v, which asks again."""
PROMPT_LEN, NUM_ANSWERS = 50, 3

# Dimensions of the hidden states.
IS_NEEDLE, IS_QUERY = 0, 1
CARRIED, FOUND, REST = 8, 16, 24  # values as one-hot vectors; what tells fillers apart


def needle_model() -> nn.Module:
    """Two layers in fp64; the second one retrieves."""
    # With this base the last rotary pair does not turn: positions do not matter to the match.
    rope = {"rope_type": "default", "rope_theta": 1e12}
    model = tiny_model("llama", num_hidden_layers=2, rope_parameters=rope).double()
    generator = torch.Generator().manual_seed(5)
    values = torch.arange(NUM_VALUES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.01 * noise + (1.0 if "norm" in name else 0.0))
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding[:, REST:] += torch.randn(len(embedding), 48 - REST, generator=generator)
        embedding[list(NEEDLES), IS_NEEDLE] += 6
        embedding[list(NEEDLES), CARRIED + values] += 6
        embedding[[QUERY, *ANSWERS], IS_QUERY] += 6
        attention = model.model.layers[1].self_attn
        attention.q_proj.weight.view(4, 16, 48)[:, -1, IS_QUERY] += 1
        attention.k_proj.weight.view(2, 16, 48)[:, -1, IS_NEEDLE] += 1
        attention.v_proj.weight.view(2, 16, 48)[0, values, CARRIED + values] += 1
        attention.o_proj.weight.view(48, 4, 16)[FOUND + values, 0, values] += 4
        head[list(ANSWERS), FOUND + values] += 1
    return model


def prompt_with(needle: int, place: int) -> Tensor:
    """`[P]`: fillers, the needle at `place`, the query at the end."""
    generator = torch.Generator().manual_seed(9)
    prompt = torch.randint(FILLER.start, FILLER.stop, (PROMPT_LEN,), generator=generator)
    prompt[place], prompt[-1] = NEEDLES[needle], QUERY
    return prompt


def place_of(rank: int) -> int:
    """A place in the prompt's second chunk that `rank` owns."""
    return CHUNK + Ownership(CHUNK, NUM_RANKS).columns(rank)[1]


def asked_by(token: int) -> int:
    """The rank that owns the query of an answer's token, which stands one place before it."""
    ownership = Ownership(NUM_ANSWERS, NUM_RANKS)
    return next(rank for rank in range(NUM_RANKS) if token in ownership.columns(rank))


class OneToken:
    """Minus the log-prob of one token of the answer: a single query needs the needle."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, scores: list[GroupScores]) -> Tensor:
        return -scores[0].logps[0, self.token]


PAIRS = [
    (owner, token)
    for owner, token in product(range(NUM_RANKS), range(NUM_ANSWERS))
    if asked_by(token) != owner
]
"""The needle's owner, and the token of the answer that is asked for by another rank."""


def group_of(owner: int, needle: int = 1) -> PromptGroup:
    answer = torch.full((NUM_ANSWERS,), ANSWERS[needle])
    return PromptGroup(prompt_with(needle, place_of(owner)), [answer])


# ---------------------------------------------------------------- what each rank runs


def run(sp_size: int) -> dict[str, Any]:
    """Decoded answers and gradients, right ones and those of each planted mistake."""
    config = EngineConfig(chunk_size=CHUNK, page_size=PAGE, sp_size=sp_size)
    engine = Engine(needle_model(), config)
    record: dict[str, Any] = {
        "owned": [owned_needles(engine, place_of(owner)) for owner in range(NUM_RANKS)],
        "right": answers_and_gradients(engine),
    }
    for name in MISTAKES:
        with planted(name):
            record[name] = answers_and_gradients(engine)
    return record


def owned_needles(engine: Engine, place: int) -> bool:
    """Whether this rank's pages hold the token at `place`."""
    state = engine.capture(prompt_with(1, place))
    pages = state.own_pages(0)
    engine.release()
    return any(page.start <= place < page.end for page in pages)


def answers_and_gradients(engine: Engine) -> dict[str, Any]:
    """By needle's owner and value the answer; by owner and token the gradients."""
    decoded = {}
    for owner, needle in product(range(NUM_RANKS), (1, 4)):
        prompt = prompt_with(needle, place_of(owner))
        options = {"max_new_tokens": NUM_ANSWERS, "do_sample": False}
        decoded[owner, needle] = generate(engine, prompt, 1, **options)[0, PROMPT_LEN:].tolist()
        engine.release()
    found = {}
    for owner, token in PAIRS:
        with Float64Islands():
            engine.accumulate([group_of(owner)], OneToken(token))
            engine.finalize()
        found[owner, token] = gradients(engine.decoder.model)
    return {"decoded": decoded, "gradients": found}


# ---------------------------------------------------------------- planted mistakes
# What the other ranks found is dropped, without a sign: nobody waits for anybody.


def _keep_own(self: DecodeTravel, whole: Tensor) -> Tensor:
    return whole.unsqueeze(0)


def _keep_own_part(self: ChunkTravel, whole: Tensor) -> Tensor:
    return self._by_owner(whole)[self.group.rank].unsqueeze(0)


def _keep_own_sum(self: ChunkTravel, whole: Tensor) -> Tensor:
    return self._by_owner(whole)[self.group.rank]


MISTAKES: dict[str, tuple[type, str, Any]] = {
    "decoding drops other ranks' keys": (DecodeTravel, "parts_home", _keep_own),
    "a chunk drops other ranks' keys": (ChunkTravel, "parts_home", _keep_own_part),
    "a query drops other ranks' gradients": (ChunkTravel, "sum_home", _keep_own_sum),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """One method is wrong inside, on every rank."""
    owner, method, wrong = MISTAKES[name]
    with mock.patch.object(owner, method, wrong):
        yield
