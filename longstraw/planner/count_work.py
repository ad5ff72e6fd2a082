"""Counts `layer_work.json`: runs tiny models of every family and fits what their layers take.

    python -m longstraw.planner.count_work [FAMILY ..]     some ten minutes on a CPU for all

Each model has layers of one kind, with random widths, in bf16; one chunk behind a history is
captured, taken backwards as a chunk of the prompt, and as two responses with a loss. Of the most
bytes that lived at a time, what all layers keep is taken off; the rest is one layer's work. Two
sets of widths are fitted: with a wide MLP, whose work is then the larger, and with a narrow one.
"""

import gc
import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..audit.memory import PeakTensorBytes
from ..config import EngineConfig
from ..distributed import SequenceGroup
from ..engine import Engine
from ..models import TokenCotangents
from ..passes import SegmentLoss, SegmentPasses
from ..segments import Segment
from ..state import SegmentState
from . import layer_work
from .graph import kept_terms, unkept_bytes
from .layer_work import COUNTED_AS
from .measured import make_model
from .model_shape import ATTENTION, FAMILIES, LATENT, RECURRENT, ModelShape
from .options import PlanOptions
from .terms import total
from .widths import MLP_WIDTHS, Run, layer_kind, widths

NUM_LAYERS = 3
NUM_ROWS = {"capture": 1, "prompt": 1, "replay": 2}
VOCAB = 64
_HYBRID = ("qwen3_5_text", "qwen3_5_moe_text")
SAMPLES_PER_WIDTH = 2
"""Models for each width of a form."""


@dataclass(frozen=True)
class Sample:
    """One model and how it is run.

    Attributes:
        config: of the model.
        num_tokens: of a chunk, over all ranks.
        num_chunks: of the history.
    """

    config: dict[str, Any]
    options: PlanOptions
    num_tokens: int
    num_chunks: int

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(self.config)

    def widths(self, which: str) -> dict[str, float]:
        """Of a layer in one of the passes."""
        width, num_rows = self.options.width(self.num_tokens), NUM_ROWS[which]
        run = Run(num_rows * width, self.num_chunks * width)
        return widths(self.shape, self.shape.layers[0], self.options, run)


class OneOfMany(SequenceGroup):
    """The first of `size` ranks, alone: the others send what it sends itself."""

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.size)

    def exchange(self, parts: Tensor) -> Tensor:
        return parts.clone()

    def sum_home(self, parts: Tensor) -> Tensor:
        return parts[0].clone()

    def sum_(self, x: Tensor) -> Tensor:
        return x

    def any(self, flags: list[bool]) -> list[bool]:
        return flags


# -------------------------------------------------------------------- random models


def sample(family: str, kind: str, num_adapters: int, at_work: str, seed: int) -> Sample:
    """A model of one kind of layers with random widths, and ranks that share its prompt."""
    rng = random.Random(f"{family} {kind} {num_adapters} {at_work} {seed}")
    is_wide = at_work == "MLP"
    hidden = rng.choice((128, 192, 256))
    wide = hidden * rng.choice((4, 5, 6, 8)) if is_wide else 16
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": wide // 16 * 16,
        "num_hidden_layers": NUM_LAYERS,
        "max_position_embeddings": 65536,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if FAMILIES[family].has_experts:
        config |= _expert_fields(rng, family, kind, wide, is_wide)
    base = kind.removesuffix(", experts")
    config |= {ATTENTION: _attention_fields, LATENT: _latent_fields, RECURRENT: _recurrent_fields}[
        base
    ](rng, family, hidden, is_wide)
    # What comes from other ranks is gone again when an MLP is at work.
    sp_size = rng.choice((2, 4)) if at_work == "gathering" else 1
    is_slow = FAMILIES[family].shared_expert == "plain"
    num_tokens = rng.choice((96, 128, 192) if is_slow else (256, 384, 512)) * sp_size
    page_size = 32 if is_wide else rng.choice((48, 64, 96) if is_slow else (64, 128, 256))
    engine = EngineConfig(
        chunk_size=num_tokens, page_size=page_size, sp_size=sp_size, allow_extrapolation=True
    )
    options = PlanOptions(
        num_tokens, ranks=sp_size, lora_rank=num_adapters, has_kernels=False, engine=engine
    )
    num_chunks = rng.choice((1, 2, 3)) if "index_topk" in config else 1
    return Sample(config, options, num_tokens, num_chunks)


