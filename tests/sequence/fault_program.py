"""What each rank of `test_sequence_faults` runs: `python -m tests.sequence.fault_program FAULT`.

Two ranks share a prompt; in the second update something ends rank 1 in the middle of a pass, where
rank 0 waits for it in a collective. What ranks survive is in `run_budget`, `run_refused` and
`run_abort`, for `together.py`.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from longstraw import (
    ConfigError,
    Engine,
    EngineConfig,
    LongStrawError,
    PageRoomError,
    PromptGroup,
    generate,
)
from longstraw.distributed import ChunkTravel
from longstraw.models import Decoder
from longstraw.passes import SegmentPasses
from tests.engine.compare import RandomLoss, gradients, random_groups
from tests.models import tiny_model

FAULTY_RANK, FAULTY_UPDATE = 1, 2
CHUNK = 16


def make_engine(sp_size: int, budget_bytes: int | None = None) -> Engine:
    config = EngineConfig(
        chunk_size=CHUNK, page_size=8, sp_size=sp_size, state_budget_bytes=budget_bytes
    )
    return Engine(tiny_model("llama"), config, timeout_seconds=120)


def group_of(prompt_len: int, seed: int = 1) -> PromptGroup:
    (group,) = random_groups([(prompt_len + 1, (9, 5))], seed=seed)
    return group


def update(engine: Engine, group: PromptGroup) -> None:
    engine.accumulate([group], RandomLoss([group]))
    engine.finalize()


# ---------------------------------------------------------------- what ends a rank


def main(fault: str) -> None:
    """Two updates; the fault comes in the second."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = make_engine(2)
    for number in range(1, FAULTY_UPDATE + 1):
        engine.watch.step = f"step {number}"
        if (dist.get_rank(), number) == (FAULTY_RANK, FAULTY_UPDATE):
            owner, method, act = FAULTS[fault]
            before_the_third_call(owner, method, act)
        update(engine, group_of(100, seed=number))
        engine.weights_changed()
    say("DONE")


def before_the_third_call(owner: type, method: str, act: Callable[[], None]) -> None:
    """`act` before the third call of a method, which all ranks call the same number of times."""
    original, calls = getattr(owner, method), []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        if len(calls) == 3:
            say(f"FAULT at {time.time():.3f}")
            act()
        return original(*args, **kwargs)

    setattr(owner, method, call)


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  (read by the test)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise PageRoomError("planted in a pass")


FAULTS: dict[str, tuple[type, str, Callable[[], None]]] = {
    "killed in capture": (SegmentPasses, "_keep", _kill),
    "killed in the merge of a backward": (ChunkTravel, "sum_home", _kill),
    "raises in a backward": (SegmentPasses, "_token_roots", _raise),
}


# ---------------------------------------------------------------- what ranks survive


def error_of(work: Callable[[], Any]) -> str:
    """The error that `work` raises, in words; empty if there is none."""
    try:
        work()
    except LongStrawError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def left_behind(engine: Engine) -> dict[str, Any]:
    """Bytes, pages, states and gradients that an update has left."""
    return {
        "bytes": engine.store.bytes_in_use,
        "pages": engine.store.num_pages,
        "states": len(engine.captured.states()),
        "gradients": len(gradients(engine.decoder.model)),
    }


def budget_of(num_tokens: int) -> int:
    """Room for the state of so many tokens and its cotangents, in fp32: twice as much."""
    return Decoder(tiny_model("llama")).state_bytes(num_tokens, with_cotangents=True)


def run_budget(num_ranks: int) -> dict[str, Any]:
    """Only the last rank has little room, for an update of 48 tokens: for the capture of 96 as
    well, but not for their cotangents, and not for the capture of 112."""
    record: dict[str, Any] = {}
    for name, prompt_len in (("capture", 112), ("update", 96)):
        is_last = dist.get_rank() == num_ranks - 1
        engine = make_engine(num_ranks, budget_of(48 // num_ranks) if is_last else None)
        error = error_of(partial(update, engine, group_of(prompt_len)))
        left = left_behind(engine)
        update(engine, group_of(48))
        found = gradients(engine.decoder.model)
        fresh = make_engine(num_ranks)
        update(fresh, group_of(48))
        expected = gradients(fresh.decoder.model)
        same = all(torch.equal(found[parameter], expected[parameter]) for parameter in expected)
        record[name] = {"error": error, "left": left, "works": bool(expected) and same}
    return record


def run_other_input(num_ranks: int) -> dict[str, Any]:
    """The last rank is given something else than the others; then all are given the same."""
    is_last = dist.get_rank() == num_ranks - 1
    engine, group, other = make_engine(num_ranks), group_of(48), group_of(48, seed=2)
    shorter = PromptGroup(group.prompt_ids, [ids[:-1] for ids in group.completion_ids])
    context = (other if is_last else group).prompt_ids
    record = {
        "prompt": error_of(lambda: update(engine, other if is_last else group)),
        "response": error_of(lambda: update(engine, shorter if is_last else group)),
        "score": error_of(lambda: engine.score(other if is_last else group)),
        "context": error_of(lambda: generate(engine, context, 2, max_new_tokens=2)),
    }
    update(engine, group)
    # Equal values are the same whatever their dtype; what is sent of a view is its values.
    sequence, numbers = engine.axes.sequence, torch.arange(6)
    sequence.check_same([numbers.int() if is_last else numbers], "numbers")
    sent = torch.zeros(3, 2, dtype=torch.long) if is_last else numbers.view(2, 3).t()
    record["sent"] = sequence.broadcast_(sent).tolist()
    record["sum"] = sequence.sum_(numbers.view(2, 3).t() if is_last else sent.contiguous()).tolist()
    return record


def run_refused(num_ranks: int) -> str:
    """Groups into which the ranks cannot be divided."""
    try:
        make_engine(num_ranks - 1 if num_ranks > 2 else 4)
    except ConfigError as error:
        return str(error)
    return ""


def run_abort(num_ranks: int) -> dict[str, Any]:
    """Two sequence groups; in the first one rank has no room for the prompt."""
    sp_size = num_ranks // 2
    is_short = dist.get_rank() == 1
    engine = make_engine(sp_size, budget_of(48 // sp_size) if is_short else None)
    dp_rank = engine.axes.dp_rank
    began = time.time()
    prompt_len = 96 if dp_rank == 0 else 48
    error = error_of(partial(update, engine, group_of(prompt_len, seed=dp_rank)))
    seconds, left = time.time() - began, left_behind(engine)
    update(engine, group_of(48, seed=dp_rank))
    works = bool(gradients(engine.decoder.model))
    return {"error": error, "left": left, "works": works, "seconds": seconds}


if __name__ == "__main__":
    main(sys.argv[1])
