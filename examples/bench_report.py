"""What follows from the benchmark's cells: ratios, growth, formula, longest prompts; as tables.

Knows records of cells; knows nothing of how they were measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from bench_fit import fit_growth, fit_line, longest_prompt

GIB = 2**30
BASES = {"update_bytes": "update alone", "with_rollout_bytes": "with rollout"}
TIMES = {"seconds": "with rollout", "seconds_without_rollout": "without rollout"}
MODE_NAMES = {
    "trl": "TRL, 1 row at a time",
    "trl-batch": "TRL, the group at once",
    "trl-as-is": "TRL as installed, 1 row",
    "exact": "LongStraw, exact",
    "stopped": "LongStraw, stopped",
}


class Measured:
    """The results that there are, by kind, mode, prompt and group."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self.results: dict[tuple[str, str, int, int], dict[str, Any]] = {}
        for record in records:
            cell = record["cell"]
            if record["status"] == "done":
                key = (cell["kind"], cell["mode"], cell["prompt"], cell["group"])
                self.results[key] = record["result"]

    def get(self, kind: str, mode: str, prompt: int, group: int) -> dict[str, Any] | None:
        """The result of one cell, if it was measured."""
        return self.results.get((kind, mode, prompt, group))

    def series(self, kind: str, mode: str, group: int, key: str) -> tuple[list[int], list[Any]]:
        """Prompts in rising order, and a number of each."""
        found = sorted(
            (prompt, result[key])
            for (k, m, prompt, g), result in self.results.items()
            if (k, m, g) == (kind, mode, group)
        )
        return [prompt for prompt, _ in found], [value for _, value in found]

    def modes(self, *, ours: bool) -> list[str]:
        """The modes with results, in the order of `MODE_NAMES`."""
        found = {mode for _, mode, _, _ in self.results}
        return [m for m in MODE_NAMES if m in found and m.startswith("trl") != ours]

    def groups(self) -> list[int]:
        """The groups with results."""
        return sorted({group for _, _, _, group in self.results})

    def prompts(self) -> list[int]:
        """The prompts with results."""
        return sorted({prompt for _, _, prompt, _ in self.results})


