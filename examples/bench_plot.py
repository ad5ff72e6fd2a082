"""The benchmark's one figure: time and memory against the prompt, and the ratios as bars.

Knows records and their summary; knows nothing of how they were measured.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from bench_report import BASES, GIB, MODE_NAMES, TIMES, Measured

matplotlib.use("Agg")  # writes files; needs no display
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import FuncFormatter, NullLocator  # noqa: E402

STYLES = {
    "trl": ("#d9843b", "o", "-"),
    "trl-batch": ("#d9843b", "s", "--"),
    "trl-as-is": ("#a0522d", "v", ":"),
    "exact": ("#2f6db5", "o", "-"),
    "stopped": ("#57a773", "D", "-"),
}
"""Colour, marker and line of each mode."""


def plot(
    records: Sequence[dict[str, Any]],
    summary: dict[str, Any],
    machine: dict[str, Any],
    path: Path,
) -> None:
    """Draw the largest group's results."""
    measured = Measured(records)
    if not measured.groups():
        return
    group = measured.groups()[-1]
    figure, axes = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
    plot_curves(axes[0], measured, group, "time", tuple(TIMES), 1.0, "s")
    axes[0].set(title="Time of one optimizer step", ylabel="seconds (dotted: without rollout)")
    plot_curves(axes[1], measured, group, "memory", tuple(BASES), GIB, "GiB")
    axes[1].set(title="Peak memory of the update")
    axes[1].set_ylabel("GiB beside the weights (dotted: with rollout)")
    plot_ratios(axes[2], summary, group)
    cell = records[0]["cell"]
    figure.suptitle(
        f"GRPO, {group} replies of {cell['response']} tokens to one prompt: LongStraw and stock TRL"
    )
    where = machine["device"] if machine["device"] != "CPU" else machine["processor"]
    name = Path(str(cell["model"])).name
    tuning = "LoRA" if cell["finetune"] == "lora" else "full fine-tuning"
    figure.supxlabel(
        f"{name}, {tuning}, {cell['dtype']}, {where}, {machine['threads']} threads, "
        f"trl {machine['versions']['trl']}; all train on the same replies and rewards",
        fontsize="small",
        color="#555555",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def plot_curves(
    axes: Axes,
    measured: Measured,
    group: int,
    kind: str,
    keys: tuple[str, ...],
    unit: float,
    unit_name: str,
) -> None:
    """A line for each mode, on log axes, with its last value; dotted, the second of `keys`."""
    ticks: set[int] = set()
    for mode in (*measured.modes(ours=False), *measured.modes(ours=True)):
        prompts, values = measured.series(kind, mode, group, keys[0])
        others = measured.series(kind, mode, group, keys[1])[1]
        color, marker, line = STYLES[mode]
        scaled = [value / unit for value in values]
        axes.plot(prompts, scaled, line, color=color, marker=marker, label=MODE_NAMES[mode])
        axes.plot(prompts, [v / unit for v in others], ":", color=color, linewidth=1, marker=".")
        if prompts:
            axes.annotate(
                f"{scaled[-1]:.2g} {unit_name}"
                if scaled[-1] < 10
                else f"{scaled[-1]:,.0f} {unit_name}",
                (prompts[-1], scaled[-1]),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                color=color,
            )
        ticks |= set(prompts)
    axes.set_xlabel("prompt tokens")
    if not ticks:  # log axes need a value
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        return
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sorted(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    plain = FuncFormatter(lambda y, _: f"{y:g}" if f"{y:.1e}"[0] in "125" else "")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
    axes.tick_params(axis="both", which="both", labelsize="small")
    axes.set_xlim(0.85 * min(ticks, default=1), 1.6 * max(ticks, default=1))
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", loc="upper left")


def plot_ratios(axes: Axes, summary: dict[str, Any], group: int) -> None:
    """Bars at the longest prompt that both have: above 1 LongStraw is better."""
    stock = next((row["stock"] for row in summary["ratios"] if row["group"] == group), None)
    bars: list[tuple[str, float, str]] = []
    prompt = 0
    for mode in ("stopped", "exact"):
        rows = [
            row
            for row in summary["ratios"]
            if (row["mode"], row["stock"], row["group"]) == (mode, stock, group)
            and "seconds" in row
        ]
        longest = [
            row
            for row in summary["equal_memory"]
            if (row["mode"], row["stock"], row["group"]) == (mode, stock, group) and row["ratio"]
        ]
        for row in reversed(longest):
            basis = "update" if row["basis"] == "update_bytes" else "with rollout"
            bars.append((f"longer prompt at equal\nmemory, {basis}", row["ratio"], mode))
        if rows:
            prompt = rows[-1]["prompt"]
            bars.append(("faster step\nwithout rollout", rows[-1]["seconds_without_rollout"], mode))
            bars.append(("faster step", rows[-1]["seconds"], mode))
    for height, (_, ratio, mode) in enumerate(bars):
        axes.barh(height, ratio, color=STYLES[mode][0], height=0.7)
        axes.text(ratio, height, f" {ratio:.1f}x", va="center")
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize="small")
    axes.axvline(1, color=STYLES["trl"][0], linewidth=2)
    axes.set_xlim(0, 1.15 * max([1.0, *(ratio for _, ratio, _ in bars)]))
    axes.set_title(f"How many times better, {prompt:,} tokens" if prompt else "Ratios")
    if stock:
        axes.set_xlabel(f"orange line: {MODE_NAMES[stock]}")
    handles = [
        Patch(color=STYLES[mode][0], label=MODE_NAMES[mode]) for mode in ("exact", "stopped")
    ]
    axes.legend(handles=handles, fontsize="small", loc="lower right")
    axes.grid(alpha=0.3, axis="x")
