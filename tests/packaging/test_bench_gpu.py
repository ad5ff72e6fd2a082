"""`make bench-gpu`: the program on tiny shapes, and how it judges an error."""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

from longstraw_kernels.availability import is_triton_installed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.skipif(not is_triton_installed(), reason="Triton is not installed")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("bench_gpu")


def test_it_runs_without_a_gpu_on_tiny_shapes(bench, tmp_path, capsys) -> None:
    assert bench.main(["--tiny", "--output_dir", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "bench_gpu.json").read_text())
    assert all(t["error"] <= 1 and t["triton"] > 0 for t in report["operations"])
    assert {step["impl"] for step in report["steps"]} == {"triton", "reference"}
    printed = capsys.readouterr().out
    assert all(t["name"] in printed for t in report["operations"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_would_run(bench, capsys) -> None:
    assert bench.main([]) == 2
    assert "--tiny" in capsys.readouterr().err


def test_an_error_is_judged_by_that_of_the_plain_definition(bench) -> None:
    """Twice a rounding of the largest value is allowed; NaN is never."""
    rounding = torch.finfo(torch.float32).eps

    def off_by(error: float):
        def compute(inputs, impl):
            return [inputs[0] + (error if impl == "triton" else 0.0)]

        return bench.error_of(compute, [torch.zeros(3).index_fill_(0, torch.tensor(1), 1.0)])

    assert off_by(0.0) == 0
    assert off_by(rounding) == pytest.approx(0.5)
    assert off_by(4 * rounding) == pytest.approx(2)
    assert math.isnan(off_by(math.nan))
    timing = bench.Timing("attention", 1e-3, 2e-3, None, math.nan)
    assert bench.operation_table([timing]).endswith("nan  too large")