def summarize(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that follows from the records; see the functions below."""
    measured = Measured(records)
    return {
        "ratios": list(ratios(measured)),
        "growth": list(growth(measured)),
        "peak_formula": list(peak_formula(measured)),
        "equal_memory": list(equal_memory(measured)),
        "not_measured": [
            {**_where(r["cell"]), "kind": r["cell"]["kind"], "status": r["status"]}
            | ({"minutes": r["predicted_seconds"] / 60} if r["status"] == "skipped" else {})
            for r in records
            if r["status"] != "done"
        ],
    }


def ratios(measured: Measured) -> Iterator[dict[str, Any]]:
    """Stock TRL's time and memory divided by LongStraw's, cell by cell: above 1 is better.

    In exact mode also `grad_norm_difference`, relative to stock TRL's: the same work gives the same
    norm, up to the rounding of the type.
    """
    for prompt in measured.prompts():
        for group in measured.groups():
            for ours in measured.modes(ours=True):
                for stock in measured.modes(ours=False):
                    row: dict[str, Any] = {"prompt": prompt, "group": group}
                    row |= {"mode": ours, "stock": stock}
                    for kind, keys in (("time", TIMES), ("memory", BASES)):
                        mine = measured.get(kind, ours, prompt, group)
                        theirs = measured.get(kind, stock, prompt, group)
                        if mine and theirs:
                            row |= {key: theirs[key] / mine[key] for key in keys}
                            if kind == "time" and ours == "exact":
                                difference = abs(mine["grad_norm"] - theirs["grad_norm"])
                                scale = max(theirs["grad_norm"], 1e-12)
                                row["grad_norm_difference"] = difference / scale
                    if len(row) > 4:
                        yield row


def growth(measured: Measured) -> Iterator[dict[str, Any]]:
    """Seconds against P of each mode and group: fixed + linear * P + attention * P^2."""
    for mode in (*measured.modes(ours=False), *measured.modes(ours=True)):
        for group in measured.groups():
            for key in TIMES:
                prompts, seconds = measured.series("time", mode, group, key)
                curve = fit_growth(prompts, seconds)
                if curve:
                    row = {"mode": mode, "group": group, "what": key, "prompts": prompts}
                    yield row | asdict(curve)


def peak_formula(measured: Measured) -> Iterator[dict[str, Any]]:
    """LongStraw's peak beside its formula: the state's bytes per token * P + a constant.

    The constant (one chunk's graph) is what the shortest prompt has beside its state.
    """
    for mode in measured.modes(ours=True):
        for group in measured.groups():
            prompts, peaks = measured.series("memory", mode, group, "update_bytes")
            _, per_token = measured.series("memory", mode, group, "state_bytes_per_token")
            for prompt, peak in zip(prompts[1:], peaks[1:], strict=True):
                formula = peaks[0] + (prompt - prompts[0]) * per_token[0]
                yield {
                    "mode": mode,
                    "group": group,
                    "prompt": prompt,
                    "peak": peak,
                    "formula": formula,
                    "deviation": peak / formula - 1,
                }


def equal_memory(measured: Measured) -> Iterator[dict[str, Any]]:
    """The prompt at which LongStraw takes what stock TRL takes at its longest measured one."""
    for stock in measured.modes(ours=False):
        for ours in measured.modes(ours=True):
            for group in measured.groups():
                for basis in BASES:
                    stock_prompts, budgets = measured.series("memory", stock, group, basis)
                    prompts, peaks = measured.series("memory", ours, group, basis)
                    line = fit_line(prompts, peaks)
                    if not stock_prompts or line is None:
                        continue
                    row = {"mode": ours, "stock": stock, "group": group, "basis": basis}
                    row |= {"stock_prompt": stock_prompts[-1], "budget": budgets[-1]}
                    row |= {"line": asdict(line)}
                    found = longest_prompt(
                        prompts, peaks, baseline=stock_prompts[-1], budget=budgets[-1]
                    )
                    yield row | (asdict(found) if found else {"prompt": None, "ratio": None})


def _where(cell: dict[str, Any]) -> dict[str, Any]:
    return {key: cell[key] for key in ("mode", "prompt", "group")}


# ---------------------------------------------------------------- text


def report(records: Sequence[dict[str, Any]], summary: dict[str, Any]) -> str:
    """All tables."""
    measured = Measured(records)
    blocks = [
        _time_table(measured, summary),
        _memory_table(measured, summary),
        _equal_memory_text(summary),
        _growth_text(summary),
        _formula_text(summary),
        _missing_text(summary),
    ]
    return "\n".join("\n".join(["", *block]) for block in blocks if block)


def _pairs(measured: Measured) -> Iterator[tuple[int, int, str]]:
    for prompt in measured.prompts():
        for group in measured.groups():
            for mode in (*measured.modes(ours=False), *measured.modes(ours=True)):
                yield prompt, group, mode


def _against(summary: dict[str, Any], prompt: int, group: int, mode: str, key: str) -> str:
    """How many times better than the first stock mode, or nothing."""
    for row in summary["ratios"]:
        if (row["prompt"], row["group"], row["mode"]) == (prompt, group, mode) and key in row:
            return f"{row[key]:.2f}x"
    return ""


def _time_table(measured: Measured, summary: dict[str, Any]) -> list[str]:
    lines = []
    for prompt, group, mode in _pairs(measured):
        result = measured.get("time", mode, prompt, group)
        if result is None:
            continue
        gains = [_against(summary, prompt, group, mode, key) for key in TIMES]
        phases = ", ".join(f"{k} {v:.1f}" for k, v in result["phases"].items() if v >= 0.05)
        lines.append(
            f"{prompt:>7,} {group:>3}  {MODE_NAMES[mode]:<24} {result['seconds']:>8.1f} "
            f"{gains[0]:>7} {result['seconds_without_rollout']:>8.1f} {gains[1]:>7}  {phases}"
        )
    checks = [row for row in summary["ratios"] if "grad_norm_difference" in row]
    if checks:
        worst = max(row["grad_norm_difference"] for row in checks)
        lines.append(f"gradient norms of exact and TRL differ by at most {worst:.1e} of TRL's")
    head = [
        "seconds of one optimizer step; x: how many times faster than the first TRL mode",
        f"{'P':>7} {'G':>3}  {'':<24} {'step':>8} {'':>7} {'-rollout':>8} {'':>7}  phases",
    ]
    return head + lines if lines else []


def _memory_table(measured: Measured, summary: dict[str, Any]) -> list[str]:
    lines = []
    for prompt, group, mode in _pairs(measured):
        result = measured.get("memory", mode, prompt, group)
        if result is None:
            continue
        gains = [_against(summary, prompt, group, mode, key) for key in BASES]
        timed = measured.get("time", mode, prompt, group) or {}
        resident = timed.get("peak_resident_bytes", 0)
        lines.append(
            f"{prompt:>7,} {group:>3}  {MODE_NAMES[mode]:<24} {result['update_bytes'] / GIB:>8.3f} "
            f"{gains[0]:>7} {result['with_rollout_bytes'] / GIB:>8.3f} {gains[1]:>7}  "
            + (f"{resident / GIB:>8.2f}" if resident else "")
        )
    head = [
        "peak GiB of tensors beside weights, gradients, optimizer; resident: the whole process",
        f"{'P':>7} {'G':>3}  {'':<24} {'update':>8} {'':>7} {'+rollout':>8} {'':>7}  resident",
    ]
    return head + lines if lines else []


def _equal_memory_text(summary: dict[str, Any]) -> list[str]:
    lines = []
    for row in summary["equal_memory"]:
        what = f"{MODE_NAMES[row['mode']]}, G={row['group']}, {BASES[row['basis']]}: "
        stock = f"what {MODE_NAMES[row['stock']]} takes at {row['stock_prompt']:,}"
        if row["prompt"] is None:
            lines.append(f"{what}needs more than {stock} at any prompt")
            continue
        note = " (extrapolated)" if row["is_extrapolated"] else ""
        line = row["line"]
        residual = "two points" if line["worst"] is None else f"residual {line['worst']:.1%}"
        lines.append(
            f"{what}{row['prompt']:,.0f} tokens{note}, {row['ratio']:.2f}x, at {stock}; "
            f"line {line['fixed'] / GIB:.3f} GiB + {line['per_token']:,.0f} B a token, {residual}"
        )
    return ["prompt at equal peak memory", *lines] if lines else []


def _growth_text(summary: dict[str, Any]) -> list[str]:
    lines = []
    for row in summary["growth"]:
        worst = "no residual" if row["worst"] is None else f"residual {row['worst']:.1%}"
        lines.append(
            f"{MODE_NAMES[row['mode']]:<24} G={row['group']:<2} {TIMES[row['what']]:<16} "
            f"{row['fixed']:>7.1f} s + {1000 * row['linear']:>7.2f} s per 1,000 tokens + "
            f"{1e6 * row['attention']:>7.3f} s per (1,000 tokens)^2, {worst}"
        )
    head = "growth of the step with the prompt: fixed + linear layers + attention"
    return [head, *lines] if lines else []


def _formula_text(summary: dict[str, Any]) -> list[str]:
    lines = [
        f"{MODE_NAMES[row['mode']]:<24} G={row['group']:<2} P={row['prompt']:>7,} "
        f"{row['peak'] / GIB:.4f} GiB, formula {row['formula'] / GIB:.4f}, {row['deviation']:+.2%}"
        for row in summary["peak_formula"]
    ]
    head = "peak of the update beside its formula: bytes of state + one chunk (from the shortest P)"
    return [head, *lines] if lines else []


def _missing_text(summary: dict[str, Any]) -> list[str]:
    lines = [
        f"{MODE_NAMES[row['mode']]:<24} P={row['prompt']:,} G={row['group']} {row['kind']}: "
        f"{row['status']}" + (f", predicted {row['minutes']:.0f} min" if "minutes" in row else "")
        for row in summary["not_measured"]
    ]
    return ["not measured", *lines] if lines else []
