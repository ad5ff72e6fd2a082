"""`longstraw doctor`: a fault that is planted is the one that it reports, with what mends it.

The commands run in this process, on this environment, with one thing made wrong at a time. What
else it says (a machine without a GPU is worth a `warn`) is the same with and without the fault.
"""

import importlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from trl import GRPOTrainer

from longstraw.cli import main
from longstraw.cli.checks import versions
from longstraw.cli.checks.implementations import list_implementations
from longstraw.cli.info import PackageInfo

ROOT = Path(__file__).resolve().parents[2]
ZERO2 = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())


class Report(NamedTuple):
    """What the command returned, and its findings by status."""

    code: int
    findings: list[dict[str, str]]

    def of(self, status: str) -> list[dict[str, str]]:
        return [item for item in self.findings if item["status"] == status]


@pytest.fixture
def doctor(capsys, monkeypatch):
    """The command, in JSON, without starting ranks unless asked for."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # set for the tests of kernels

    def run(*arguments: object, ranks: bool = False) -> Report:
        words = ["doctor", "--json", *map(str, arguments), *([] if ranks else ["--no-ranks"])]
        code = main(words)
        return Report(code, json.loads(capsys.readouterr().out)["findings"])

    return run


def the_one(report: Report, status: str = "fail") -> dict[str, str]:
    """The only finding of a status; failures make the exit code 1 and nothing else does."""
    [found] = report.of(status)
    assert found["fix"], f"no fix is given for: {found['found']}"
    assert report.code == (1 if status == "fail" else 0)
    return found


def test_this_environment_has_nothing_to_mend(doctor):
    """So what the tests below see is what they planted."""
    report = doctor()
    assert report.code == 0 and not report.of("fail")
    text = "\n".join(item["found"] for item in report.findings)
    files = [*(ROOT / "ds_configs").rglob("*.json"), *(ROOT / "ds_configs").rglob("*.yaml")]
    count = f"{len(files)} of {len(files)} files"
    for part in ("torch 2", "longstraw_kernels", "log-probs", "trl 1.", count, "gloo"):
        assert part in text


def test_it_reads_as_lines_with_the_fix_below(capsys, monkeypatch, tmp_path):
    """What a person sees; the numbers at the end are those of the lines above."""
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--no-ranks", "--config", "missing.json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("fail  missing.json is not a file")
    assert lines[at + 1] == "      Give the path of a JSON or YAML file."
    assert lines[-1].startswith("1 to mend")


# ---------------------------------------------------------------- versions and names


def test_a_version_out_of_range_is_named_with_the_command_for_another(doctor, monkeypatch):
    outdated = PackageInfo("trl", ">=1.16,<2", "0.9.0", None)
    monkeypatch.setattr(versions, "list_packages", lambda: [outdated])
    found = the_one(doctor())
    assert found["found"] == "trl 0.9.0 is installed; supported is >=1.16,<2"
    assert found["fix"] == "pip install 'trl>=1.16,<2'"


def test_a_driver_that_torch_cannot_use_is_told_from_none(doctor, monkeypatch, tmp_path):
    """With a build for GPUs: no driver is a machine without GPUs, another one has to be mended."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(versions, "NVIDIA_DRIVER", tmp_path / "version")
    assert not doctor().of("fail")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Module  470.57.02  Tue Jul 13\n")
    found = the_one(doctor())
    assert "driver 470.57.02" in found["found"] and "CUDA_VISIBLE_DEVICES" in found["fix"]


def test_a_local_folder_named_kernels_is_found(doctor, monkeypatch, tmp_path):
    """Only with an __init__.py: a bare folder is imported by nobody who has the package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels").mkdir()
    assert not doctor().of("fail")
    (tmp_path / "kernels" / "__init__.py").touch()
    found = the_one(doctor())
    assert str(tmp_path) in found["found"] and "Rename" in found["fix"]


# ---------------------------------------------------------------- implementations


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU it is a failure")
def test_an_interpreter_left_switched_on_is_a_warning(doctor, monkeypatch):
    """Where there is no GPU; "auto" never takes it, so a run is right and a request is slow."""
    before = len(doctor().of("warn"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    report = doctor()
    [found] = [item for item in report.of("warn") if "TRITON_INTERPRET" in item["found"]]
    assert found["fix"].startswith("unset TRITON_INTERPRET")
    assert report.code == 0 and len(report.of("warn")) == before + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton has a driver here")
def test_triton_without_a_driver_is_a_warning(doctor):
    """The tests' environment has Triton for its interpreter and its compiler."""
    pytest.importorskip("triton")
    found = the_one(doctor(), "warn")
    assert "no driver" in found["found"] and "reference" in found["found"]


def test_every_operation_has_an_implementation_and_a_reason():
    """On the CPU by their own choice; fla and causal-conv1d by whether they can be imported."""
    found = {
        item.operation: item for item in list_implementations(torch.device("cpu"), torch.float32)
    }
    assert found.pop("attention").chosen == "torch_flash"
    ours = {name for name, item in found.items() if item.chosen == "reference"}
    assert ours == {"merges", "index scores", "selected attention", "log-probs", "page copies"}
    assert "attention='flash_attn'" in found["flash-attn"].reason
    assert all(item.reason for item in found.values())
    assert "causal-conv1d" in found["its convolution"].reason


# ---------------------------------------------------------------- the trainer


