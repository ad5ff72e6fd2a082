"""What the process of `test_one_rank` runs: `python -m tests.deepspeed.one_rank MODEL OUT`.

On a GPU, or on the CPU where there is none: each stage in full and LoRA, pages on the model's
device and on the host. Writes `OUT/result.pt`.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tests.deepspeed.jobs import OFFLOAD, STAGES, Cell, Job
from tests.deepspeed.worker import run

PAGES = ("model", "host")
CELLS = {
    "full": Cell("full", "exact", "fp32", 1),
    "LoRA": Cell("LoRA", "exact", "fp32", 1),
    "full, bf16": Cell("full", "exact", "bf16", 1),
}
RESULT = "result.pt"


def jobs() -> dict[str, Job]:
    """By name."""
    found = {}
    for stage, (name, cell), pages in product(STAGES, CELLS.items(), PAGES):
        setting = cell.setting().but(use_cpu=not torch.cuda.is_available())
        longstraw = {**setting.longstraw, "longstraw_page_device": pages}
        job = Job(replace(setting, longstraw=longstraw), stage)
        found[f"ZeRO-{stage}, {name}, pages: {pages}"] = job
    offload = {"offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}
    found["ZeRO-3, full, offload"] = replace(found["ZeRO-3, full, pages: host"], zero=offload)
    return found


def main(model: Path, out: Path) -> None:
    records: dict[str, Any] = {}
    for name, job in jobs().items():
        sys.stdout.write(f"=== {name}\n")
        record = run(job, model, out / "training")
        after = {parameter: value.cpu() for parameter, value in record["after"].items()}
        records[name] = {"after": after, "logs": record["logs"]}
    torch.save(records, out / RESULT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
