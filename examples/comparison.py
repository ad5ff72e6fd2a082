"""Two gradients compared over seeds: statistics, a table, a JSON file and a plot.

Knows runs as lists of rewards; knows nothing of how they were made.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("Agg")  # writes files; needs no display
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

COLORS = {"exact": "#2f6db5", "stopped": "#d9843b"}
GREY = "#8a8a8a"
SMOOTHED_STEPS = 5
"""Curves are drawn as the mean of this many steps; the table and the JSON file are not smoothed."""

MAX_GRAD_NORM = 1.0
"""Longer gradients are cut to this length, as by default in TRL."""


@dataclass(frozen=True)
class HeldOut:
    """Mean reward of replies to prompts that no training saw."""

    sampled: float  # of replies sampled as in training
    greedy: float  # of the likeliest replies


@dataclass(frozen=True)
class Run:
    """One training run."""

    prompt_gradient: str  # "exact" or "stopped"
    lr_scale: float  # its learning rate, as a multiple of the one that is compared
    prompt_tokens: int
    seed: int  # of the prompts and of the sampling
    rewards: list[float]  # mean of each step's replies
    grad_norms: list[float]  # of each step, before clipping
    before: HeldOut
    after: HeldOut
    prompts_digest: str  # of all prompts in their order
    first_replies_digest: str  # of the replies of step 1
    seconds: float  # of the training
    steps_scale: float = 1.0  # its steps, as a multiple of those that are compared

    @property
    def kind(self) -> tuple[str, float, float]:
        """What tells the runs of one prompt length and seed apart."""
        return self.prompt_gradient, self.lr_scale, self.steps_scale

    @property
    def name(self) -> str:
        """As in the table: the gradient, and the learning rate and steps if they are others."""
        rate = "" if self.lr_scale == 1.0 else f", learning rate x {self.lr_scale:g}"
        steps = "" if self.steps_scale == 1.0 else f", steps x {self.steps_scale:g}"
        return self.prompt_gradient + rate + steps


@dataclass(frozen=True)
class Spread:
    """A quantity over seeds."""

    mean: float
    std: float  # of a sample (n - 1); 0 for one seed
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarize one value per seed, at least one."""
        std = stdev(values) if len(values) > 1 else 0.0
        return cls(mean(values), std, min(values), max(values))

    def __str__(self) -> str:
        return f"{self.mean:.2f} +- {self.std:.2f}"


# --- statistics --------------------------------------------------------------------------------


def cut(length: int, num_parts: int) -> list[slice]:
    """`length` things in consecutive parts, as equal as they can be and none empty.

    There are as many parts as things if `num_parts` is more than that.
    """
    num_parts = min(num_parts, length)
    ends = [round(i * length / num_parts) for i in range(num_parts + 1)]
    return [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]


def fifths(rewards: Sequence[float]) -> list[float]:
    """Means over five consecutive parts of a run."""
    return [mean(rewards[part]) for part in cut(len(rewards), 5)]


def smooth(rewards: Sequence[float], num_steps: int = SMOOTHED_STEPS) -> list[float]:
    """Mean of each step and of up to `num_steps - 1` before it."""
    return [mean(rewards[max(0, i - num_steps + 1) : i + 1]) for i in range(len(rewards))]


def check_pairs(exact: Sequence[Run], stopped: Sequence[Run]) -> None:
    """See that two lists of runs differ in the gradient alone.

    Raises:
        RuntimeError: a seed has one run only, or its two runs were given other prompts, or did not
            sample the same replies in step 1, when they still had the same weights.
    """
    if [run.seed for run in exact] != [run.seed for run in stopped]:
        raise RuntimeError(
            f"seeds {[run.seed for run in exact]} and {[run.seed for run in stopped]} are not "
            "pairs. Every seed needs a run of each gradient."
        )
    for a, b in zip(exact, stopped, strict=True):
        for what in ("prompts_digest", "first_replies_digest", "before"):
            if getattr(a, what) != getattr(b, what):
                raise RuntimeError(
                    f"{what} of seed {a.seed} at {a.prompt_tokens:,} tokens is "
                    f"{getattr(a, what)} with the exact gradient and {getattr(b, what)} with the "
                    "stopped one, and has to be the same. Delete both result files and run again, "
                    "on one machine and with one set of versions."
                )


