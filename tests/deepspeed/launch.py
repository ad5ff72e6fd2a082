"""Running a launch of `jobs` on its ranks, and the one-process run it is compared with."""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.deepspeed.jobs import WORLD_SIZE, zero_config
from tests.deepspeed.launches import LAUNCHES
from tests.trl.parity import ModelPath
from tests.trl.ranks import run_accelerate

Records = dict[str, list[dict[str, Any]]]
"""What each rank left, by job."""


def run_launch(
    name: str,
    model_path: ModelPath,
    folder: Path,
    *,
    timeout: float,
    only: Container[str] | None = None,
) -> Records:
    """Train the jobs of a launch, or `only` some, with one `accelerate launch`."""
    jobs = {job: LAUNCHES[name][job] for job in LAUNCHES[name] if only is None or job in only}
    settings = {job: jobs[job].setting for job in jobs}
    paths = {job: str(model_path(s.family, **s.variant)) for job, s in settings.items()}
    (folder / "models.json").write_text(json.dumps(paths))
    # Of the jobs that are not configured by the launcher each brings its own configuration.
    stages = {job.stage for job in jobs.values() if job.from_launcher} or {0}
    (stage,) = stages
    (world_size,) = {job.world_size for job in jobs.values()}
    config = write_accelerate_config(folder, stage, world_size)
    arguments = ["-m", "tests.deepspeed.worker", name, str(folder)]
    run_accelerate(arguments, world_size, config, folder / "logs", timeout=timeout)
    return {
        job: [torch.load(folder / f"{number}-{rank}.pt") for rank in range(world_size)]
        for number, job in enumerate(jobs)
    }


def write_accelerate_config(folder: Path, stage: int, world_size: int = WORLD_SIZE) -> Path:
    """A configuration like those in `ds_configs/accelerate`, for processes on CPUs."""
    json_file = folder / "zero.json"
    json_file.write_text(json.dumps(zero_config(stage)))
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": str(json_file),
            "zero3_init_flag": stage == 3,
        },
        "machine_rank": 0,
        "num_machines": 1,
        "num_processes": world_size,
    }
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
