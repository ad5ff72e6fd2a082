"""What a run took and what it brought: a table, a JSON file and a plot.

Knows numbers; knows nothing of how the run was made.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

from memory import Memory

matplotlib.use("Agg")  # writes files; needs no display
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

GIB = 2**30
GREY, BLUE, ORANGE = "#b8b8b8", "#2f6db5", "#d9843b"


@dataclass(frozen=True)
class Summary:
    """All that is reported of a run."""

    settings: dict[str, object]
    prompt_tokens: int  # of the longest prompt
    phases: list[dict[str, object]]  # phase, seconds, tokens, peak_bytes; evaluation included
    seconds: float  # training and evaluation
    before: dict[str, float]  # reward and share of right replies on held-out prompts
    after: dict[str, float]
    state_bytes: int  # most held at a time: pages of the captured prompts and their cotangents
    curves: dict[str, list[float]]  # reward, right, seconds: one value per step
    memory: Memory


def print_table(summary: Summary) -> None:
    """Print phases, memory and reward."""
    print(f"\n{'phase':<16} {'seconds':>8} {'tokens':>9} {'tokens/s':>9} {'peak GiB':>9}")
    for record in summary.phases:
        rate = f"{record['tokens'] / record['seconds']:,.0f}" if record["tokens"] else ""
        print(
            f"{record['phase']:<16} {record['seconds']:>8.1f} {record['tokens']:>9,}"
            f" {rate:>9} {record['peak_bytes'] / GIB:>9.2f}"
        )
    peak = max(record["peak_bytes"] for record in summary.phases)
    print(f"{'all':<16} {summary.seconds:>8.1f} {'':>9} {'':>9} {peak / GIB:>9.2f}\n")
    steps, memory = summary.curves["seconds"], summary.memory
    rows = {
        "prompt tokens": f"{summary.prompt_tokens:,}",
        "prompt state": f"{summary.state_bytes:,} bytes",
        "steps": f"{len(steps)}, {sum(steps) / max(1, len(steps)):.1f} s each",
        "tensors beside weights": f"{memory.longstraw / GIB:.2f} GiB for {memory.num_rows} replies",
        "the same, full sequences": f"{memory.full_checkpointed / GIB:.2f} GiB with gradient "
        f"checkpointing, {memory.full / GIB:.2f} GiB without",
        "held-out reward": f"{summary.before['reward']:.3f} -> {summary.after['reward']:.3f}",
        "held-out right replies": f"{summary.before['right']:.2f} -> {summary.after['right']:.2f}",
    }
    for name, value in rows.items():
        print(f"{name:<26} {value}")


def write_json(summary: Summary, path: Path) -> None:
    """Write all numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(summary), indent=2) + "\n")
    print(f"\nwrote {path}")


def plot(summary: Summary, path: Path) -> None:
    """Draw the reward over the steps, and memory beside that of full sequences."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    plot_reward(left, summary)
    plot_memory(right, summary)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


def plot_reward(axes: Axes, summary: Summary) -> None:
    """Training curves, and the held-out reward at both ends."""
    rewards, shares = summary.curves["reward"], summary.curves["right"]
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, shares, color=ORANGE, linewidth=1, marker=".", label="share of right replies")
    axes.plot(steps, rewards, color=BLUE, linewidth=2, marker="o", markersize=4, label="reward")
    held_out = [summary.before["reward"], summary.after["reward"]]
    axes.plot([0, len(rewards) + 1], held_out, "D", color="black", label="reward, held-out prompts")
    axes.set(xlabel="optimizer step", ylabel="mean of the sampled replies", ylim=(-0.03, 1.05))
    axes.set_title(f"A fact in {summary.prompt_tokens:,} tokens of documents")
    axes.legend(loc="best", fontsize="small")
    axes.grid(alpha=0.3)


def plot_memory(axes: Axes, summary: Summary) -> None:
    """Bars: the weights in grey, what one micro-batch adds in colour."""
    memory = summary.memory
    bars = {
        "LongStraw": (memory.longstraw, BLUE),
        "full sequences,\ncheckpointing": (memory.full_checkpointed, ORANGE),
        "full sequences,\nno checkpointing": (memory.full, ORANGE),
    }
    weights = memory.weights / GIB
    for name, (added, color) in bars.items():
        axes.bar(name, weights, color=GREY, width=0.6)
        axes.bar(name, added / GIB, bottom=weights, color=color, width=0.6)
        total = weights + added / GIB
        axes.text(name, total, f"{total:.1f}", ha="center", va="bottom")
    axes.set(ylabel="peak bytes of tensors, GiB (grey: weights)")
    axes.set_title(f"{memory.num_rows} replies of one prompt in one micro-batch")
    axes.set_xlabel(
        f"LongStraw measured on the group; full sequences on one of {memory.num_tokens:,} tokens,"
        f"\ntimes {memory.num_rows}.",
        fontsize="small",
    )
