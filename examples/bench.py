"""Stock TRL and LongStraw side by side: time and memory of one optimizer step, in one run.

    python examples/bench.py                                     # about half an hour on a core
    python examples/bench.py --prompts 1024,2048,4096,8192,16384 --groups 2,4,8 --max_minutes 20
    python examples/bench.py --profile --prompts 4096 --groups 8 --modes exact

All modes train the same model on the same prompt, replies and rewards. Each cell of the table is
measured in a process of its own, whose failure is a result like any other. Results are kept in
`bench.json` and taken from there at the next run. A cell that is predicted to take too long is left
out, and the tables say so.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

from bench_fit import predict_seconds

HERE = Path(__file__).resolve().parent
MODES = ("trl", "trl-batch", "trl-as-is", "exact", "stopped")
KINDS = ("time", "memory")
OUT_OF_MEMORY = ("can't allocate memory", "OutOfMemoryError", "MemoryError")


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing, then print and draw everything.

    Returns:
        Exit code: 0, or 1 if a cell failed for another reason than memory or time.
    """
    options = parse(arguments)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    settings = settle(options)
    if options.profile:
        return profile(options, settings)
    book = ResultBook(options.output_dir / "bench.json")
    book.settings, book.machine = settings, describe_machine(settings["threads"])
    print("\n".join(headline(book)), flush=True)
    cells = list(list_cells(options, settings))
    for number, cell in enumerate(cells, start=1):
        measure_one(book, cell, f"[{number}/{len(cells)}]", options)

    from bench_plot import plot  # matplotlib, only now
    from bench_report import report, summarize

    book.summary = summarize(records := book.of(cells))
    book.write()
    print(report(records, book.summary))
    plot(records, book.summary, book.machine, options.output_dir / "bench.png")
    print(f"\nwrote {book.path} and {options.output_dir / 'bench.png'}")
    return int(any(record["status"] == "failed" for record in records))


# ---------------------------------------------------------------- options


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; a mistake ends the program with exit code 2."""
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prompts", type=numbers, default=[512, 1024, 2048], help="prompt tokens, P (1024,2048)")
    add("--groups", type=numbers, default=[8], help="replies to a prompt, G (2,4,8)")
    add("--modes", type=names(MODES), default=["trl", "exact", "stopped"], help=", ".join(MODES))
    add("--kinds", type=names(KINDS), default=list(KINDS), help="what to measure: time,memory")
    add("--response", type=int, default=64, help="tokens of each reply, R")
    add("--model", help="Hub id or folder; default: SmolLM2-135M-Instruct from its wheel")
    add("--finetune", choices=["lora", "full"], default="lora", help="LoRA r=16 on all layers")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="auto: faster one")
    add("--chunk", type=int, default=512, help="LongStraw: tokens run at a time")
    add(
        "--replay_batch",
        type=int,
        help="LongStraw: replies replayed at once; default: half a chunk",
    )
    add("--checkpointing", action="store_true", help="LongStraw: gradient checkpointing as well")
    add("--threads", type=int, help="CPU threads; default: torch's")
    add("--min_seconds", type=float, default=10, help="repeat a step until this, at most 3 times")
    add("--max_minutes", type=float, default=6, help="skip cells predicted to take longer")
    add("--force", action="store_true", help="measure again what was measured before")
    add("--profile", action="store_true", help="operators of one step of each LongStraw cell")
    add("--output_dir", type=Path, default=Path("out"), help="of bench.json and bench.png")
    options = parser.parse_args(arguments)
    ours = [mode for mode in options.modes if not mode.startswith("trl")]
    if options.profile and not ours:
        parser.error("--profile shows LongStraw's operators: give --modes exact or --modes stopped")
    if min(options.groups) < 2:
        parser.error(f"--groups {min(options.groups)}: GRPO compares at least 2 replies")
    return options


def numbers(text: str) -> list[int]:
    """A list like 1024,2048 in rising order."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 1024,2048")
    return found


def names(known: tuple[str, ...]) -> Any:
    """Makes a function that reads a list of some of the `known` names, in their order."""

    def read(text: str) -> list[str]:
        given = text.split(",")
        unknown = [name for name in given if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}; known: {', '.join(known)}")
        return [name for name in known if name in given]

    return read