@dataclass(frozen=True)
class Row:
    """One line of the table: a kind of run, or the difference of two, over seeds."""

    name: str
    fifths: list[Spread]
    sampled: Spread
    greedy: Spread

    def cells(self) -> list[str]:
        """The line as text."""
        return [self.name, *map(str, self.fifths), str(self.sampled), str(self.greedy)]


def summarize(name: str, runs: Sequence[Run]) -> Row:
    """Means and spreads of runs that differ in the seed alone."""
    return Row(
        name,
        [Spread.of(part) for part in zip(*(fifths(run.rewards) for run in runs), strict=True)],
        Spread.of([run.after.sampled for run in runs]),
        Spread.of([run.after.greedy for run in runs]),
    )


def summarize_pairs(exact: Sequence[Run], stopped: Sequence[Run]) -> Row:
    """Exact minus stopped within each seed, then mean and spread over seeds."""
    parts = [
        [a - b for a, b in zip(fifths(x.rewards), fifths(y.rewards), strict=True)]
        for x, y in zip(exact, stopped, strict=True)
    ]
    pairs = list(zip(exact, stopped, strict=True))
    return Row(
        "exact - stopped",
        [Spread.of(part) for part in zip(*parts, strict=True)],
        Spread.of([x.after.sampled - y.after.sampled for x, y in pairs]),
        Spread.of([x.after.greedy - y.after.greedy for x, y in pairs]),
    )


@dataclass(frozen=True)
class Comparison:
    """The runs of one prompt length."""

    runs: list[Run]

    def of(
        self, prompt_gradient: str, lr_scale: float = 1.0, steps_scale: float = 1.0
    ) -> list[Run]:
        """Runs of one kind, by seed."""
        kind = (prompt_gradient, lr_scale, steps_scale)
        return sorted((run for run in self.runs if run.kind == kind), key=lambda run: run.seed)

    @property
    def prompt_tokens(self) -> int:
        return self.runs[0].prompt_tokens

    @property
    def num_steps(self) -> int:
        return len(self.runs[0].rewards)

    @property
    def before(self) -> HeldOut:
        """Of the checkpoint that all runs start from."""
        return self.runs[0].before

    def pairs(self) -> tuple[list[Run], list[Run]]:
        """The two lists that are compared, found to be pairs (see `check_pairs`)."""
        exact, stopped = self.of("exact"), self.of("stopped")
        check_pairs(exact, stopped)
        return exact, stopped

    def norm_ratio(self) -> Spread | None:
        """Norm of the stopped gradient of step 1 over the exact one's: same weights and replies.

        None if no seed had a gradient in step 1, because all its replies were equally good.
        """
        pairs = zip(*self.pairs(), strict=True)
        ratios = [y.grad_norms[0] / x.grad_norms[0] for x, y in pairs if x.grad_norms[0] > 0]
        return Spread.of(ratios) if ratios else None

    def clipped_share(self, prompt_gradient: str) -> float:
        """Share of the steps of all seeds whose gradient was clipped."""
        norms = [norm for run in self.of(prompt_gradient) for norm in run.grad_norms]
        return sum(norm > MAX_GRAD_NORM for norm in norms) / len(norms)

    def rows(self) -> list[Row]:
        """Both gradients, their difference, and the controls."""
        exact, stopped = self.pairs()
        rows = [summarize("exact", exact), summarize("stopped", stopped)]
        rows.append(summarize_pairs(exact, stopped))
        kinds = dict.fromkeys(run.kind for run in self.runs)
        controls = [self.of(*kind) for kind in kinds if kind[1:] != (1.0, 1.0)]
        return rows + [summarize(f"{runs[0].name} ({len(runs)} seeds)", runs) for runs in controls]


# --- reports -----------------------------------------------------------------------------------


