"""Print the versions that LongStraw runs on, and whether it supports them.

Each line is a package, the version found here and the range that LongStraw accepts (the one that
it was installed with). Packages of an extra may be absent; what is present has to be in range.
Paste the output into a bug report.

  ok     found, and inside the range
  -      absent, and only needed for the extra that is named: pip install 'longstraw[EXTRA]'
  fail   absent, or outside the range
"""

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class PackageInfo:
    """One package that LongStraw asks for, and what was found of it."""

    name: str
    supported: str  # version specifier, such as ">=5.24,<5.40"
    found: str | None  # installed version; None if absent
    extra: str | None  # the extra that asks for it; None if LongStraw itself does

    @property
    def status(self) -> str:
        """`ok`, `-` or `fail`, as the command's help explains them."""
        if self.found is None:
            return "fail" if self.extra is None else "-"
        # prereleases: a nightly build inside the range counts as inside
        return "ok" if SpecifierSet(self.supported).contains(self.found, True) else "fail"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longstraw info`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if every package is supported, else 1."""
    try:
        version = metadata.version("longstraw")
    except metadata.PackageNotFoundError:
        print("longstraw is not installed in this Python, so its ranges are unknown.")
        print("Install it from its folder: pip install -c constraints.txt -e .")
        return 1
    packages = list_packages()
    devices = _list_devices() if any(p.name == "torch" and p.found for p in packages) else []
    is_ok = all(package.status != "fail" for package in packages)
    if args.json:
        report = {
            "longstraw": version,
            "python": platform.python_version(),
            "devices": devices,
            "ok": is_ok,
            "packages": [asdict(package) | {"status": package.status} for package in packages],
        }
        print(json.dumps(report, indent=2))
        return 0 if is_ok else 1
    print(f"longstraw {version}, Python {platform.python_version()} on {platform.platform()}")
    print(f"devices: {', '.join(devices) or 'unknown'}")
    for package in packages:
        found = package.found or "absent"
        extra = f"  [{package.extra}]" if package.extra else ""
        print(f"{package.status:<6}{package.name:<24}{found:<16}{package.supported}{extra}")
    return 0 if is_ok else 1


def list_packages() -> list[PackageInfo]:
    """The packages that the installed LongStraw asks for, its own needs first, then its extras'.

    Read from the installed metadata, so the ranges stand in one place (setup.cfg). The extra
    `test` is left out: it is for developing LongStraw and nothing that a user runs needs it.
    """
    requirements = [Requirement(line) for line in metadata.requires("longstraw") or []]
    needed = [(r, None) for r in requirements if r.marker is None or r.marker.evaluate({})]
    optional = [
        (requirement, extra)
        for extra in metadata.metadata("longstraw").get_all("Provides-Extra") or []
        for requirement in requirements
        if extra != "test" and requirement.marker and requirement.marker.evaluate({"extra": extra})
    ]
    return [
        PackageInfo(r.name, str(r.specifier), _find_version(r.name), extra)
        for r, extra in needed + optional
    ]


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _list_devices() -> list[str]:
    """The accelerators that torch sees, or the CPU with the number of threads torch uses."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return [f"cuda:{i} {name}" for i, name in enumerate(names)]
    return [f"cpu, {torch.get_num_threads()} threads"]