def settle(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that all cells share, with what depends on the machine decided."""
    import torch

    from quickstart import choose_dtype
    from smollm2 import load_smollm2

    if options.threads:
        torch.set_num_threads(options.threads)
    return {
        "response": options.response,
        "model": options.model or str(load_smollm2()),
        "finetune": options.finetune,
        "dtype": str(choose_dtype(options.dtype)).removeprefix("torch."),
        "chunk": options.chunk,
        "checkpointing": options.checkpointing,
        "threads": torch.get_num_threads(),
        "min_seconds": options.min_seconds,
        "max_steps": 3,
    }


def list_cells(options: argparse.Namespace, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The cells, short prompts first: they tell how long the others will take."""
    every = product(options.prompts, options.groups, options.modes, options.kinds)
    for prompt, group, mode, kind in every:
        # By default the tokens of half a chunk: their graph and their logits are not the peak then.
        fitting = max(1, min(group, options.chunk // 2 // options.response))
        yield {
            "kind": kind,
            "mode": mode,
            "prompt": prompt,
            "group": group,
            "replay_batch": options.replay_batch or fitting,
            **settings,
        }


# ---------------------------------------------------------------- results


class ResultBook:
    """Everything measured so far, in a file that is written after each cell.

    Attributes:
        records: one per cell: `cell`, `status` ("done", "skipped", "out of memory", "too slow",
            "failed"), `result`, `wall` seconds of the process, `commit`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: dict[str, Any] = {}
        self.machine: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []
        if path.exists():
            self.records = json.loads(path.read_text())["cells"]

    def find(self, cell: dict[str, Any]) -> dict[str, Any] | None:
        """The record of exactly this cell."""
        return next((r for r in self.records if r["cell"] == cell), None)

    def of(self, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The records of these cells, in their order."""
        return [record for cell in cells if (record := self.find(cell))]

    def add(self, cell: dict[str, Any], **record: Any) -> dict[str, Any]:
        """Put a record in place of an earlier one of the same cell, and write."""
        self.records = [r for r in self.records if r["cell"] != cell]
        self.records.append({"cell": cell, **record})
        self.write()
        return self.records[-1]

    def write(self) -> None:
        """Write all, in one rename: an interrupted run leaves a whole file."""
        content = {
            "settings": self.settings,
            "machine": self.machine,
            "summary": self.summary,
            "cells": self.records,
        }
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1) + "\n")
        draft.replace(self.path)


def describe_machine(threads: int) -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = lines[0].partition(":")[2].strip() if lines else processor
    packages = ("torch", "transformers", "trl", "accelerate", "peft")
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "processor": processor,
        "threads": threads,
        "versions": {name: metadata.version(name) for name in packages},
        "commit": find_commit(),
    }


def find_commit() -> str | None:
    """The checkout's commit, with + if files differ from it; None outside of a checkout."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def headline(book: ResultBook) -> list[str]:
    """What is measured, on what."""
    settings, machine = book.settings, book.machine
    return [
        f"model {settings['model']}, {settings['finetune']} fine-tuning, {settings['dtype']}",
        f"{machine['device']}, {machine['processor']}, {machine['threads']} threads, "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        f"replies of {settings['response']} tokens; LongStraw: chunks of {settings['chunk']}, "
        f"gradient checkpointing {'on' if settings['checkpointing'] else 'off'}; "
        "TRL: gradient checkpointing on",
    ]


# ---------------------------------------------------------------- one cell


@dataclass(frozen=True)
class Run:
    """How a cell's process ended."""

    status: str
    wall: float
    result: dict[str, Any] | None
    log: str


def measure_one(
    book: ResultBook, cell: dict[str, Any], number: str, options: argparse.Namespace
) -> None:
    """Take the cell from the book, leave it out, or run it; say which."""
    title = f"{number} {cell['mode']:<9} P={cell['prompt']:,} G={cell['group']} {cell['kind']}"
    held = None if options.force else book.find(cell)
    if held and held["status"] in ("done", "out of memory"):
        print(f"{title}: from {book.path}, commit {held['commit']}", flush=True)
        return
    expected = predict(book, cell)
    if expected is not None and expected > 60 * options.max_minutes:
        print(f"{title}: skipped, it would take about {expected / 60:.0f} min", flush=True)
        book.add(cell, status="skipped", predicted_seconds=expected, commit=find_commit())
        return
    about = "" if expected is None else f", about {expected:.0f} s and the start"
    print(f"{title}{about} ...", flush=True)
    run = run_cell(cell, timeout=max(600.0, 120 * options.max_minutes))
    book.add(cell, **asdict(run), commit=find_commit())
    print(f"    {describe_result(run)}", flush=True)