def _attention_fields(
    rng: random.Random, family: str, hidden: int, is_wide: bool
) -> dict[str, Any]:
    dim = rng.choice((32, 64))
    heads = max(2, int(hidden * rng.choice((0.5, 1) if is_wide else (0.5, 1, 2)) / dim) // 2 * 2)
    fields: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "head_dim": dim,
    }
    if family in ("mistral", "gemma2", "gemma3_text", "gpt_oss"):
        fields["sliding_window"] = rng.choice((48, 96))
    if family in ("gemma2", "gemma3_text", "gpt_oss"):
        kind = rng.choice(("sliding_attention", "full_attention"))
        fields |= {"layer_types": [kind] * NUM_LAYERS, "query_pre_attn_scalar": dim}
    if family in _HYBRID:
        fields = _recurrent_fields(rng, family, hidden, is_wide) | fields
        fields["layer_types"] = ["full_attention"] * NUM_LAYERS
    return fields


def _recurrent_fields(
    rng: random.Random, family: str, hidden: int, is_wide: bool
) -> dict[str, Any]:
    heads = rng.choice((4, 8))
    return {
        "layer_types": ["linear_attention"] * NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": heads * rng.choice((1, 2)),
        "linear_key_head_dim": rng.choice((16, 32, 64)),
        "linear_value_head_dim": rng.choice((16, 32, 64)),
        "linear_conv_kernel_dim": 4,
    }


def _latent_fields(rng: random.Random, family: str, hidden: int, is_wide: bool) -> dict[str, Any]:
    heads, rotary = rng.choice((2, 4) if is_wide else (4, 8)), rng.choice((16, 32))
    ranks = (16, 32) if is_wide else (32, 64, 128)
    fields: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": rng.choice(ranks),
        "q_lora_rank": rng.choice(ranks),
        "qk_rope_head_dim": rotary,
        "head_dim": rotary,
        "qk_nope_head_dim": rng.choice((16, 32, 64)),
        "v_head_dim": rng.choice((16, 32, 64)),
    }
    if family != "deepseek_v3":
        fields |= {
            "index_topk": rng.choice((16, 32, 64)),
            "index_head_dim": rng.choice((32, 64)),
            "index_n_heads": rng.choice((2, 4)),
        }
    if family == "glm_moe_dsa":
        fields["indexer_types"] = ["full"] * NUM_LAYERS
    return fields


