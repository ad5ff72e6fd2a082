"""What each rank runs: `accelerate launch ... -m tests.deepspeed.worker LAUNCH FOLDER`.

Trains the jobs of one launch, one after another, and writes what this rank ended with to
`FOLDER/NUMBER-RANK.pt`. `FOLDER/models.json` says which jobs, and where the model of each is.
"""

import faulthandler
import gc
import json
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn
from trl import GRPOTrainer

from tests.deepspeed.jobs import Job
from tests.deepspeed.launches import LAUNCHES
from tests.deepspeed.probes import PROBES
from tests.trl.parity import make_trainer, same_micro_batches


def run(job: Job, model_path: Path, out: Path) -> dict[str, Any]:
    """Train, and return what is compared."""
    start = time.monotonic()
    trainer = make_trainer(job.on_a_rank(), model_path, out, longstraw=job.is_ours)
    probe = nullcontext({}) if job.probe is None else PROBES[job.probe](trainer)
    with same_micro_batches(trainer, "as needed"), probe as found:
        trainer.train()
    record: dict[str, Any] = {
        "found": found,
        "after": full_parameters(trainer),
        "logs": trainer.state.log_history,
        "stage": trainer.model_wrapped.zero_optimization_stage(),
        "seconds": time.monotonic() - start,
    }
    if job.is_ours:
        engine = trainer.engine
        record["calls"] = {row["phase"]: row["calls"] for row in engine.ledger.table()}
        record["num_idle"] = engine.lockstep.num_idle
        record["accumulate"] = engine.backend.accumulate
    return record


def full_parameters(trainer: GRPOTrainer) -> dict[str, Tensor]:
    """All parameters, whole and in fp32: of trained ones what the optimizer holds. Collective.

    The weights that the model computes with are these, rounded to its dtype; that is asserted.
    """
    named = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    found = {name: weight.float() for name, weight in weights.items()}
    masters = _unfused_masters(trainer.model_wrapped.optimizer)
    for name, parameter in named.items():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            master = masters.get(parameter)
            master = safe_get_full_fp32_param(parameter) if master is None else master
            found[name] = master.detach().clone()
            assert torch.equal(master.to(parameter.dtype), weights[name]), name
    return found


def _unfused_masters(optimizer: Any) -> dict[nn.Parameter, Tensor]:
    """Masters where the optimizer keeps them one by one, beside the weights (stage 0, bf16)."""
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    return {
        weight: master
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for weight, master in zip(weights, masters, strict=True)
    }


def main(launch: str, folder: Path) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    gc.freeze()  # each training collects garbage, and the modules imported are none
    paths = json.loads((folder / "models.json").read_text())
    for number, (name, path) in enumerate(paths.items()):
        sys.stdout.write(f"=== {name}\n")  # a rank that hangs is reported with its last lines
        record = run(LAUNCHES[launch][name], Path(path), folder / "out")
        rank = torch.distributed.get_rank()
        torch.save(record, folder / f"{number}-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
