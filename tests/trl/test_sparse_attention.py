"""Sparse attention (GLM-5) with LongStraw trains as with stock TRL, but for equal index scores.

As in `test_parity`: the same model, prompts and completions, three optimizer steps, each parameter
within 1e-4 of how far stock TRL moved it, and all logged numbers equal to 1e-4. Each token selects
8 of up to 49 before it.

An index score is a weighted sum of ReLUs over heads. With few heads some scores are exactly zero,
and `torch.topk` takes any of equal ones, by the length of the row: by how far stock TRL has padded.
LongStraw takes the first (or the last: `longstraw_index_ties`). So with 4 heads stock TRL is told
which to take, and with 32, where no score is zero, it is left as it is.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from longstraw.audit import ties_decided
from tests.trl.ingredients import lora
from tests.trl.parity import (
    ADAMW,
    FIRST_WORD,
    ModelPath,
    Setting,
    assert_same_training,
    make_trainer,
    prompts_dataset,
    train,
    worst_parameter,
)
from trl_integration import LongStrawGRPOTrainer

TOP_K = 8
FEW, MANY = 4, 32
"""Heads of an indexer."""


def variant(num_heads: int) -> dict[str, Any]:
    """Three layers; the second shares the first one's selection."""
    return {
        "num_hidden_layers": 3,
        "index_topk_pattern": "FSF",
        "index_n_heads": num_heads,
        "index_topk": TOP_K,
    }


def deciding(ties: str) -> Callable[[GRPOTrainer], None]:
    """Let stock TRL's model take the first, or the last, of equal index scores."""

    def prepare(trainer: GRPOTrainer) -> None:
        if isinstance(trainer, LongStrawGRPOTrainer):
            return
        stock = trainer.train

        def train(**options: Any) -> Any:
            with ties_decided(trainer.model, ties):
                return stock(**options)

        trainer.train = train

    return prepare


SPARSE = Setting(
    "glm_moe_dsa",
    variant(MANY),
    config={"max_steps": 3},
    longstraw={"longstraw_chunk_size": 16, "longstraw_page_size": 5},
    dataset=lambda: prompts_dataset((40, 23, 31)),
)
FEW_HEADS = replace(SPARSE, variant=variant(FEW), prepare=deciding("first"))
LAST = {**SPARSE.longstraw, "longstraw_index_ties": "last"}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SETTINGS = {
    "many heads": SPARSE,
    "few heads, the first": FEW_HEADS,
    "few heads, the last": replace(FEW_HEADS, prepare=deciding("last"), longstraw=LAST),
    "two prompts at a time": SPARSE.but(per_device_train_batch_size=8),
    "LoRA": replace(SPARSE, trainer=lora(target_parameters=EXPERTS)),
    "checkpointing": SPARSE.but(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
    ),
    "AdamW": SPARSE.but(**ADAMW),
}
SLOW = ("many heads", "two prompts at a time")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SETTINGS]


@pytest.mark.parametrize("name", NAMES)
def test_sparse_attention_trains_as_in_stock_trl(
    name: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """ "LoRA" is on attention, indexers, experts and routers, as PEFT has "all-linear". "AdamW"
    decays weights, and no indexer's: stock TRL leaves what no gradient reaches as it is."""
    assert_same_training(f"GLM, {name}", SETTINGS[name], model_path, tmp_path)


def test_the_rules_for_equal_scores_differ(model_path: ModelPath, tmp_path: Path) -> None:
    """Else the comparisons above would not tell one from the other."""
    path = model_path(FEW_HEADS.family, **FEW_HEADS.variant)
    first = train(FEW_HEADS, path, tmp_path / "first", longstraw=True)
    last = train(replace(FEW_HEADS, longstraw=LAST), path, tmp_path / "last", longstraw=True)
    assert worst_parameter(last.after, first)[0] > 1e-2


# ---------------------------------------------------------------- equal scores

PROMPT, COMPLETION, PADS = 10, 60, 600


def scored(trainer: GRPOTrainer, num_pads: int) -> tuple[Tensor, Tensor]:
    """Log-probs `[R]` of a completion that so many pads follow, as beside a longer one, and what
    the first layer's indexer selects for the tokens that predict it `[R, K]`, ascending."""
    found: list[Tensor] = []
    indexer = trainer.model.model.layers[0].self_attn.indexer
    hook = indexer.register_forward_hook(lambda module, args, output: found.append(output[0]))
    ids = torch.arange(FIRST_WORD, FIRST_WORD + PROMPT + COMPLETION)[None]
    mask = nn.functional.pad(torch.ones_like(ids), (0, num_pads))
    ids = nn.functional.pad(ids, (0, num_pads))
    with torch.no_grad():
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, COMPLETION + num_pads
        )
    hook.remove()
    # LongStraw runs chunks, those of the completion last.
    start = -COMPLETION if isinstance(trainer, LongStrawGRPOTrainer) else PROMPT - 1
    selected = torch.cat(found)[start:][:COMPLETION]
    return logps[0, :COMPLETION], selected.sort(dim=-1).values


def test_equal_scores_are_decided_by_position_and_not_by_padding(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """Pads behind a completion are of no token's concern. With them stock TRL selects other tokens
    for some all the same, and log-probs are off by more than 0.1; with ties decided they are what
    LongStraw has, padded or not. With many heads there is no tie to decide."""

    def made(num_heads: int, *, longstraw: bool) -> GRPOTrainer:
        path = model_path("glm_moe_dsa", **variant(num_heads))
        return make_trainer(SPARSE, path, tmp_path, longstraw=longstraw)

    stock, ours = (made(FEW, longstraw=longstraw) for longstraw in (False, True))
    (logps, selected), (padded, other) = scored(stock, 0), scored(stock, PADS)
    assert (selected != other).any() and (logps - padded).abs().max() > 0.1
    with ties_decided(stock.model, "first"):
        right, right_selected = scored(stock, PADS)
    for num_pads in (0, PADS):
        logps, selected = scored(ours, num_pads)
        assert torch.equal(selected, right_selected)
        torch.testing.assert_close(logps, right, rtol=0, atol=1e-4)

    stock = made(MANY, longstraw=False)
    assert torch.equal(scored(stock, 0)[1], scored(stock, PADS)[1])
