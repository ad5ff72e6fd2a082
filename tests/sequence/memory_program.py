"""Bytes of state, of tensors and from other ranks, as each rank of `test_sequence_memory` sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longstraw import Engine, EngineConfig, PromptGroup, SequenceGroup, generate
from longstraw.audit import PeakTensorBytes
from tests.engine.compare import RandomLoss, random_groups
from tests.models import tiny_model

LAYOUTS = ("block_cyclic", "zigzag")
EVEN, UNEVEN = (256, 64), (131, 27)
"""Prompt tokens and chunk: shares that are equal for 1, 2 and 4 ranks, and shares that are not."""
RESPONSE = 24
HIDDEN, MLP = 96, 256
"""Of the model whose tensors are counted."""


def run(sp_size: int) -> dict[str, Any]:
    """Everything, by name."""
    return {
        "state": {
            (layout, shape): state_bytes(sp_size, layout, shape)
            for layout in LAYOUTS
            for shape in (EVEN, UNEVEN)
        },
        "hybrid": hybrid_bytes(sp_size) if sp_size <= 2 else None,  # it has two key heads
        "received": {name: received_bytes(sp_size, name) for name in receiving(sp_size)},
        "peaks": {chunk_size: peak_bytes(sp_size, chunk_size) for chunk_size in PEAK_CHUNKS},
    }


def make_engine(model: nn.Module, sp_size: int, chunk_size: int, **options: Any) -> Engine:
    return Engine(
        model, EngineConfig(chunk_size=chunk_size, page_size=32, sp_size=sp_size, **options)
    )


def wide_llama() -> nn.Module:
    return tiny_model("llama", hidden_size=HIDDEN, intermediate_size=MLP)


def group_of(prompt_len: int) -> PromptGroup:
    """Two responses that fit into a chunk; `prompt_len` tokens are captured."""
    (group,) = random_groups([(prompt_len + 1, (RESPONSE,) * 2)])
    return group


# ---------------------------------------------------------------- state


def state_bytes(sp_size: int, layout: str, shape: tuple[int, int]) -> dict[str, int]:
    """After a capture, and at the peak of an update that begins with it."""
    prompt_len, chunk_size = shape
    engine = make_engine(tiny_model("llama"), sp_size, chunk_size, sp_layout=layout)
    group = group_of(prompt_len)
    engine.capture(group.prompt_ids)
    captured = engine.store.bytes_in_use
    engine.accumulate([group], RandomLoss([group]))
    assert engine.store.bytes_in_use == 0
    return {
        "captured": captured,
        "peak": engine.store.peak_bytes,
        "told": engine.ledger.state_bytes,
    }


def hybrid_bytes(sp_size: int) -> dict[str, int]:
    """Of a model whose recurrent layers are divided by heads: what is held, and what comes."""
    engine = make_engine(tiny_model("qwen3_5"), sp_size, EVEN[1])
    group, meter = group_of(EVEN[0]), Meter(engine.axes.sequence)
    engine.capture(group.prompt_ids)
    meter.read("received for the capture")
    captured = engine.store.bytes_in_use
    engine.accumulate([group], RandomLoss([group]))
    return {**meter.found, "captured": captured, "peak": engine.store.peak_bytes}


# ---------------------------------------------------------------- from other ranks


@dataclass(frozen=True)
class Receiving:
    """What is run while the bytes from other ranks are counted."""

    dtype: torch.dtype = torch.float32
    layout: str = "block_cyclic"
    checkpointing: bool = False


RECEIVING = {
    "fp32": Receiving(),
    "fp64": Receiving(torch.float64),
    "bf16": Receiving(torch.bfloat16),
    "zigzag": Receiving(layout="zigzag"),
    "checkpointing": Receiving(checkpointing=True),
}
FEW = ("fp32", "zigzag")
HISTORY_CHUNKS = 4
NUM_DECODED, NUM_DECODING = 5, 3
"""Tokens of each decoded response, and responses."""


def receiving(num_ranks: int) -> Sequence[str]:
    """What is run by so many ranks; dtypes and checkpointing are no matter of their number."""
    return tuple(RECEIVING) if num_ranks == 2 else FEW


class Meter:
    """What other ranks have sent here, by phase."""

    def __init__(self, axis: SequenceGroup) -> None:
        self.axis, self.found = axis, {}
        self._before = axis.received_bytes

    def read(self, phase: str) -> None:
        """Everything since the last phase was this one's."""
        self.found[phase] = self.axis.received_bytes - self._before
        self._before = self.axis.received_bytes


def received_bytes(sp_size: int, name: str) -> dict[str, int]:
    """Of one prompt's phases one by one, and of its capture behind a history."""
    what = RECEIVING[name]
    model = tiny_model("llama").to(what.dtype)
    if what.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    prompt_len, chunk_size = UNEVEN
    engine = make_engine(model, sp_size, chunk_size, replay_batch=1, sp_layout=what.layout)
    group, meter = group_of(prompt_len), Meter(engine.axes.sequence)
    engine.capture(group.prompt_ids)
    meter.read("capture")
    engine.score(group)
    meter.read("score")
    more_to_come = PromptGroup(group.prompt_ids, group.completion_ids, is_complete=False)
    engine.accumulate([more_to_come], RandomLoss([group]))
    meter.read("score and replay")
    engine.finalize()
    meter.read("prompt backward")
    history = random_groups([(HISTORY_CHUNKS * chunk_size, ())])[0].prompt_ids
    engine.capture(torch.cat([history, group.prompt_ids[:1]]))
    meter.read("capture of a history")
    behind = torch.cat([history, group.prompt_ids])
    engine.capture(behind)
    meter.read("capture behind it")
    options = {"max_new_tokens": NUM_DECODED, "min_new_tokens": NUM_DECODED, "do_sample": False}
    generate(engine, behind, NUM_DECODING, **options)
    meter.read("decoding")
    engine.release()
    return meter.found


# ---------------------------------------------------------------- tensors

PEAK_CHUNKS = (128, 256)


def peak_bytes(sp_size: int, chunk_size: int) -> dict[str, int]:
    """An update of a prompt of two chunks; gradients exist, as in every step but the first."""
    model = wide_llama()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine = make_engine(model, sp_size, chunk_size)
    group = group_of(2 * chunk_size)
    loss_of = RandomLoss([group])
    with PeakTensorBytes() as counter:
        engine.accumulate([group], loss_of)
    return {"tensors": counter.peak_bytes, "state": engine.store.peak_bytes}
