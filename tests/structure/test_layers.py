"""Imports go one way, and files and functions stay of a size that can be read.

The files are parsed and not imported, so an import inside a function, under `TYPE_CHECKING` or
through `importlib.import_module("name")` counts like any other. DESIGN.md draws the layers.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"longstraw": "longstraw", "longstraw_kernels": "kernels"}
FOLDERS |= {"trl_integration": "trl_integration"}

LAYERS = [
    {"errors", "config", "segments", "ledger", "ranks"},
    {"state", "distributed"},
    {"attention"},
    {"models"},
    {"backends"},
    {"passes", "captured", "branches", "members", "gradient_gap", "refresh", "drift"},
    {"checks", "reports"},
    {"engine"},
    {"rollout", "planner", "audit", "bench"},
    {"longstraw"},  # the package itself: longstraw/__init__.py names what users import
    {"cli"},
    {"__main__"},
]
"""Files and folders of longstraw/, lowest first. Each may import its own layer and lower ones."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


class Import(NamedTuple):
    """One imported name: `from a.b import c` is `Import(..., module="a.b", name="c")`."""

    file: Path
    line: int
    module: str
    name: str = ""

    @property
    def top(self) -> str:
        """The package that is imported from: `a` in `from a.b import c`."""
        return self.module.split(".")[0]

    def breaks(self, rule: str) -> str:
        """A line for the failure message."""
        what = f"from {self.module} import {self.name}" if self.name else f"import {self.module}"
        return f"{self.file.relative_to(ROOT)}:{self.line}: {what}\n    {rule}"


def python_files(*folders: str) -> list[Path]:
    """The Python files under folders of the repository."""
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def find_imports(file: Path, package: str) -> Iterator[Import]:
    """Every import of one file; `package` is the dotted package that the file lies in."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (Import(file, node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                source = ".".join([*parts, *([module] if module else [])])
                yield from (Import(file, node.lineno, source, alias.name) for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(file, node.lineno, module)


def project_imports(top: str) -> list[Import]:
    """Every import of one of our packages."""
    folder = ROOT / FOLDERS[top]
    imports = []
    for file in python_files(FOLDERS[top]):
        package = ".".join((top, *file.parent.relative_to(folder).parts))
        imports += find_imports(file, package)
    return imports


def unit_of(file: Path) -> str:
    """The entry of `LAYERS` that a file of longstraw/ belongs to."""
    parts = file.relative_to(ROOT / "longstraw").with_suffix("").parts
    return "longstraw" if parts == ("__init__",) else parts[0]


def imported_unit(item: Import) -> str:
    """The entry of `LAYERS` that an import of longstraw reaches."""
    below = item.module.split(".")[1:]
    if below:
        return below[0]
    return item.name if is_module(item.name) else "longstraw"


def is_module(name: str) -> bool:
    """Whether longstraw has a file or folder of this name, as opposed to a class or function."""
    path = ROOT / "longstraw" / name
    return bool(name) and (path.is_dir() or path.with_suffix(".py").is_file())


def test_every_part_of_longstraw_has_a_layer():
    """A new file or folder of longstraw/ has to be given its place in `LAYERS`."""
    placed = set().union(*LAYERS)
    missing = sorted({unit_of(file) for file in python_files("longstraw")} - placed)
    assert not missing, f"not in LAYERS of {Path(__file__).name}: {', '.join(missing)}"


def test_longstraw_imports_its_own_and_lower_layers_only():
    """A reader of a layer needs the layers below it, and no others."""
    height = {unit: index for index, layer in enumerate(LAYERS) for unit in layer}
    broken = []
    for item in project_imports("longstraw"):
        importer, imported = unit_of(item.file), imported_unit(item)
        if item.top != "longstraw" or importer not in height or imported not in height:
            continue  # a part without a layer is reported by the test above
        if height[imported] > height[importer]:
            broken.append(item.breaks(f"{importer} may not import {imported}, a higher layer"))
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("package", "banned"),
    [
        ("longstraw_kernels", {"longstraw", "trl_integration", "kernels", "trl", "transformers"}),
        ("longstraw", {"trl", "trl_integration", "kernels"}),
        ("trl_integration", {"longstraw_kernels", "kernels"}),
    ],
)
def test_a_package_does_not_import_what_it_knows_nothing_of(package, banned):
    """Operations know tensors; the engine knows no TRL; the trainer knows the engine only.

    `kernels` is Hugging Face's name: our own operations are imported as longstraw_kernels.
    """
    rule = f"{package} may not import any of {', '.join(sorted(banned))}"
    broken = [item.breaks(rule) for item in project_imports(package) if item.top in banned]
    assert not broken, "\n" + "\n".join(broken)


def test_only_its_backend_imports_deepspeed():
    """So everything else runs, and can be tested, where DeepSpeed is not installed."""
    folder = ROOT / "longstraw" / "backends"
    allowed = [folder / "deepspeed.py", folder / "expert_parallel.py"]
    rule = f"only {', '.join(str(file.relative_to(ROOT)) for file in allowed)} may import deepspeed"
    broken = [
        item.breaks(rule)
        for package in FOLDERS
        for item in project_imports(package)
        if item.top == "deepspeed" and item.file not in allowed
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_the_trainer_uses_public_names_of_longstraw_only():
    """`from longstraw import Name`, where Name is in its `__init__.py`: the engine's files may
    then be arranged anew without touching the trainer."""
    rule = "trl_integration takes from longstraw what a user may: `from longstraw import Name`"
    broken = [
        item.breaks(rule)
        for item in project_imports("trl_integration")
        if item.top == "longstraw"
        and (item.module != "longstraw" or is_module(item.name) or item.name.startswith("_"))
    ]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize("folder", [*FOLDERS.values(), "examples", "tests"])
def test_files_and_functions_can_be_read(folder):
    """A file of more than 500 lines holds two nouns, a function of more than 80 two verbs."""
    broken = []
    for file in python_files(folder):
        name, text = file.relative_to(ROOT), file.read_text(encoding="utf-8")
        num_lines = text.count("\n")
        if num_lines > MAX_FILE_LINES:
            broken.append(f"{name}: {num_lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    where = f"{name}:{node.lineno}: {node.name}"
                    broken.append(f"{where} has {num_lines} lines, at most {MAX_FUNCTION_LINES}")
    assert not broken, "\n" + "\n".join(broken)
