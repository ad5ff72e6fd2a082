"""One cell of the benchmark in a process of its own: time, or memory, of one optimizer step.

    python examples/bench_cell.py cell.json result.json

`bench.py` starts it; a crash here is a result there. Knows how to measure one cell; knows nothing
of the others.
"""

import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback
from trl import GRPOConfig

from bench_trainers import (
    PHASES,
    FixedWork,
    FixedWorkTrainer,
    Observer,
    OurTrainer,
    StepEvents,
    StockTrainer,
)
from longstraw.audit import PeakTensorBytes
from trl_integration import LongStrawGRPOConfig

STOCK_MODES = ("trl", "trl-batch", "trl-as-is")
OUR_MODES = ("exact", "stopped")


@dataclass(frozen=True)
class Cell:
    """What is measured, and all that the numbers depend on.

    Attributes:
        kind: "time", "memory" or "profile". The latter two slow operators, so each has its own
            process.
        mode: "exact" or "stopped" for LongStraw. Stock TRL: "trl" (one row at a time), "trl-batch"
            (the group at once), both with logits of the replies only, as on a GPU; "trl-as-is" (one
            row at a time, as installed: without Triton it makes logits of the prompt as well).
        prompt: tokens of the prompt, P.
        group: replies, G.
        response: tokens of each reply, R.
        model: folder or Hub id.
        finetune: "lora" or "full".
        dtype: of the weights with LoRA, of autocast in any case.
        chunk: `longstraw_chunk_size`.
        replay_batch: `longstraw_replay_batch`.
        checkpointing: gradient checkpointing in LongStraw's modes; stock TRL always has it.
        threads: of torch on the CPU.
        min_seconds, max_steps: measured steps go on until either is reached; at least one.
    """

    kind: str
    mode: str
    prompt: int
    group: int
    response: int
    model: str
    finetune: str
    dtype: str
    chunk: int
    replay_batch: int
    checkpointing: bool
    threads: int
    min_seconds: float
    max_steps: int

    @property
    def is_ours(self) -> bool:
        return self.mode in OUR_MODES


def measure(cell: Cell) -> dict[str, Any]:
    """Run the cell; numbers of time or memory, and of the step's outcome."""
    with tempfile.TemporaryDirectory() as folder:
        if cell.kind == "profile":
            from bench_profile import run_profile  # imports this file

            return run_profile(cell, folder)
        trainer = make_trainer(cell, folder)
        return measure_memory(trainer) if cell.kind == "memory" else measure_time(cell, trainer)


# ---------------------------------------------------------------- the trainer


def make_trainer(cell: Cell, folder: str) -> FixedWorkTrainer:
    """The trainer of the cell's mode on the fixed work."""
    tokenizer = AutoTokenizer.from_pretrained(cell.model, padding_side="left")
    text = tokenizer("\n\n".join(topics[title] for title in sorted(topics)))["input_ids"]
    work = FixedWork.make(text, cell.prompt, cell.group, cell.response)
    if cell.mode in ("trl", "trl-batch"):
        # The one use of this name there is which rows get logits; the head's arithmetic stays.
        trl.trainer.utils._use_triton = lambda device: True
    is_lora = cell.finetune == "lora"
    # Full fine-tuning keeps the weights in float32: updates are lost in the last bits of bfloat16.
    dtype = getattr(torch, cell.dtype) if is_lora else torch.float32
    torch.manual_seed(0)
    # Random B (init_lora_weights=False): with PEFT's zeros every gradient of A would be zero.
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    trainer_class = OurTrainer if cell.is_ours else StockTrainer
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(cell.model, dtype=dtype),
        reward_funcs=work.reward,
        args=make_config(cell, folder),
        train_dataset=Dataset.from_dict({"prompt": ["."] * (1 + cell.max_steps)}),
        processing_class=tokenizer,
        peft_config=adapter if is_lora else None,
    )
    trainer.work = work
    trainer.remove_callback(ProgressCallback)
    return trainer


