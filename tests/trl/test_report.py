"""`longstraw report`: what a run has logged, on one page that needs nothing else."""

import base64
import builtins
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from longstraw.cli import main
from longstraw.cli.run_log import CAPTURES_PER_STEP, read_run
from tests.trl.ingredients import lora
from tests.trl.parity import ModelPath, Setting, train

SVG = "data:image/svg+xml;base64,"


class Page(HTMLParser):
    """What a browser would load, and the headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.headings: list[str] = []
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._tag == "h2" and data.strip():
            self.headings.append(data)


@pytest.fixture(scope="module")
def run_dir(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of a tiny model with an adapter, KL and drift logged, saved after 3 and after 6."""
    folder = tmp_path_factory.mktemp("run")
    options = {"max_steps": 6, "beta": 0.04, "save_strategy": "steps", "save_steps": 3}
    setting = Setting(
        config={**options, "learning_rate": 0.01},
        longstraw={"longstraw_prompt_refresh": "never", "longstraw_log_prompt_drift": True},
        trainer=lora(),
    )
    train(setting, model_path(setting.family, **setting.variant), folder, longstraw=True)
    return folder


def test_a_run_becomes_a_page(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each plot is a picture inside the page, and nothing is loaded from elsewhere."""
    assert main(["report", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert f"wrote {run_dir / 'report.html'}" in out and "Gradient gap" in out
    text = (run_dir / "report.html").read_text()
    page = Page(text)
    drawn, _, rest = "|".join(page.headings).partition("|Left out")
    for title in ("Reward", "KL", "Entropy", "Gradient norm", "Time per phase", "Memory per phase"):
        assert title in drawn
    assert "Prompt drift" in drawn and "Capture reuse" in drawn and rest
    assert len(page.loaded) == len(drawn.split("|"))
    for source in page.loaded:
        assert source.startswith(SVG)
        ElementTree.fromstring(base64.b64decode(source.removeprefix(SVG)))
    assert "Gradient gap: the run did not log" in text
    assert not re.search(r"url\(|@import|<script", text)


def test_the_numbers_are_the_trainers(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the last checkpoint; with --json alone no page is made."""
    (run_dir / "report.html").unlink(missing_ok=True)
    assert main(["report", str(run_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    state = json.loads((run_dir / "checkpoint-6" / "trainer_state.json").read_text())
    assert report["steps"] == 6
    for name in ("reward", "kl", "entropy", "grad_norm", "longstraw/prompt_drift/logps_mean"):
        logged = [entry[name] for entry in state["log_history"] if name in entry]
        assert report["series"][name]["values"] == pytest.approx(logged), name
        assert report["series"][name]["last"] == pytest.approx(logged[-1])
    assert not (run_dir / "report.html").exists()


def test_a_checkpoint_is_a_run_up_to_it(run_dir: Path) -> None:
    assert read_run(run_dir / "checkpoint-3").num_steps == 3


def test_phases_have_time_and_memory(run_dir: Path) -> None:
    """Memory is the process's on the CPU, which Linux tells: above 100 MiB with PyTorch loaded.

    A state that is captured once and kept has no backward pass through the prompt.
    """
    log = read_run(run_dir)
    seconds, peaks = log.named("longstraw/seconds/"), log.named("longstraw/peak_bytes/")
    assert {"capture", "score", "replay"} <= seconds.keys()
    assert seconds.keys() <= peaks.keys()
    assert all(max(series.values) > 100 * 2**20 for series in peaks.values())


def test_captures_are_counted_per_step(tmp_path: Path) -> None:
    """The trainer logs how many there were so far: 2, 2, 5 in all, then a resumed run from 0."""
    write_log(tmp_path, [{"step": n, "longstraw/captures": c} for n, c in [(1, 2), (2, 2), (4, 5)]])
    assert read_run(tmp_path).series[CAPTURES_PER_STEP] == ([1, 2, 4], [2.0, 0.0, 1.5])
    write_log(tmp_path, [{"step": n, "longstraw/captures": c} for n, c in [(5, 9), (6, 1), (7, 3)]])
    assert read_run(tmp_path).series[CAPTURES_PER_STEP] == ([7], [2.0])


def write_log(folder: Path, log: list[dict[str, Any]]) -> None:
    state = {"global_step": 9, "log_history": log}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_what_is_no_number_is_left_out_and_said_so(tmp_path: Path) -> None:
    """NaN of a skipped step, None of a reward that scored nothing; names are escaped."""
    nan = float("nan")
    write_log(tmp_path, [{"step": 1, "reward": 0.5, "grad_norm": nan, "<b>": 1, "kl": None}])
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "a" / "page.html")]) == 0
    text = (tmp_path / "a" / "page.html").read_text()
    assert "<code>grad_norm</code>: 1 values" in text and "<code>kl</code>: 1 values" in text
    assert "&lt;b&gt;" in text and "<b>" not in text


def test_the_same_run_gives_the_same_page(run_dir: Path, tmp_path: Path) -> None:
    """So that pages can be compared, and kept in a repository."""
    pages = [tmp_path / "one.html", tmp_path / "two.html"]
    for page in pages:
        assert main(["report", str(run_dir), "--output", str(page)]) == 0
    assert pages[0].read_bytes() == pages[1].read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no trainer_state.json.*save_steps"),
        ("{", "is not JSON.*earlier checkpoint"),
        ("[]", "has no log_history.*output_dir"),
        ('{"log_history": []}', "empty log_history.*logging_steps"),
    ],
)
def test_a_folder_without_a_log_is_refused(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_missing_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "no-run")]) == 2
    assert "no-run is not a folder" in capsys.readouterr().err


def test_without_matplotlib_the_command_to_install_it_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the numbers can still be had."""
    write_log(tmp_path, [{"step": 1, "reward": 0.5}])
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.endswith("run_plots"):
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install 'longstraw[plot]'" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--json"]) == 0