def make_table(comparison: Comparison) -> str:
    """The comparison of one length as a Markdown table under a line that says what it holds."""
    exact, stopped = comparison.pairs()
    rows = comparison.rows()
    before = comparison.before
    parts = len(rows[0].fifths)
    part = "fifth" if parts == 5 else "part"
    header = ["", *(f"{part} {i + 1}" for i in range(parts)), "held-out, sampled", "greedy"]
    start = ["before", *[""] * parts, f"{before.sampled:.2f}", f"{before.greedy:.2f}"]
    lines = [header, ["---"] * len(header), start, *(row.cells() for row in rows)]
    title = (
        f"{comparison.prompt_tokens:,} tokens, {comparison.num_steps} steps, {len(exact)} seeds: "
        "mean reward of parts of the run, and of replies to held-out prompts after it; mean +- "
        "standard deviation over seeds."
    )
    table = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([title, "", *table, "", *make_notes(comparison)])


def make_notes(comparison: Comparison) -> list[str]:
    """What a doubtful reader asks next."""
    exact, stopped = comparison.pairs()
    ahead = sum(x.after.sampled > y.after.sampled for x, y in zip(exact, stopped, strict=True))
    clipped = [comparison.clipped_share(run[0].prompt_gradient) for run in (exact, stopped)]
    return [
        f"* The exact gradient ends ahead in {ahead} of {len(exact)} seeds.",
        "* Both runs of a seed had the same prompts and, in step 1, the same replies (checked).",
        f"* Norm of the first step's gradient, stopped / exact: {comparison.norm_ratio()}. A norm "
        f"above {MAX_GRAD_NORM:g} is clipped to it, as happened in {clipped[0]:.0%} of the steps "
        f"with the exact gradient and in {clipped[1]:.0%} with the stopped one.",
    ]


def write_json(settings: dict[str, object], comparisons: Sequence[Comparison], path: Path) -> None:
    """Write settings, every run and every summary."""
    results = [
        {
            "prompt_tokens": comparison.prompt_tokens,
            "rows": [asdict(row) for row in comparison.rows()],
            "first_step_norm_ratio": ratio and asdict(ratio),
            "runs": [asdict(run) for run in comparison.runs],
        }
        for comparison in comparisons
        for ratio in [comparison.norm_ratio()]
    ]
    path.write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")
    print(f"wrote {path}")


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw the reward over the steps, one panel for each prompt length."""
    num = len(comparisons)
    figure, panels = plt.subplots(
        1, num, figsize=(1.5 + 4.6 * num, 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, comparison in zip(panels[0], comparisons, strict=True):
        plot_curves(axes, comparison)
    panels[0][0].set_ylabel("reward of the sampled replies")
    figure.suptitle("One policy trained with the prompt's gradient (exact), and without (stopped)")
    figure.supxlabel(
        "Same checkpoint, prompts, sampling and learning rate. Thick: mean over seeds; thin: each "
        f"seed; band: lowest to highest.\nCurves are means of {SMOOTHED_STEPS} steps.",
        fontsize="small",
    )
    figure.savefig(path, dpi=90)
    plt.close(figure)
    print(f"wrote {path}")


def plot_curves(axes: Axes, comparison: Comparison) -> None:
    """Mean over seeds as a line, every seed as a thin one, their range as a band."""
    steps = range(1, comparison.num_steps + 1)
    exact, stopped = comparison.pairs()
    for kind, runs in (("exact", exact), ("stopped", stopped)):
        curves = [smooth(run.rewards) for run in runs]
        by_step = [Spread.of(values) for values in zip(*curves, strict=True)]
        color, means = COLORS[kind], [spread.mean for spread in by_step]
        low, high = [spread.low for spread in by_step], [spread.high for spread in by_step]
        axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
        for curve in curves:
            axes.plot(steps, curve, color=color, linewidth=0.6, alpha=0.5)
        axes.plot(steps, means, color=color, linewidth=3)
        end = (comparison.num_steps, means[-1])
        style = {"color": color, "fontweight": "bold", "va": "center"}
        text = f"{kind}\n{means[-1]:.2f}"
        axes.annotate(text, end, xytext=(6, 0), textcoords="offset points", **style)
    before = comparison.before.sampled
    axes.axhline(before, color=GREY, linewidth=1, linestyle=":")
    axes.text(comparison.num_steps, before - 0.015, "before", color=GREY, ha="right", va="top")
    axes.set(xlabel="optimizer step", ylim=(0, 1.02), xlim=(1, comparison.num_steps))
    axes.set_title(f"prompts of {comparison.prompt_tokens:,} tokens, {len(exact)} seeds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
