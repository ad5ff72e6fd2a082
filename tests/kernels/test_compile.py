"""The command that compiles kernels for GPUs that are not here."""

import json
import os
import subprocess
import sys

import pytest

from longstraw_kernels import compile as command
from longstraw_kernels.availability import is_triton_installed
from longstraw_kernels.compile import OPERATIONS, Usage, names_of, table

pytestmark = pytest.mark.skipif(not is_triton_installed(), reason="Triton is not installed")


def run(*arguments: str, interpret: str = "0") -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own: this one has interpreted kernels."""
    return subprocess.run(
        [sys.executable, "-m", "longstraw_kernels.compile", *arguments],
        env=os.environ | {"TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_kernel_of_each_operation_compiles_without_spills() -> None:
    """The first of each, for one architecture; all of them: `make test-slow`."""
    for operation in OPERATIONS:
        name = names_of(operation)[0]
        found = run("--arch", "90", "--json", "--jobs", "1", "--only", f"{operation}: {name}")
        assert found.returncode == 0, found.stdout + found.stderr
        usage = json.loads(found.stdout)[0]
        assert usage["name"] == name and usage["error"] is None
        assert 16 <= usage["registers"] <= 255 and usage["spilled_bytes"] == 0


@pytest.mark.slow
def test_all_kernels_compile_for_all_architectures() -> None:
    found = run("--json")
    assert found.returncode == 0, found.stdout + found.stderr
    usages = json.loads(found.stdout)
    assert len(usages) == 2 * sum(len(names_of(operation)) for operation in OPERATIONS)
    assert not [u["name"] for u in usages if u["operation"] == "page_attention" if u["may_spill"]]


def test_spills_and_too_much_shared_memory_are_failures() -> None:
    fine = Usage("page_attention", "forward", 90, 255, 1000, 0)
    spilling = Usage("page_attention", "dq", 90, 255, 1000, 16)
    allowed = Usage("page_attention", "dq", 90, 255, 1000, 16, may_spill=True)
    large = Usage("page_attention", "dkv", 80, 255, 170_000, 0)
    broken = Usage("page_attention", "dkv", 90, error="CompilationError: at 3:4")
    assert [u.failure is None for u in (fine, spilling, allowed, large, broken)] == [
        True, False, True, False, False,
    ]  # fmt: skip
    lines = table([fine, spilling, large, broken]).splitlines()
    assert "spills" in lines[2] and "shared memory" in lines[3] and "3:4" in lines[4]
    assert lines[-1] == "4 compiled, 3 failed"


def test_it_ends_with_1_if_a_kernel_fails(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "_why_not", lambda: None)
    monkeypatch.setattr(command, "OPERATIONS", ("page_attention",))
    monkeypatch.setattr(command, "ProcessPoolExecutor", _InThisProcess)
    monkeypatch.setattr(command, "_compile", _no_compiler)
    assert command.main(["--arch", "80", "--only", "dq, bf16, 64/64"]) == 1
    assert "RuntimeError: no compiler" in capsys.readouterr().out


def test_what_cannot_be_compiled_says_why() -> None:
    found = run("--only", "no such kernel")
    assert found.returncode == 2 and "'no such kernel'" in found.stderr
    found = run(interpret="1")
    assert found.returncode == 2 and "unset it" in found.stderr


def _no_compiler(*_: object) -> None:
    raise RuntimeError("no compiler")


class _InThisProcess:
    """An executor without processes, so that what was replaced here is used."""

    def __init__(self, _: int) -> None: ...

    def __enter__(self) -> "_InThisProcess":
        return self

    def __exit__(self, *_: object) -> None: ...

    map = staticmethod(map)
