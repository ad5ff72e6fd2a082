"""The plots of a run, each as SVG text.

Knows series and how they are drawn; knows nothing of files.
"""

import io
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # writes files; needs no display
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from .run_log import CAPTURES_PER_STEP, RunLog, Series, rewards_by_function  # noqa: E402

GIB = 2**30
COLORS = ("#2f6db5", "#d9843b", "#4f9d69", "#b5495b", "#7a68a6", "#8c7853", "#5b8e9a")
FEW_POINTS = 40
"""Up to so many, each point is marked."""


class Panel(NamedTuple):
    """One plot, or the reason why there is none.

    Attributes:
        title: what it shows.
        note: how to read it.
        svg: the drawing; empty if the series are missing.
        missing: names that were looked for and not found.
    """

    title: str
    note: str
    svg: str
    missing: list[str]


class Plan(NamedTuple):
    """What a panel is drawn from: labels to series, and the names that they were sought under."""

    title: str
    note: str
    unit: str
    lines: Mapping[str, Series]
    sought: tuple[str, ...]
    is_stacked: bool = False
    scale: float = 1.0


def draw_panels(log: RunLog) -> list[Panel]:
    """All panels in order, those without series included."""
    panels = []
    for plan in _plans(log):
        if not plan.lines:
            panels.append(Panel(plan.title, plan.note, "", list(plan.sought)))
            continue
        panels.append(Panel(plan.title, plan.note, _draw(plan), []))
    return panels


def _plans(log: RunLog) -> Iterator[Plan]:
    yield from _learning(log)
    yield from _costs(log)
    yield from _exactness(log)


def _pick(log: RunLog, **names: str) -> dict[str, Series]:
    """Those of the named series that were logged, by label."""
    labels = {label.replace("_", " "): name for label, name in names.items()}
    return {label: log.series[name] for label, name in labels.items() if name in log.series}


def _learning(log: RunLog) -> Iterator[Plan]:
    rewards = _pick(log, reward="reward", spread_in_groups="reward_std", held_out="eval_reward")
    functions = rewards_by_function(log)
    yield Plan(
        "Reward",
        "Mean over all responses, and its standard deviation.",
        "",
        rewards | (functions if len(functions) > 1 else {}),
        ("reward",),
    )
    yield Plan(
        "Loss",
        "TRL's loss, near zero by construction for GRPO; watch the reward.",
        "",
        _pick(log, loss="loss", held_out="eval_loss"),
        ("loss",),
    )
    yield Plan(
        "KL",
        "Policy against the reference; logged where beta is not 0.",
        "nats per token",
        _pick(log, KL="kl"),
        ("kl",),
    )
    yield Plan(
        "Entropy",
        "Of the policy, per token. Towards 0 it stops exploring.",
        "nats",
        _pick(log, entropy="entropy"),
        ("entropy",),
    )
    yield Plan(
        "Gradient norm",
        "Before clipping.",
        "",
        _pick(log, gradient_norm="grad_norm"),
        ("grad_norm",),
    )
    lengths = _pick(log, mean="completions/mean_length", longest="completions/max_length")
    yield Plan(
        "Response length", "Of a generation batch.", "tokens", lengths, ("completions/mean_length",)
    )


def _costs(log: RunLog) -> Iterator[Plan]:
    yield Plan(
        "Time per phase",
        "Of an optimizer step, on the first process; phases lie on each other.",
        "seconds",
        log.named("longstraw/seconds/"),
        ("longstraw/seconds/*",),
        is_stacked=True,
    )
    yield Plan(
        "Memory per phase",
        "Highest so far while a phase ran: allocated on the GPU, or resident on the CPU.",
        "GiB",
        {k: s for k, s in log.named("longstraw/peak_bytes/").items() if max(s.values) > 0},
        ("longstraw/peak_bytes/*",),
        scale=GIB,
    )
    yield Plan(
        "Captured state",
        "Most held so far: pages of prompts and their cotangents.",
        "MiB",
        _pick(log, state="longstraw/state_bytes"),
        ("longstraw/state_bytes",),
        scale=2**20,
    )


def _exactness(log: RunLog) -> Iterator[Plan]:
    yield Plan(
        "Prompt drift",
        "Log-probs on the state in use against one captured now; 0 is exact. Logged with "
        "longstraw_log_prompt_drift=True.",
        "nats",
        _pick(
            log,
            mean="longstraw/prompt_drift/logps_mean",
            largest="longstraw/prompt_drift/logps_max",
            loss="longstraw/prompt_drift/loss",
        ),
        ("longstraw/prompt_drift/*",),
    )
    yield Plan(
        "Gradient gap",
        "Stopped gradient against the exact one: relative distance, and cosine. Logged with "
        "longstraw_log_gradient_gap=True.",
        "",
        _pick(log, distance="longstraw/gradient_gap", cosine="longstraw/gradient_cosine"),
        ("longstraw/gradient_gap", "longstraw/gradient_cosine"),
    )
    yield Plan(
        "Capture reuse",
        "Prompts (and turns, and shared runs) captured per optimizer step; fewer is more reuse. "
        "Age: steps since the state in use was captured.",
        "",
        _pick(log, captures_per_step=CAPTURES_PER_STEP, age_in_steps="longstraw/prompt_age"),
        ("longstraw/captures",),
    )
    yield Plan(
        "Skipped",
        "Responses without a gradient per micro-batch, and steps that changed no weight.",
        "",
        _pick(log, responses="longstraw/members_skipped", steps="longstraw/skipped_steps"),
        ("longstraw/members_skipped", "longstraw/skipped_steps"),
    )


def _draw(plan: Plan) -> str:
    figure, axes = plt.subplots(figsize=(5.2, 2.9), layout="constrained")
    try:
        if plan.is_stacked:
            _draw_stack(axes, plan)
        else:
            _draw_lines(axes, plan)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(plan.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.margins(x=0.02)
        axes.legend(frameon=False, fontsize=8)
        text = io.StringIO()
        # A fixed salt and no date: the same run gives the same file.
        options: Any = {"svg.hashsalt": "longstraw"}
        with matplotlib.rc_context(options):
            figure.savefig(text, format="svg", metadata={"Date": None})
        return text.getvalue()
    finally:
        plt.close(figure)


def _draw_lines(axes: Axes, plan: Plan) -> None:
    for index, (label, series) in enumerate(plan.lines.items()):
        axes.plot(
            series.steps,
            [value / plan.scale for value in series.values],
            color=COLORS[index % len(COLORS)],
            marker="o" if len(series.steps) <= FEW_POINTS else "",
            markersize=3,
            linewidth=1.4,
            label=label,
        )


def _draw_stack(axes: Axes, plan: Plan) -> None:
    """Phases on each other; one that did not run at a step took 0 there."""
    steps = sorted({step for series in plan.lines.values() for step in series.steps})
    rows = []
    for series in plan.lines.values():
        at = dict(zip(series.steps, series.values, strict=True))
        rows.append([at.get(step, 0.0) / plan.scale for step in steps])
    colors = [COLORS[index % len(COLORS)] for index in range(len(rows))]
    if len(steps) > FEW_POINTS:
        axes.stackplot(steps, *rows, labels=list(plan.lines), colors=colors)
        return
    widths = min([b - a for a, b in zip(steps, steps[1:], strict=False)], default=1) * 0.8
    below = [0.0] * len(steps)
    for label, row, color in zip(plan.lines, rows, colors, strict=True):
        axes.bar(steps, row, widths, bottom=below, label=label, color=color)
        below = [a + b for a, b in zip(below, row, strict=True)]