def make_config(cell: Cell, folder: str) -> GRPOConfig:
    """The settings, the same for all modes but for the micro-batch and checkpointing."""
    rows = 1 if cell.mode in ("trl", "trl-as-is") else cell.group
    options: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": 1 + cell.max_steps,
        # The optimizer does its work and the weights stay: all steps of all modes are comparable.
        "learning_rate": 0.0,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": cell.group // rows,
        "num_generations": cell.group,
        "max_completion_length": cell.response,
        "generation_kwargs": {"min_new_tokens": cell.response},
        "bf16": cell.dtype == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 0,
    }
    if not cell.is_ours:
        return GRPOConfig(**options)
    return LongStrawGRPOConfig(
        **options,
        gradient_checkpointing=cell.checkpointing,
        longstraw_prompt_gradient=cell.mode,
        longstraw_chunk_size=cell.chunk,
        longstraw_replay_batch=cell.replay_batch,
        longstraw_allow_extrapolation=True,  # what the model says there does not matter for time
        longstraw_progress=False,
    )


def parameters_of(trainer: FixedWorkTrainer) -> list[torch.nn.Parameter]:
    """What is trained."""
    return [p for p in trainer.model.parameters() if p.requires_grad]


def outcome(trainer: FixedWorkTrainer) -> dict[str, float]:
    """Loss and gradient norm of the last step that ended."""
    steps = [log for log in trainer.state.log_history if "grad_norm" in log]
    return {key: float(steps[-1][key]) for key in ("loss", "grad_norm")}


# ---------------------------------------------------------------- time


class StepTimer:
    """Times whole optimizer steps; the first one warms up and is not kept.

    Attributes:
        steps: of each measured step, "total" and each phase in seconds, and "cpu", the seconds that
            the process's threads computed: on a machine that others use too it is less.
        resident: the process's peak resident bytes in each measured step.
    """

    def __init__(self, trainer: FixedWorkTrainer, min_seconds: float, max_steps: int) -> None:
        self.trainer, self.min_seconds, self.max_steps = trainer, min_seconds, max_steps
        self.steps: list[dict[str, float]] = []
        self.resident: list[int] = []
        self._is_warm = False

    def begin(self) -> None:
        self.trainer.observer.seconds = {}
        self._ledger_before = ledger_seconds(self.trainer)
        self._resident = PeakResident()
        self._begin, self._begin_cpu = time.perf_counter(), time.process_time()

    def before_optimizer(self) -> None:
        self._optimizer = time.perf_counter()

    def after_optimizer(self) -> None:
        self._optimizer = time.perf_counter() - self._optimizer

    def end(self) -> bool:
        total = time.perf_counter() - self._begin
        cpu = time.process_time() - self._begin_cpu
        resident = self._resident.stop()
        if not self._is_warm:
            self._is_warm = True
            return True
        seconds = dict(self.trainer.observer.seconds)
        now = ledger_seconds(self.trainer)
        if now:  # the ledger tells apart what the rollout's own clock holds together
            seconds = {phase: now[phase] - self._ledger_before.get(phase, 0.0) for phase in now}
        seconds["optimizer"] = self._optimizer
        seconds["other"] = total - sum(seconds.values())
        self.steps.append({"total": total, "cpu": cpu, **seconds})
        self.resident.append(resident)
        elapsed = sum(step["total"] for step in self.steps)
        return elapsed < self.min_seconds and len(self.steps) < self.max_steps


def ledger_seconds(trainer: FixedWorkTrainer) -> dict[str, float]:
    """Seconds of each phase so far, from the engine's ledger; empty for stock TRL."""
    if not isinstance(trainer, OurTrainer):
        return {}
    return {str(row["phase"]): float(row["seconds"]) for row in trainer.engine.ledger.table()}


class PeakResident:
    """The process's highest resident memory from construction to `stop`.

    The system's own mark is read ten times a second and not once at the end, because LongStraw's
    ledger resets it at each phase.
    """

    def __init__(self) -> None:
        self._peak, self._is_over = 0, threading.Event()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.1):
            self._peak = max(self._peak, high_water_mark())

    def stop(self) -> int:
        """Peak bytes; 0 where the system does not tell."""
        self._is_over.set()
        self._thread.join()
        return max(self._peak, high_water_mark())


