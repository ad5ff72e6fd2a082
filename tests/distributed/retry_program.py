"""What each rank of `test_retry` runs: `python -m tests.distributed.retry_program`.

Two optimizer steps of an engine per stage; on one of two runs rank 1 fails in the middle of the
first step's second micro-batch, and the step is made again from its beginning.
"""

import importlib
import json
from typing import Any

import torch
import torch.distributed as dist

from longstraw import (
    Backend,
    DeepSpeedBackend,
    Engine,
    EngineConfig,
    GroupScores,
    PromptGroup,
    RanksAbortedError,
    TorchBackend,
    prepare_deepspeed,
)
from tests.distributed.fault_program import deepspeed_config
from tests.models import VOCAB
from tests.trl.parity import make_model

STAGES = ("plain", "0", "1", "2", "3")
LEARNING_RATE = 0.1


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    prepare_deepspeed(on_cpu=True)
    result = {stage: {str(fails): run(stage, fails) for fails in (False, True)} for stage in STAGES}
    print("RESULT " + json.dumps(result), flush=True)  # noqa: T201  (read by the test)
    dist.destroy_process_group()


def run(stage: str, fails: bool) -> dict[str, Any]:
    """The scores after two steps, exact to the last bit, and the error on the way."""
    engine, step = make_engine(stage)
    error, left_over, is_told_apart = "", 0, True
    for number in range(2):
        try:
            accumulate(engine, number, fails=fails and number == 0)
        except (MemoryError, RanksAbortedError) as caught:
            error, left_over = type(caught).__name__, engine.store.bytes_in_use
            accumulate(engine, number, fails=False)
        engine.finalize()
        version = engine.policy_version
        step()
        is_told_apart = is_told_apart and engine.policy_version != version
        engine.weights_changed()
    scores = engine.score(group(number=9))
    found = {"error": error, "left_over": left_over, "is_told_apart": is_told_apart}
    return found | {"scores": [float(x).hex() for x in scores.logps.flatten()]}


def make_engine(stage: str) -> tuple[Engine, Any]:
    """An engine, and the function that takes its optimizer's step."""
    model = make_model("llama", num_hidden_layers=2).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    config = EngineConfig(chunk_size=8, page_size=3)
    if stage == "plain":
        engine = Engine(model, config, backend=TorchBackend())

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return engine, step
    deepspeed = importlib.import_module("deepspeed")
    options = deepspeed_config(int(stage)) | {"train_micro_batch_size_per_gpu": 1}
    options |= {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    options |= {"bf16": {"enabled": False}, "zero_allow_untested_optimizer": True}
    engine_of_deepspeed = deepspeed.initialize(model=model, optimizer=optimizer, config=options)[0]
    backend: Backend = DeepSpeedBackend(engine_of_deepspeed)
    return Engine(engine_of_deepspeed.module, config, backend=backend), backend.step  # type: ignore[attr-defined]


def accumulate(engine: Engine, number: int, *, fails: bool) -> None:
    """Two micro-batches of one group each."""
    for micro_batch in range(2):
        if fails and micro_batch == 1:
            plant(engine)
        engine.accumulate([group(10 * number + micro_batch)], loss_of)


def plant(engine: Engine) -> None:
    """Let rank 1 fail once, in front of its second replay, whose pages it holds already."""
    replay, seen = engine._passes.backward, []

    def backward(state: Any, loss: Any, bar: Any) -> None:
        seen.append(state)
        if len(seen) == 2:
            engine._passes.backward = replay  # type: ignore[method-assign]
            if dist.get_rank() == 1:
                assert state.num_bytes > 0
                raise MemoryError("planted")
        replay(state, loss, bar)

    engine._passes.backward = backward  # type: ignore[method-assign]


def group(number: int) -> PromptGroup:
    """A prompt and three responses, others on each rank."""
    rng = torch.Generator().manual_seed(100 * number + dist.get_rank())
    length = 5 + 9 * dist.get_rank() + number
    prompt = torch.randint(3, VOCAB, (length,), generator=rng)
    # The second is longer than two chunks, so that it holds pages of its own while it is replayed.
    responses = [torch.randint(3, VOCAB, (n,), generator=rng) for n in (4, 19, 6)]
    return PromptGroup(prompt, responses)


def loss_of(scores: list[GroupScores]) -> torch.Tensor:
    weights = torch.tensor([[1.0], [-0.5], [0.25]])
    return -(scores[0].logps * weights).sum() / 10


if __name__ == "__main__":
    main()
