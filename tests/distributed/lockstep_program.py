"""What each rank of `test_lockstep` runs: `python -m tests.distributed.lockstep_program`.

A pass is a collective that tells which kinds the ranks made at once, so that ranks which make
different passes are told apart from ranks that make the same.
"""

import json
import multiprocessing
import time

import torch
import torch.distributed as dist

from longstraw.distributed import LockStep, Pass
from longstraw.errors import RankLostError, RanksAbortedError

CAPTURE, SCORE, BACKWARD = Pass.CAPTURE, Pass.SCORE, Pass.BACKWARD
_fork = multiprocessing.get_context("fork")
PLANS = {
    "equal": ([CAPTURE, SCORE, BACKWARD], [CAPTURE, SCORE, BACKWARD]),
    "one has none": ([], [CAPTURE, CAPTURE, SCORE, BACKWARD]),
    "other orders": ([BACKWARD, CAPTURE, BACKWARD, BACKWARD], [CAPTURE, SCORE, CAPTURE, SCORE]),
}


class Passes:
    """Makes passes and remembers them."""

    def __init__(self, turns: frozenset[Pass], timeout_seconds: float = 20) -> None:
        self.lockstep = LockStep(turns=turns, run_idle=self.idle, timeout_seconds=timeout_seconds)
        self.real: list[str] = []
        self.made: list[str] = []

    def make(self, kind: Pass) -> None:
        with self.lockstep.turn(kind) as is_collective:
            if is_collective:
                self.collective(kind)
            self.real.append(kind.name)

    def idle(self, kind: Pass) -> None:
        self.collective(kind)

    def collective(self, kind: Pass) -> None:
        kinds = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(kinds, torch.tensor([int(kind)]))
        assert all(int(other) == int(kind) for other in kinds), kinds
        self.made.append(kind.name)


def run_plan(name: str) -> dict[str, object]:
    """Ranks with different plans."""
    passes = Passes(frozenset({CAPTURE, SCORE, BACKWARD}))
    with passes.lockstep.together():
        for kind in PLANS[name][dist.get_rank()]:
            passes.make(kind)
    return {"real": passes.real, "made": passes.made, "idle": passes.lockstep.num_idle}


def run_failing() -> dict[str, object]:
    """Rank 1 fails between two passes while rank 0 has more of them; then both try again."""
    passes = Passes(frozenset({CAPTURE, SCORE, BACKWARD}))
    error = ""
    try:
        with passes.lockstep.together("the update"):
            for number in range(1 + 3 * (1 - dist.get_rank())):
                passes.make(CAPTURE)
                if dist.get_rank() == 1:
                    raise MemoryError(f"no room for pass {number + 1}")
    except (MemoryError, RanksAbortedError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    with passes.lockstep.together():
        passes.make(BACKWARD)
    return {"error": error, "real": passes.real}


def run_unturned() -> dict[str, object]:
    """Passes without collectives need no turn, whatever their number."""
    passes = Passes(frozenset({BACKWARD}))
    with passes.lockstep.together():
        for _ in range(3 * dist.get_rank()):
            passes.make(CAPTURE)
        passes.make(BACKWARD)
    return {"real": passes.real, "made": passes.made}


def run_agree() -> dict[str, object]:
    """Two errors at once, then none."""
    passes, seen = Passes(frozenset()), []
    for error in (ValueError(f"rank {dist.get_rank()}"), None):
        try:
            passes.lockstep.agree(error, "rewards")
            seen.append("fine")
        except (ValueError, RanksAbortedError) as caught:
            seen.append(f"{type(caught).__name__}: {caught}")
    return {"seen": seen}


def run_slow() -> dict[str, object]:
    """Rank 1 takes three times as long as the timeout, but passes are made all the time."""
    passes = Passes(frozenset(), timeout_seconds=2)
    with passes.lockstep.together():
        for _ in range(12 * dist.get_rank()):
            time.sleep(0.5)
            passes.make(CAPTURE)
    return {"real": passes.real}


def run_silent() -> dict[str, object]:
    """Rank 1 stays away for twice the timeout without a sign of life."""
    passes = Passes(frozenset(), timeout_seconds=2)
    passes.lockstep.watch.at("a long nap")
    try:
        if dist.get_rank() == 1:
            time.sleep(6)
            return {"error": ""}
        with passes.lockstep.together():
            pass
    except RankLostError as error:
        return {"error": str(error)}
    return {"error": "none"}


def run_pools() -> dict[str, object]:
    """Rank 1 ends workers that were forked while the watch handles SIGTERM, as a reward function
    that runs code in processes does; then the ranks meet again."""
    passes = Passes(frozenset(), timeout_seconds=5)
    codes: list[int | None] = []
    with passes.lockstep.watch.guarding():
        with passes.lockstep.together():
            if dist.get_rank() == 1:
                workers = [_fork.Process(target=time.sleep, args=(60,)) for _ in range(4)]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.terminate()
                    worker.join()
                codes = [worker.exitcode for worker in workers]
        with passes.lockstep.together():
            passes.make(CAPTURE)
    return {"codes": codes, "real": passes.real}


def run_other_work() -> dict[str, object]:
    """Rank 1 has left out a call."""
    passes = Passes(frozenset())
    try:
        with passes.lockstep.together("scoring" if dist.get_rank() == 0 else "replay"):
            pass
    except RanksAbortedError as error:
        return {"error": str(error)}
    return {"error": "none"}


def main() -> None:
    dist.init_process_group("gloo")
    cases = {f"plan:{name}": run_plan(name) for name in PLANS}
    cases |= {"failing": run_failing(), "unturned": run_unturned(), "agree": run_agree()}
    cases |= {"pools": run_pools(), "other work": run_other_work()}
    cases |= {"slow": run_slow(), "silent": run_silent()}
    print("RESULT " + json.dumps(cases), flush=True)  # noqa: T201  (read by the test)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