def high_water_mark() -> int:
    """The system's mark of resident bytes (Linux), or 0."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def measure_time(cell: Cell, trainer: FixedWorkTrainer) -> dict[str, Any]:
    """Seconds of the median step, in all and by phase."""
    timer = StepTimer(trainer, cell.min_seconds, cell.max_steps)
    trainer.add_callback(StepEvents(timer))
    trainer.train()
    every = [step["total"] for step in timer.steps]
    middle = sorted(timer.steps, key=lambda step: step["total"])[len(timer.steps) // 2]
    total, cpu = middle.pop("total"), middle.pop("cpu")
    return {
        "seconds": total,
        "cpu_seconds": cpu,
        "seconds_without_rollout": total - middle["rollout"],
        "phases": {phase: middle[phase] for phase in (*PHASES, *middle) if phase in middle},
        "all_seconds": every,
        "peak_resident_bytes": max(timer.resident),
        **outcome(trainer),
    }


# ---------------------------------------------------------------- memory


class Measured(Exception):
    """The peaks are known; the rest of the training is not needed."""


class MemoryObserver(Observer):
    """Counts peak bytes of the rollout and of the update after it, and then ends the training.

    Gradients are made before, as they are in every step but the first of a gradient accumulation,
    and the optimizer's step is not reached: weights, gradients and optimizer states are not in the
    peaks. They are the same in all modes.
    """

    warms_up = False

    def __init__(self, trainer: FixedWorkTrainer) -> None:
        super().__init__()
        self.trainer = trainer
        self.peaks: dict[str, int] = {}

    def begin(self) -> None:
        for parameter in parameters_of(self.trainer):
            parameter.grad = torch.zeros_like(parameter)
        self._counter = new_counter(self.trainer)
        self._counter.__enter__()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        with super().rollout():
            yield
        self.peaks["rollout"] = self._counter.peak_bytes
        # LongStraw's captured prompt is still live and thus part of the update's peak.
        self._counter.peak_bytes = self._counter.live_bytes

    def micro_batch_done(self) -> None:
        # The others are of the same shapes, one after the other: they have the same peak.
        self.before_optimizer()

    def before_optimizer(self) -> None:
        self.peaks["update"] = self._counter.peak_bytes
        self._counter.__exit__(None, None, None)
        raise Measured


def measure_memory(trainer: FixedWorkTrainer) -> dict[str, Any]:
    """Peak bytes of tensors beside weights, gradients and optimizer states."""
    observer = MemoryObserver(trainer)
    trainer.observer = observer
    trainer.add_callback(StepEvents(observer))
    begin = time.perf_counter()
    with suppress(Measured):
        trainer.train()
    result: dict[str, Any] = {
        "run_seconds": time.perf_counter() - begin,
        "update_bytes": observer.peaks["update"],
        "with_rollout_bytes": max(observer.peaks.values()),
        "weight_bytes": sum(p.untyped_storage().nbytes() for p in trainer.model.parameters()),
    }
    if isinstance(trainer, OurTrainer):
        engine = trainer.engine
        needs_cotangents = engine.config.needs_prompt_backward
        result["state_bytes_per_token"] = engine.decoder.state_bytes(1, needs_cotangents)
        result["held_state_bytes"] = engine.ledger.state_bytes
    return result


class CudaCounter:
    """`PeakTensorBytes` for CUDA, where backwards run in threads that no Python mode sees."""

    def __init__(self, trainer: FixedWorkTrainer) -> None:
        self.trainer = trainer

    def __enter__(self) -> "CudaCounter":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before, self._restarted = torch.cuda.memory_allocated(), False
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated() - self._before

    @property
    def peak_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated()
        if isinstance(self.trainer, OurTrainer):  # the ledger resets the mark at each phase
            early = ("rollout", "capture")
            rows = self.trainer.engine.ledger.table()
            marks = [r for r in rows if (r["phase"] not in early) == self._restarted]
            peak = max([peak, *(int(str(row["peak_bytes"])) for row in marks)])
        return peak - self._before

    @peak_bytes.setter
    def peak_bytes(self, _: int) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._restarted = True


def new_counter(trainer: FixedWorkTrainer) -> Any:
    """What counts bytes on the trainer's device."""
    on_cuda = trainer.accelerator.device.type == "cuda"
    return CudaCounter(trainer) if on_cuda else PeakTensorBytes()


# ---------------------------------------------------------------- the process


def main() -> None:
    """Read the cell, measure it, write the result."""
    cell_file, result_file = map(Path, sys.argv[1:])
    cell = Cell(**json.loads(cell_file.read_text()))
    with suppress(OSError):  # if memory runs out, Linux is to end this process and no other
        Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_num_threads(cell.threads)
    result_file.write_text(json.dumps(measure(cell)))


if __name__ == "__main__":
    main()