def _expert_fields(
    rng: random.Random, family: str, kind: str, wide: int, is_wide: bool
) -> dict[str, Any]:
    is_sparse, width = kind.endswith("experts"), max(wide // 32 * 16, 16)
    num_experts = rng.choice((4, 8))
    fields: dict[str, Any] = {
        "num_experts_per_tok": rng.choice((1, 2, 4)) if is_wide else 1,
        "moe_intermediate_size": width,
        "num_experts": num_experts,
    }
    if family == "gpt_oss":
        fields |= {"num_local_experts": num_experts, "intermediate_size": width}
    if FAMILIES[family].shared_expert == "gated":
        fields["shared_expert_intermediate_size"] = width * rng.choice((1, 2))
    if FAMILIES[family].shared_expert == "plain":
        fields |= {
            "n_routed_experts": num_experts,
            "n_shared_experts": rng.choice((1, 2)),
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0 if is_sparse else NUM_LAYERS,
            "mlp_layer_types": ["sparse" if is_sparse else "dense"] * NUM_LAYERS,
        }
    else:
        fields["decoder_sparse_step"] = 1
        fields["mlp_only_layers"] = [] if is_sparse else list(range(NUM_LAYERS))
    return fields


# -------------------------------------------------------------------- counting


def count(sample: Sample) -> dict[str, float]:
    """Bytes per token of one layer's work, by pass."""
    model = make_model(sample.config, sample.options)
    engine = Engine(model, replace(sample.options.engine, sp_size=1))
    group = OneOfMany(0, sample.options.engine.sp_size)
    passes = SegmentPasses(
        engine.decoder,
        engine.store,
        engine.backend,
        engine.lockstep,
        sample.options.engine,
        group,
    )
    trained = engine.decoder.trainable_parameters()
    engine.backend.begin_update(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    with _collector_off(), engine.decoder.attached():
        return {
            "capture": _capture(passes, sample),
            "prompt": _backward(passes, sample, num_rows=1),
            "replay": _backward(passes, sample, num_rows=2),
        }


def _capture(passes: SegmentPasses, sample: Sample) -> float:
    history = _captured(passes, 1, sample.num_chunks * sample.num_tokens, None)
    with PeakTensorBytes() as counter:
        _captured(passes, 1, sample.num_tokens, history)
    held = unkept_bytes(sample.shape, sample.options, 1, sample.num_tokens)
    return (counter.peak_bytes - held) / sample.options.width(sample.num_tokens)


def _backward(passes: SegmentPasses, sample: Sample, num_rows: int) -> float:
    """Of a chunk that later ones have read, or of the end of `num_rows` responses."""
    is_response = num_rows > 1
    num_tokens = sample.num_tokens
    history = _captured(passes, 1, sample.num_chunks * num_tokens, None)
    loss = SegmentLoss()
    if is_response:
        state = passes.new_state(
            _segment(num_rows, num_tokens, history.segment.end), None, history, needs_cotangent=True
        )
        ones = torch.ones(num_rows, num_tokens)
        loss = SegmentLoss(torch.full((num_rows, num_tokens), 3), TokenCotangents(ones))
    else:
        state = _captured(passes, num_rows, num_tokens, history)
    for held in (history,) if is_response else (history, state):
        _leave_cotangents(passes, held)
    with PeakTensorBytes() as counter:
        passes.backward(state, loss, tqdm(disable=True))
    kept = kept_terms(sample.shape, sample.options, num_rows, num_tokens, is_read=not is_response)
    here = num_rows * sample.options.width(num_tokens)
    return (counter.peak_bytes - total(kept)) / here


def _segment(num_rows: int, num_tokens: int, start: int) -> Segment:
    return Segment(torch.randint(2, VOCAB, (num_rows, num_tokens)), (num_tokens,) * num_rows, start)


def _captured(
    passes: SegmentPasses, num_rows: int, num_tokens: int, history: SegmentState | None
) -> SegmentState:
    start = 0 if history is None else history.segment.end
    segment = _segment(num_rows, num_tokens, start)
    state = passes.new_state(segment, None, history, needs_cotangent=True)
    passes.capture(state, tqdm(disable=True))
    return state


def _leave_cotangents(passes: SegmentPasses, state: SegmentState) -> None:
    """On every page, as if later tokens had been there."""
    for chunk in state.segment.chunks(passes.config.chunk_size):
        for layer in range(passes.decoder.num_layers):
            for page in state.pages(layer, chunk):
                gradients = [torch.zeros_like(x) for x in (page.key, page.value)]
                passes.store.add_cotangent(page, *gradients)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Count the same each time: what lies in a cycle stays until Python's collector comes by."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -------------------------------------------------------------------- fitting


def fit(
    at_work: str, rows: Sequence[dict[str, float]], values: Sequence[float]
) -> dict[str, float]:
    """Coefficients of the least relative squares, none below zero."""
    left_out = () if at_work == "MLP" else MLP_WIDTHS
    names = [name for name in rows[0] if name not in left_out and any(row[name] for row in rows)]
    weights = 1 / np.array(values)
    while True:
        table = np.array([[row[name] for name in names] for row in rows]) * weights[:, None]
        found, *_ = np.linalg.lstsq(table, np.ones(len(rows)), rcond=None)
        worst = int(found.argmin())
        if found[worst] >= 0:
            return {name: round(float(x), 3) for name, x in zip(names, found, strict=True)}
        names.pop(worst)


def kinds_of(family: str) -> list[str]:
    """Kinds of layers of a family that are counted."""
    parts = FAMILIES[family]
    if parts.shared_expert == "plain":
        return [LATENT, f"{LATENT}, experts"]
    tail = ", experts" if parts.has_experts else ""
    bases = [ATTENTION, RECURRENT] if family in _HYBRID else [ATTENTION]
    return [base + tail for base in bases]


def count_family(family: str, bar: tqdm) -> dict[str, Any]:
    """All coefficients of a family, as in `layer_work.json`."""
    result: dict[str, Any] = {}
    for trained, rank in (("full", 0), ("adapters", 8)):
        for kind in kinds_of(family):
            forms: dict[str, dict[str, Any]] = {which: {} for which in layer_work.PASSES}
            for name in layer_work.AT_WORK:
                counted = count_samples(family, kind, rank, name, bar)
                for which, by_name in forms.items():
                    rows = [made.widths(which) for made, _ in counted]
                    by_name[name] = fit(name, rows, [found[which] for _, found in counted])
            result.setdefault(trained, {})[kind] = forms
    return result


def count_samples(
    family: str, kind: str, rank: int, at_work: str, bar: tqdm
) -> list[tuple[Sample, dict[str, float]]]:
    """Enough models for a form, each with the work that was counted, by pass."""
    counted: list[tuple[Sample, dict[str, float]]] = []
    wanted = 1
    while len(counted) < wanted:
        made = sample(family, kind, rank, at_work, len(counted))
        found = layer_kind(made.shape.layers[0])
        assert found == kind, f"{found} instead of {kind}"
        wanted = SAMPLES_PER_WIDTH * len(made.widths("prompt"))
        counted.append((made, count(made)))
        bar.update(1)
    return counted


def main(families: Sequence[str]) -> None:
    """Count anew, and write."""
    path = Path(layer_work.__file__).with_suffix(".json")
    with tqdm(desc="counting", unit=" models") as bar:
        for family in families or [name for name in FAMILIES if name not in COUNTED_AS]:
            bar.set_postfix_str(family)
            counted = count_family(family, bar)
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            found[family] = counted
            text = json.dumps({name: found[name] for name in sorted(found)}, indent=1)
            path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
