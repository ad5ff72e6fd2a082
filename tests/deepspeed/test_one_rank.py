"""One process under DeepSpeed, on the CPU and on a GPU.

On a GPU this is what shows NCCL, CUDA streams and pinned pages together with ZeRO; what several
ranks compute is shown on the CPU by the other tests here.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.deepspeed.one_rank import CELLS, RESULT, jobs
from tests.trl.parity import TOLERANCE, ModelPath, Outcome, train, worst_parameter
from tests.trl.ranks import free_port, patience, rank_environment

# Two ranks on the CPU show what one does, and more.
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
Records = Callable[[str], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def records(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """`records(device)`: what each job ended with there; all in one process."""
    found: dict[str, Any] = {}

    def on(device: str) -> dict[str, dict[str, Any]]:
        if device not in found:
            out = tmp_path_factory.mktemp(device)
            environment = rank_environment(0, 1, free_port())
            if device == "cuda":
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
                environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
            command = [sys.executable, "-m", "tests.deepspeed.one_rank"]
            command += [str(model_path(num_hidden_layers=2)), str(out)]
            subprocess.run(command, env=environment, timeout=patience(300), check=True)
            found[device] = torch.load(out / RESULT)
        return found[device]

    return on


@pytest.fixture(scope="module")
def truths(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Stock TRL on the CPU in fp32, in full and LoRA."""
    path, out = model_path(num_hidden_layers=2), tmp_path_factory.mktemp("truth")
    return {
        name: train(CELLS[name].setting(), path, out, longstraw=False) for name in ("full", "LoRA")
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in jobs() if "bf16" not in name])
def test_one_process_ends_where_stock_trl_ends(
    name: str, device: str, records: Records, truths: dict[str, Outcome]
) -> None:
    """In fp32, each parameter within 1e-4 of its movement (TF32 is off by default)."""
    truth = truths["LoRA" if "LoRA" in name else "full"]
    worst = worst_parameter(records(device)[name]["after"], truth)
    assert worst[0] <= TOLERANCE, worst


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in jobs() if "bf16, pages: model" in name])
def test_where_pages_live_does_not_show_in_bf16(name: str, device: str, records: Records) -> None:
    """Not in a single bit: they are copied, and added to in fp32 on both sides."""
    found = records(device)
    here, host = found[name]["after"], found[name.replace("pages: model", "pages: host")]["after"]
    for parameter, value in here.items():
        assert value.isfinite().all()
        assert torch.equal(value, host[parameter]), parameter
