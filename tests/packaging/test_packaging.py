"""What is installed, under which names, and that it leaves other people's names alone.

The delicate one is `kernels`. The folder kernels/ is installed as `longstraw_kernels`, because
transformers, TRL and bitsandbytes look for Hugging Face's package `kernels`. A Python started in
the repository has the repository first on its path, so that is where these tests start it.
"""

import configparser
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "longstraw": "longstraw",
    "longstraw_kernels": "kernels",
    "trl_integration": "trl_integration",
}
TOP_LEVEL = {"longstraw", "trl_integration", "ds_configs", "kernels", "examples", "tests"}


def run_python(code: str, *flags: str, cwd: Path = ROOT, path: str | None = None) -> list[str]:
    """The words of the last line that `code` prints in a fresh Python started in `cwd`."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = path
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def find_packages() -> dict[str, Path]:
    """Every package of ours by its import name: a folder of Python files, wherever it lies."""
    found = {}
    for top, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found[".".join((top, *parts))] = init.parent
    return found | {"longstraw_kernels": ROOT / "kernels"}


def read_setup_cfg() -> configparser.ConfigParser:
    """setup.cfg, parsed."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


# --- `kernels` is Hugging Face's -----------------------------------------------------------------


def test_import_kernels_finds_hugging_faces_package():
    """Theirs is a regular package, ours a bare folder, and Python prefers the regular one.

    It stops being so the day kernels/ gets an `__init__.py`.
    """
    try:
        theirs = metadata.distribution("kernels").locate_file("kernels/__init__.py")
    except metadata.PackageNotFoundError:
        pytest.skip("Hugging Face's kernels is not installed: pip install kernels")
    [found] = run_python("import kernels; print(kernels.__file__)")
    assert Path(found).samefile(str(theirs))


def test_without_hugging_faces_package_nobody_takes_ours_for_it(tmp_path):
    """transformers says that `kernels` is absent, and TRL's trainer can be imported.

    The environment is this one less that package: a folder of links to everything else that is
    installed, and a Python that is given this folder for its site-packages (-S: no other).
    """
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.fullmatch(r"kernels(-.*)?", entry.name):
            (tmp_path / entry.name).symlink_to(entry)
    code = f"""
import importlib.util, site, sys
site.addsitedir({str(tmp_path)!r})
assert sys.path[0] == ""
from transformers.utils import is_kernels_available
from trl import GRPOTrainer
print(importlib.util.find_spec("kernels").origin, is_kernels_available(), GRPOTrainer.__name__)
"""
    assert run_python(code, "-S") == ["None", "False", "GRPOTrainer"]


# --- what is installed ---------------------------------------------------------------------------


def test_setup_cfg_lists_every_package():
    """A folder that is not listed works in an editable install and is missing from a wheel."""
    listed = set(read_setup_cfg()["options"]["packages"].split())
    folders = set(find_packages())
    assert listed == folders, (
        f"[options] packages in setup.cfg: add {sorted(folders - listed) or 'nothing'}, "
        f"remove {sorted(listed - folders) or 'nothing'}"
    )


def test_an_editable_install_finds_the_operations_in_the_kernels_folder():
    """An edit under kernels/ takes effect without installing again."""
    code = "import longstraw_kernels.page_attention as p; print(p.__file__)"
    [found] = run_python(code, cwd=ROOT.parent)
    assert Path(found).is_relative_to(ROOT / "kernels"), "make test installs with pip install -e"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The project's wheel, built from a copy so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    names = ["setup.cfg", "pyproject.toml", "README.md", "LICENSE"]
    names += ["longstraw", "kernels", "trl_integration"]
    for name in names:
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", source / "dist", source], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [built] = (source / "dist").glob("longstraw-*.whl")
    return built


def test_a_wheel_holds_every_module_and_no_kernels(wheel):
    """The modules of the wheel are those of the folders, renamed; nothing is called `kernels`."""
    expected = {
        f"{package.replace('.', '/')}/{module.name}"
        for package, folder in find_packages().items()
        for module in folder.glob("*.py")
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert names == expected
    assert "longstraw_kernels/page_attention/__init__.py" in names


def test_a_wheel_can_be_imported(wheel, tmp_path):
    """From the unpacked wheel alone: it comes first on the path, and the repository is not here."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    modules = "longstraw longstraw_kernels.page_attention trl_integration".split()
    code = f"import {', '.join(modules)}, sys; print(*(sys.modules[m].__file__ for m in {modules}))"
    found = run_python(code, cwd=tmp_path, path=str(tmp_path / "unpacked"))
    assert [Path(file).is_relative_to(tmp_path / "unpacked") for file in found] == [True] * 3, found


# --- versions and layout -------------------------------------------------------------------------


def test_the_tested_versions_are_in_the_supported_ranges():
    """Each pin of constraints.txt satisfies setup.cfg, and each need of ours and of the tests is
    pinned: otherwise the tested set is a different one every day. Triton is not: PyTorch's builds
    for GPUs pin it themselves, and another pin could not be installed beside them."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    config = read_setup_cfg()
    extras = dict(config["options.extras_require"])
    needs = [config["options"]["install_requires"], extras["test"], extras["plot"], extras["demo"]]
    for line in "\n".join(needs).split():
        if Requirement(line).name == "triton":
            continue
        assert canonicalize_name(Requirement(line).name) in pins, f"not in constraints.txt: {line}"
    for line in "\n".join([needs[0], *extras.values()]).split():
        requirement = Requirement(line)
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is None or pin in requirement.specifier, f"{line}, but the tests run with {pin}"


def test_the_top_level_holds_the_six_folders():
    """Counted are the folders that git has or would add: not .git, .venv, out or build."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    folders = {line.split("/")[0] for line in listed.stdout.splitlines() if "/" in line}
    assert {name for name in folders if not name.startswith(".")} == TOP_LEVEL
