"""The tokens that matter to a query all lie with one rank.

A tiny GLM whose first indexer scores tokens by what they are and not by where they stand. The
prompt has the tokens with the highest scores where the first rank owns them, others elsewhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from longstraw import Engine, EngineConfig, PromptGroup
from longstraw.distributed import Ownership
from longstraw_kernels.index_topk import RunningTopK, index_scores
from tests.engine.compare import RandomLoss, gradients
from tests.models import VOCAB, Float64Islands, tiny_model

NUM_RANKS = 2
CHUNK, PAGE = 16, 3
PROMPT_LEN = 65
QUERY = 2
"""The prompt's last token, which asks."""


def model() -> nn.Module:
    """In fp64; positions do not matter to the first indexer."""
    tiny = tiny_model("glm_moe_dsa").double()
    indexer = tiny.model.layers[0].self_attn.indexer
    with torch.no_grad():
        heads = indexer.wq_b.weight.view(indexer.n_heads, indexer.head_dim, -1)
        heads[:, : indexer.qk_rope_head_dim] = 0
    return tiny


@torch.no_grad()
def tokens_by_score(tiny: Any) -> list[int]:
    """All tokens but the query, those with the highest scores for it first."""
    layer = tiny.model.layers[0]
    attention, indexer = layer.self_attn, layer.self_attn.indexer
    with Float64Islands():
        hidden = layer.input_layernorm(tiny.model.embed_tokens.weight)[None]
        residual = attention.q_a_layernorm(attention.q_a_proj(hidden[:, QUERY : QUERY + 1]))
        q = indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, -1))
        weights = indexer.weights_proj(hidden[:, QUERY : QUERY + 1])
        scores = index_scores(q, indexer.k_norm(indexer.wk(hidden)), weights, 1.0)[0, 0]
    order = scores.argsort(descending=True, stable=True).tolist()
    return [token for token in order if token > QUERY]


def group() -> PromptGroup:
    """One group, the same on every rank."""
    order = tokens_by_score(model())
    ownership = Ownership(CHUNK, NUM_RANKS, "block_cyclic")
    first = set(ownership.columns(0))
    best, rest = order[:32], order[VOCAB // 2 :]
    ids = [best[p // 2 % 32] if p % CHUNK in first else rest[p % 40] for p in range(PROMPT_LEN)]
    ids[-1] = QUERY
    generator = torch.Generator().manual_seed(1)
    responses = [torch.randint(3, VOCAB, (n,), generator=generator) for n in (5, 9)]
    return PromptGroup(torch.tensor(ids), responses)


def run(sp_size: int) -> dict[str, Any]:
    """Which prompt tokens this rank owns; its gradients, right ones and with local selections."""
    engine = Engine(model(), EngineConfig(chunk_size=CHUNK, page_size=PAGE, sp_size=sp_size))
    with Float64Islands():
        pages = engine.capture(group().prompt_ids).own_pages(0)
    owned = [position for page in pages for position in range(page.start, page.end)]
    record = {"owned": owned, "right": update(engine)}
    with selecting_locally(sp_size):
        record["local"] = update(engine)
    return record


def update(engine: Engine) -> dict[str, Tensor]:
    engine.release()
    with Float64Islands():
        engine.accumulate([group()], RandomLoss([group()]))
        engine.finalize()
    return gradients(engine.decoder.model)


@contextmanager
def selecting_locally(num_ranks: int) -> Iterator[None]:
    """A planted mistake: every rank takes its share of the selection from its own tokens."""

    def at_least(self: RunningTopK, score: Tensor, position: Tensor) -> Tensor:
        kept = self.positions.clone()
        kept[..., kept.shape[-1] // num_ranks :] = -1
        return kept

    with mock.patch.object(RunningTopK, "at_least", at_least):
        yield
