"""`make bench`: from the command line to the numbers in the file, and the arithmetic in between."""

import json
import string
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import tiny_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BENCH = EXAMPLES / "bench.py"


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch):
    """The files of a benchmark import each other as programs do."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A tiny random model in which every character is a token."""
    folder = tmp_path_factory.mktemp("model")
    words = ["<pad>", "<eos>", "<unk>", *string.printable]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    tiny_model("llama", num_hidden_layers=2, vocab_size=len(words)).save_pretrained(folder)
    return folder


def run_bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the script as a person would."""
    command = [sys.executable, str(BENCH), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def small(model_folder: Path, tmp_path: Path) -> list[object]:
    """Arguments of a benchmark of stock TRL and LongStraw in seconds a cell."""
    arguments = ["--model", model_folder, "--groups", 2, "--response", 4, "--chunk", 32]
    arguments += ["--modes", "trl,exact", "--dtype", "float32", "--min_seconds", 0]
    return [*arguments, "--output_dir", tmp_path]


def test_the_benchmark_times_the_same_work_once(model_folder, tmp_path):
    """Two modes at one prompt: both found the same gradient (fp32: its rounding, 1e-4, tells the
    same work from other work), and a second run measures nothing again."""
    arguments = [*small(model_folder, tmp_path), "--prompts", 64, "--kinds", "time"]
    done = run_bench(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    book = json.loads((tmp_path / "bench.json").read_text())
    assert [cell["status"] for cell in book["cells"]] == ["done"] * 2
    (row,) = book["summary"]["ratios"]
    assert row["grad_norm_difference"] < 1e-4 and row["seconds"] > 0
    for cell in book["cells"]:
        phases = cell["result"]["phases"]
        assert sum(phases.values()) == pytest.approx(cell["result"]["seconds"])
        assert phases["rollout"] > 0 and phases["optimizer"] > 0
    again = run_bench(*arguments)
    assert again.returncode == 0 and again.stdout.count("from ") >= 2


@pytest.mark.slow
def test_the_benchmark_measures_compares_and_draws(model_folder, tmp_path):
    """Two modes at two prompts: all cells, ratios and fits are in the file, both modes found the
    same gradient (fp32: its rounding, 1e-4, tells the same work from other work), the peak follows
    its formula, and a second run measures nothing again."""
    arguments = [*small(model_folder, tmp_path), "--prompts", "64,128"]
    done = run_bench(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    book = json.loads((tmp_path / "bench.json").read_text())
    assert [cell["status"] for cell in book["cells"]] == ["done"] * 8
    summary = book["summary"]
    assert [row["prompt"] for row in summary["ratios"]] == [64, 128]
    for row in summary["ratios"]:
        assert row["grad_norm_difference"] < 1e-4
        assert row["seconds"] > 0 and row["with_rollout_bytes"] > 0
    assert len(summary["growth"]) == 4  # two modes, with rollout and without
    assert {row["basis"] for row in summary["equal_memory"]} == {
        "update_bytes",
        "with_rollout_bytes",
    }
    assert [abs(row["deviation"]) < 0.03 for row in summary["peak_formula"]] == [True]
    for cell in book["cells"]:
        if cell["cell"]["kind"] == "time":
            phases = cell["result"]["phases"]
            assert sum(phases.values()) == pytest.approx(cell["result"]["seconds"])
            assert phases["rollout"] > 0 and phases["optimizer"] > 0
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    assert "gradient norms" in done.stdout
    again = run_bench(*arguments)
    assert again.returncode == 0 and again.stdout.count("from ") >= 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes", "trl,fast"], "unknown 'fast'; known: trl,"),
        (["--prompts", "1k"], "'1k' is not a list of numbers"),
        (["--groups", "2,,8"], "'2,,8' is not a list of numbers"),
        (["--groups", "1"], "at least 2 replies"),
        (["--profile", "--modes", "trl"], "give --modes exact"),
    ],
)
def test_a_mistake_on_the_command_line_ends_with_code_2(arguments, said, capsys):
    """Before anything is loaded, with the words to use instead."""
    import bench

    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments)
    assert said in capsys.readouterr().err


def test_a_cell_that_would_take_too_long_is_said_to_be_skipped(tmp_path, capsys):
    """It is never filled in: no result, and a line in the tables."""
    import bench
    from bench_report import report, summarize

    book = bench.ResultBook(tmp_path / "bench.json")
    cell = {"kind": "time", "mode": "trl", "prompt": 1000, "group": 8, "replay_batch": 8}
    for prompt, seconds in ((1000, 100.0), (2000, 300.0)):  # 50 s per 1,000 and 50 per its square
        result = {"seconds": seconds}
        book.add({**cell, "prompt": prompt}, status="done", result=result, commit=None)
    long = {**cell, "prompt": 8000, "group": 4}
    bench.measure_one(book, long, "[1/1]", bench.parse(["--max_minutes", "29"]))
    # (50 * 8 + 50 * 64) s for 8 replies, half for 4: 30 minutes.
    assert "skipped, it would take about 30 min" in capsys.readouterr().out
    record = book.find(long)
    assert record["status"] == "skipped" and "result" not in record
    assert "skipped, predicted 30 min" in report([record], summarize([record]))


def test_the_figure_shows_what_was_measured(tmp_path):
    """Times alone (`--kinds time`): the panel of memory says that there is none."""
    from bench_plot import plot
    from bench_report import summarize

    cell = {"kind": "time", "prompt": 64, "group": 2, "response": 4, "model": "m"}
    cell |= {"finetune": "lora", "dtype": "float32"}
    result = {"seconds": 2.0, "seconds_without_rollout": 1.0, "grad_norm": 1.0}
    records = [
        {"cell": {**cell, "mode": mode}, "status": "done", "result": result}
        for mode in ("trl", "exact")
    ]
    machine = {"device": "CPU", "processor": "p", "threads": 1, "versions": {"trl": "1"}}
    plot(records, summarize(records), machine, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_a_crash_and_a_lack_of_memory_are_results(tmp_path, monkeypatch):
    """Told apart, since one is an answer and the other a mistake."""
    import bench

    (tmp_path / "bench_cell.py").write_text(
        "import json, os, sys\n"
        "cell = json.load(open(sys.argv[1]))\n"
        "if cell['mode'] == 'killed': os.kill(os.getpid(), 9)\n"
        "raise (RuntimeError if cell['mode'] == 'broken' else MemoryError)('that was it')\n"
    )
    monkeypatch.setattr(bench, "HERE", tmp_path)
    runs = {m: bench.run_cell({"mode": m, "threads": 1}) for m in ("killed", "broken", "full")}
    assert runs["killed"].status == runs["full"].status == "out of memory"
    assert runs["broken"].status == "failed" and "that was it" in runs["broken"].log


def test_the_growth_is_taken_apart_into_its_terms():
    """Exact points give the terms back; a term that would be negative is left out."""
    from bench_fit import fit_growth

    prompts = [1024, 2048, 4096, 8192]
    growth = fit_growth(prompts, [3 + 2e-3 * p + 5e-7 * p**2 for p in prompts])
    assert growth.fixed == pytest.approx(3, rel=1e-6)
    assert growth.linear == pytest.approx(2e-3, rel=1e-6)
    assert growth.attention == pytest.approx(5e-7, rel=1e-6)
    assert growth.worst < 1e-9
    bent = fit_growth(prompts, [p**0.5 for p in prompts])
    assert min(bent.fixed, bent.linear, bent.attention) >= 0 and bent.worst > 0.01
    two = fit_growth([1000, 2000], [3.0, 8.0])
    assert (two.fixed, two.worst) == (0, None) and two.seconds(2000) == pytest.approx(8)
    assert fit_growth([1000], [3.0]) is None


def test_the_prompt_at_equal_memory_is_read_off_the_line():
    """100 bytes and 2 a token against a budget of 900: 400 tokens, twice a baseline of 200."""
    from bench_fit import longest_prompt

    found = longest_prompt([100, 300], [300, 700], baseline=200, budget=900)
    assert found.prompt == pytest.approx(400) and found.ratio == pytest.approx(2)
    assert found.is_extrapolated
    inside = longest_prompt([100, 300], [300, 700], baseline=200, budget=500)
    assert inside.prompt == pytest.approx(200) and not inside.is_extrapolated
    assert longest_prompt([100, 300], [300, 700], baseline=200, budget=90) is None
    assert longest_prompt([100], [300], baseline=200, budget=900) is None


def test_a_prediction_follows_the_measured_curve():
    """Longer prompts do not count; one point grows as P^1.5."""
    from bench_fit import predict_seconds

    assert predict_seconds([(1000, 2.0)], 4000) == pytest.approx(16)
    assert predict_seconds([(1000, 2.0), (8000, 1.0)], 4000) == pytest.approx(16)
    assert predict_seconds([(8000, 1.0)], 4000) is None