def predict(book: ResultBook, cell: dict[str, Any]) -> float | None:
    """Seconds that the cell will take, from shorter prompts of its mode; None without any.

    Stock TRL's steps grow with the group; LongStraw's hardly do. Nearest group first.
    """
    same = {k: v for k, v in cell.items() if k not in ("prompt", "group", "replay_batch")}
    points: dict[int, list[tuple[int, float]]] = {}
    for record in book.records:
        other = record["cell"]
        if record["status"] == "done" and same.items() <= other.items():
            result = record["result"]
            seconds = result["seconds" if "seconds" in result else "run_seconds"]
            points.setdefault(other["group"], []).append((other["prompt"], seconds))
    for group in sorted(points, key=lambda g: abs(g - cell["group"])):
        seconds = predict_seconds(points[group], cell["prompt"])
        if seconds is not None:
            is_stock_time = cell["mode"].startswith("trl") and cell["kind"] == "time"
            return seconds * (cell["group"] / group if is_stock_time else 1)
    return None


def run_cell(cell: dict[str, Any], timeout: float | None = None) -> Run:
    """Run one cell in a fresh process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cell.json").write_text(json.dumps(cell))
        command = [sys.executable, str(HERE / "bench_cell.py"), "cell.json", "result.json"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(cell["threads"])}
        begin = time.perf_counter()
        with open(folder / "log", "w") as log:
            try:
                done = subprocess.run(
                    command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=timeout
                )
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = None
        wall = time.perf_counter() - begin
        text = (folder / "log").read_text(errors="replace")
        result = folder / "result.json"
        if code == 0 and result.exists():
            return Run("done", wall, json.loads(result.read_text()), "")
    if code is None:
        return Run("too slow", wall, None, "")
    # -9: Linux ends the process that takes the most memory, here always this one (see bench_cell).
    # Unindented lines are messages; the others may be source that only names these errors.
    messages = [line for line in text.splitlines() if not line.startswith(" ")]
    is_memory = code == -9 or any(sign in line for sign in OUT_OF_MEMORY for line in messages)
    return Run("out of memory" if is_memory else "failed", wall, None, text[-3000:])


def describe_result(run: Run) -> str:
    """One line for the one who waits."""
    if run.result is None:
        return f"{run.status} after {run.wall:.0f} s\n{run.log}".rstrip()
    if "seconds" in run.result:
        steps = len(run.result["all_seconds"])
        return f"{run.result['seconds']:.1f} s a step (median of {steps} measured)"
    peak, both = run.result["update_bytes"], run.result["with_rollout_bytes"]
    return f"peak beside the weights: {peak / 2**30:.3f} GiB, with rollout {both / 2**30:.3f} GiB"


# ---------------------------------------------------------------- profile


def profile(options: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Print the operators of each LongStraw cell, and write them beside the results."""
    from bench_profile import profile_text

    options.kinds = ["profile"]
    options.modes = [mode for mode in options.modes if not mode.startswith("trl")]
    code = 0
    for cell in list_cells(options, settings):
        name = f"profile-{cell['mode']}-P{cell['prompt']}-G{cell['group']}"
        print(f"{name}: one step and minutes of adding up its operators ...", flush=True)
        run = run_cell(cell)
        if run.result is None:
            print(describe_result(run))
            code = 1
            continue
        text = profile_text(run.result)
        print(text)
        (options.output_dir / f"{name}.txt").write_text(text + "\n")
        (options.output_dir / f"{name}.json").write_text(json.dumps(asdict(run), indent=1) + "\n")
        print(f"\nwrote {options.output_dir / name}.txt and .json")
    return code


if __name__ == "__main__":
    sys.exit(main())
