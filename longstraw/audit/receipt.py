"""The receipt of an audit: what was measured, on what, and what it shows.

Knows how to write one and read it again; knows nothing of how the numbers came about.
"""

import json
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..config import EngineConfig
from ..errors import DataError
from .closeness import Closeness
from .levels import CLAIMS, NAMES, Finding, Level
from .policy import PolicySource
from .run import AuditOptions, LengthAudit

FORMAT = "longstraw audit 1"
PACKAGES = ("longstraw", "torch", "transformers", "peft", "numpy")
WIDE_BUDGET = 0.1


def provenance(device: str) -> dict[str, Any]:
    """Versions, machine and commit, for whoever reads numbers later.

    Args:
        device: what the numbers were measured on.
    """
    on_gpu = device.startswith("cuda")
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
        **_commit(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> dict[str, Any]:
    """The commit of the checkout that this package runs from, and whether files differ from it."""
    root = Path(__file__).resolve().parents[2]
    none = {"commit": None, "is_dirty": None}
    try:
        top = _git(root, "rev-parse", "--show-toplevel")
        if Path(top) != root:  # installed inside of somebody else's checkout
            return none
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "is_dirty": bool(_git(root, "status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return none


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@dataclass(frozen=True)
class Receipt:
    """All of one audit.

    Attributes:
        command: that makes the same audit again.
        made_by: see `provenance`.
        data: what the prompts were cut from, and its hash.
        lengths: what was found, by prompt length.
    """

    command: str
    made_by: dict[str, Any]
    options: AuditOptions
    data: dict[str, str]
    lengths: list[LengthAudit]

    @property
    def is_ok(self) -> bool:
        """Whether something was compared, and all of it is within its budget."""
        statuses = [level.status for length in self.lengths for level in length.levels]
        return "ok" in statuses and "fail" not in statuses

    def shown(self) -> list[str]:
        """What the numbers show, one line for each level."""
        return [
            f"level {number}: {CLAIMS[number]} (prompts of {_join(tokens)} tokens)"
            for number in NAMES
            if (tokens := self._lengths_with(number, "ok"))
        ]

    def not_shown(self) -> list[str]:
        """What they do not: what failed, what was not run, and what no audit of this kind shows."""
        lines = []
        for number, name in NAMES.items():
            if tokens := self._lengths_with(number, "fail"):
                lines.append(f"level {number}, {name}: FAILED at {_join(tokens)} tokens")
            for reason, tokens in self._reasons(number):
                lines.append(f"level {number}, {name}: not run at {_join(tokens)} tokens: {reason}")
        if wide := sorted({f.what for f in self._findings() if f.budget > WIDE_BUDGET}):
            lines.append(
                f"{', '.join(wide)}: rounding in {self.options.policy.dtype} is so large that a "
                "mistake could hide in it; repeat with --dtype float64"
            )
        return [
            *lines,
            "other lengths, other data, DeepSpeed, and that training improves anything: this is "
            "one update on sampled replies with random advantages",
        ]

    def _findings(self) -> Iterator[Finding]:
        for length in self.lengths:
            for level in length.levels:
                yield from level.findings

    def _lengths_with(self, number: int, status: str) -> list[int]:
        return [
            length.prompt_tokens
            for length in self.lengths
            for level in length.levels
            if (level.number, level.status) == (number, status)
        ]

    def _reasons(self, number: int) -> list[tuple[str, list[int]]]:
        found: dict[str, list[int]] = {}
        for length in self.lengths:
            for level in length.levels:
                if level.number == number and level.not_run is not None:
                    found.setdefault(level.not_run, []).append(length.prompt_tokens)
        return list(found.items())

    # ---------------------------------------------------------------- files

    def to_json(self) -> str:
        """Text that `from_json` reads; verdicts stand beside the numbers for other readers."""
        content = {"format": FORMAT, "is_ok": self.is_ok, **asdict(self)}
        for length, found in zip(content["lengths"], self.lengths, strict=True):
            for values, level in zip(length["levels"], found.levels, strict=True):
                values.update(name=level.name, status=level.status)
        content.update(shown=self.shown(), not_shown=self.not_shown())
        return json.dumps(content, indent=1)

    def write(self, path: Path) -> None:
        """Write it, in one rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".draft")
        draft.write_text(self.to_json() + "\n", encoding="utf-8")
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Receipt":
        """The receipt in a file.

        Raises:
            DataError: it is none, or of another format.
        """
        return cls.from_json(path.read_text(encoding="utf-8"))

    @classmethod
    def from_json(cls, text: str) -> "Receipt":
        """What `to_json` made; verdicts are made anew from the numbers."""
        content = json.loads(text)
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise DataError(f"format {found!r}: a receipt of the format {FORMAT!r} is needed.")
        options = content["options"]
        options = AuditOptions(
            **{
                **options,
                "policy": PolicySource(**options["policy"]),
                "engine": EngineConfig.from_dict(options["engine"]),
            }
        )
        lengths = [_read_length(values) for values in content["lengths"]]
        return cls(content["command"], content["made_by"], options, content["data"], lengths)


def _read_length(values: dict[str, Any]) -> LengthAudit:
    levels = [
        Level(level["number"], [Finding(**f) for f in level["findings"]], level["not_run"])
        for level in values["levels"]
    ]
    gap = {family: Closeness(**found) for family, found in values["gap"].items()}
    return LengthAudit(**{**values, "levels": levels, "gap": gap})


def _join(numbers: list[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
