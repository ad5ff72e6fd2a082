"""Which package a name means: `kernels` is Hugging Face's, `longstraw_kernels` is ours.

transformers and TRL look for `kernels`. A folder of that name that comes first on the path is
imported in its place, wherever Python was started in it.
"""

import sys
from collections.abc import Iterator
from importlib import metadata, util
from importlib.machinery import PathFinder
from pathlib import Path

import longstraw

from . import Finding


def check_names() -> Iterator[Finding]:
    """What `import kernels` and `import longstraw_kernels` find, started in this folder."""
    yield _find_kernels()
    yield _find_own_kernels()


def _find_kernels() -> Finding:
    spec = PathFinder.find_spec("kernels", ["", *sys.path])
    # A folder without __init__.py has no origin, and comes after every package of the name.
    found = Path(spec.origin) if spec is not None and spec.origin else None
    try:
        package = metadata.distribution("kernels")
    except metadata.PackageNotFoundError:
        package = None
    if found is None:
        if package is None:
            return Finding("ok", "import kernels -> nothing (Hugging Face's package is optional)")
        return Finding(
            "fail",
            f"import kernels finds nothing, and Hugging Face's kernels {package.version} is "
            "installed",
            "Install it again: pip install --force-reinstall --no-deps kernels",
        )
    theirs = Path(str(package.locate_file("kernels/__init__.py"))) if package else None
    if package and theirs and theirs.exists() and found.resolve() == theirs.resolve():
        return Finding("ok", f"import kernels -> Hugging Face's kernels {package.version}")
    return Finding(
        "fail",
        f"import kernels -> {found.resolve()}, which is not Hugging Face's package, and "
        "transformers would take it for that",
        "Rename or remove that folder (or its __init__.py), or take the folder around it out of "
        "PYTHONPATH and start Python elsewhere.",
    )


def _find_own_kernels() -> Finding:
    spec = util.find_spec("longstraw_kernels")
    again = "Install LongStraw from its folder: pip install -c constraints.txt -e ."
    if spec is None or not spec.submodule_search_locations:
        return Finding("fail", "import longstraw_kernels finds nothing", again)
    folders = {Path(folder).resolve() for folder in spec.submodule_search_locations}
    home = Path(longstraw.__file__).resolve().parents[1]
    own = folders & {home / "kernels", home / "longstraw_kernels"}
    if own:
        return Finding("ok", f"import longstraw_kernels -> {own.pop()}, ours")
    return Finding(
        "fail",
        f"import longstraw_kernels -> {folders.pop()}, and longstraw comes from {home}: two "
        "releases are mixed",
        f"pip uninstall -y longstraw, until it says that nothing is left. {again}",
    )