def test_a_seam_of_another_signature_is_found(doctor, monkeypatch):
    """A parameter that the trainer passes by name has another one."""

    def renamed(self: Any, generated_batch: Any) -> Any: ...

    monkeypatch.setattr(GRPOTrainer, "_prepare_inputs", renamed)
    found = the_one(doctor())
    assert "_prepare_inputs has no parameter 'generation_batch'" in found["found"]
    assert "pip install 'trl==" in found["fix"]


def test_a_trainer_that_cannot_be_imported_is_found(doctor, monkeypatch):
    """A TRL so different that its names are gone; the checks after it still run."""

    class Entry(NamedTuple):
        name: str = "trainer"
        value: str = "no_such_module:check"

        def load(self) -> Any:
            return importlib.import_module("no_such_module")

    monkeypatch.setattr("longstraw.cli.doctor.metadata.entry_points", lambda group: [Entry()])
    report = doctor()
    assert "no_such_module cannot be imported" in the_one(report)["found"]
    assert "gloo" in report.findings[-1]["found"]


def changed(**changes: Any) -> str:
    return json.dumps(ZERO2 | changes)


YAML = "compute_environment: LOCAL_MACHINE\nnum_processes: 2\ndistributed_type: "
DEEPSPEED = YAML + "DEEPSPEED\ndeepspeed_config:\n  "


@pytest.mark.parametrize(
    ("name", "text", "found", "fix"),
    [
        (
            "ds.json",
            changed(gradient_accumulation_steps=4),
            '"gradient_accumulation_steps" is 4',
            'Write "gradient_accumulation_steps": "auto"',
        ),
        ("ds.json", changed(fp16={"enabled": True}), '"fp16"', '"enabled": false'),
        (
            "ds.json",
            changed(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}),
            '"device" of "offload_param" of "zero_optimization" is "nvme"',
            'Write "device": "cpu"',
        ),
        ("ds.json", changed(zero_optimisation={}), "zero_optimisation", "zero_optimization"),
        ("ds.json", '{"bf16": {"enabled": "auto"},\n}', "line 2, column 1", "trailing commas"),
        ("ds.json", '{"bf16": 1, "bf16": 2}', '"bf16" stands twice', "Remove one"),
        ("ds.json", "[]", "a list, not an object", "Start from"),
        ("ds.txt", "{}", "ends in .txt", "rename"),
        ("a.yaml", DEEPSPEED + "deepspeed_config_file: no/where.json", "no/where.json", "absolute"),
        ("a.yaml", DEEPSPEED + "gradient_accumulation_steps: 4", "is 4", "auto"),
        ("a.yaml", YAML + "FSDP", "FSDP", "zero3.yaml"),
        ("a.yaml", YAML + "MULTI_GPU\nmixed_precision: fp16", "fp16", "bf16"),
        ("a.yaml", YAML + "MULTI_GPU\nnum_proceses: 2", "'num_proceses'", "Remove it"),
        ("a.yaml", YAML + "[", "not YAML", "Mend"),
    ],
)
def test_a_launch_file_that_would_be_refused_is_found(
    doctor, monkeypatch, tmp_path, name, text, found, fix
):
    """Before a launch, from its text: no process is started and DeepSpeed is not asked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    one = the_one(doctor("--config", name))
    assert found in one["found"] and one["found"].startswith(name)
    assert fix in one["fix"]


def test_a_launch_file_that_works_with_a_loss_is_a_warning(doctor, tmp_path):
    """ZeRO-3 saves no weights without this key; a good file of the user's own has a line."""
    plain = tmp_path / "plain.json"
    plain.write_text(changed(zero_optimization={"stage": 3}))
    good = tmp_path / "good.json"
    good.write_text(changed())
    report = doctor("--config", plain, good)
    [found] = [item for item in report.of("warn") if str(plain) in item["found"]]
    assert "stage3_gather_16bit_weights_on_model_save" in found["found"] and found["fix"]
    assert f"{good}: ZeRO-2" in [item["found"] for item in report.of("ok")]
    assert report.code == 0


# ---------------------------------------------------------------- ranks


@pytest.mark.ranks
def test_two_ranks_add_up(doctor):
    report = doctor(ranks=True)
    assert report.code == 0
    assert any("gloo: 2 ranks joined" in item["found"] for item in report.of("ok"))


@pytest.mark.ranks
def test_a_rank_that_never_joins_is_named_with_where_the_other_waits(doctor, monkeypatch, tmp_path):
    """Rank 1 hangs before its first line: Python runs a file of this name when it starts."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "if 'gloo' in sys.orig_argv and sys.orig_argv[-4] == '1':\n"
        "    time.sleep(600)\n"
    )
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{before}")
    found = the_one(doctor("--rank-seconds", 12, ranks=True))
    assert "rank 1 is stuck before its first line" in found["found"]
    assert "rank 0 is stuck while joining the group" in found["found"]
    assert "GLOO_SOCKET_IFNAME" in found["fix"]


@pytest.mark.ranks
def test_an_interface_that_is_not_there_is_found(doctor, monkeypatch):
    """The usual fault of a cluster: a variable for another machine's network."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such0")
    found = the_one(doctor("--rank-seconds", 30, ranks=True))
    assert "failed while joining the group" in found["found"]


def test_a_time_that_is_none_is_a_mistake_of_usage(capsys):
    assert main(["doctor", "--rank-seconds", "0"]) == 2
    assert "above 0" in capsys.readouterr().out
