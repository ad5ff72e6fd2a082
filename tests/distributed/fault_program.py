"""What each rank of `test_faults` runs:
`python -m tests.distributed.fault_program MODEL OUT STAGES FAULT`.

Trains under DeepSpeed; in the second step something happens on rank 1 in the middle of its replays.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.trl.parity import Setting, make_trainer, modular_reward
from trl_integration import LongStrawGRPOTrainer

DEEPSPEED = {
    "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
}
FAULTY_RANK, FAULTY_STEP = 1, 1
TIMEOUT_SECONDS = 10


def deepspeed_config(stage: int) -> dict[str, Any]:
    """A config of this stage that partitions even tiny parameters."""
    return {**DEEPSPEED, "zero_optimization": {**DEEPSPEED["zero_optimization"], "stage": stage}}


def main(model: Path, out: Path, stages: str, fault: str) -> None:
    """Train once per stage in `stages`: "plain" or 0 ... 3, in fp32 or "N bf16", with commas."""
    torch.set_num_threads(1)
    for stage in stages.split(","):
        number, _, dtype = stage.partition(" ")
        setting = Setting(rewards=(reward(fault),)).but(max_steps=4, ddp_timeout=TIMEOUT_SECONDS)
        if number != "plain":
            setting = setting.but(deepspeed=deepspeed_config(int(number)), bf16=dtype == "bf16")
        trainer = make_trainer(setting, model, out, longstraw=True)
        assert isinstance(trainer, LongStrawGRPOTrainer)
        if fault in IN_BACKWARD:
            plant_in_backward(trainer, IN_BACKWARD[fault])
        if fault == "nan loss":
            plant_nan(trainer)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        skipped = [log["longstraw/skipped_steps"] for log in logs]
        # With NaN in a weight every entropy after it is NaN, at ZeRO-3 too, where none is whole.
        is_finite = [math.isfinite(log["entropy"]) for log in logs]
        say(f"DONE {stage}: skipped {skipped}, finite {is_finite}")


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  (read by the test)


def reward(fault: str) -> Callable[..., list[float | None]]:
    """A reward function, which on the faulty rank raises in the faulty step if asked to."""

    def modular(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[Any]:
        rank, step = torch.distributed.get_rank(), trainer_state.global_step
        if fault == "reward raises" and (rank, step) == (FAULTY_RANK, FAULTY_STEP):
            raise KeyError("no answer for this prompt")
        return modular_reward(completion_ids)

    return modular


def plant_in_backward(trainer: LongStrawGRPOTrainer, act: Callable[[], None]) -> None:
    """Call `act` in the faulty step's second replay."""
    replay, seen = trainer.engine._passes.backward, []

    def backward(state: Any, loss: Any, bar: Any) -> None:
        is_here = torch.distributed.get_rank() == FAULTY_RANK
        if is_here and trainer.state.global_step == FAULTY_STEP:
            seen.append(state)
            if len(seen) == 2:
                say(f"FAULT at {time.time():.3f}")
                act()
        replay(state, loss, bar)

    trainer.engine._passes.backward = backward  # type: ignore[method-assign]


def plant_nan(trainer: LongStrawGRPOTrainer) -> None:
    """Make the loss of the faulty rank NaN in the faulty step."""
    loss_of = trainer._compute_loss

    def compute(model: Any, inputs: Any) -> torch.Tensor:
        loss = loss_of(model, inputs)
        is_here = torch.distributed.get_rank() == FAULTY_RANK
        return loss * torch.nan if is_here and trainer.state.global_step == FAULTY_STEP else loss

    trainer._compute_loss = compute  # type: ignore[method-assign]


def _raise() -> None:
    raise MemoryError("out of memory, planted")


IN_BACKWARD: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
