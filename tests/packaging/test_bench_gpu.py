"""`make bench-gpu`: the program on tiny shapes, and how it judges an error."""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

from longstraw_kernels.availability import is_triton_installed
from longstraw_kernels.compile import OPERATIONS

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
    assert {t["operation"] for t in report["operations"]} == set(OPERATIONS)


def test_every_operation_of_the_kernels_has_a_row(bench) -> None:
    """By the names of their folders."""
    rows = {case.operation for case in bench.list_cases(torch.device("cpu"), bench.TINY)}
    missing, unknown = set(OPERATIONS) - rows, rows - set(OPERATIONS)
    assert not missing and not unknown, f"no row: {missing}, no operation: {unknown}"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_wrong_result_of_any_operation_is_an_error_above_1(bench, operation) -> None:
    """The largest number of one of its results a tenth off, or NaN."""
    cases = bench.list_cases(torch.device("cpu"), bench.TINY)
    for case in (case for case in cases if case.operation == operation):
        exact = case.compute(case.inputs, "reference")
        for place in range(len(exact)):
            for factor in (1.1, math.nan):
                assert not bench.error_of(spoiled(case, exact, place, factor), case.inputs) <= 1


def spoiled(case, exact, place: int, factor: float):
    """What a case computes, except that "triton" gives the reference's with one number wrong."""

    def compute(inputs, impl):
        if impl == "reference":
            return case.compute(inputs, impl)
        found = [x.clone() for x in exact]
        flat = found[place].view(-1)
        flat[flat.abs().argmax()] *= factor
        return found

    return compute


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
    timing = bench.Timing("page_attention", "attention", 1e-3, 2e-3, None, math.nan)
    assert bench.operation_table([timing]).endswith("nan  too large")
