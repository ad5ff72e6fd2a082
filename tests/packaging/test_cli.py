"""The command line: what it prints, and the exit code that a script relies on."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

from longstraw.cli import COMMANDS, main
from longstraw.cli.info import PackageInfo


def test_info_reports_this_environment_as_supported(capsys):
    """The tests run in the tested set, so everything is in range; the versions are pip's."""
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {package["name"]: package["found"] for package in report["packages"]}
    assert found["trl"] == metadata.version("trl")
    assert report["ok"] and report["devices"]
    assert main(["info"]) == 0
    assert f"trl                     {metadata.version('trl')}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "extra", "status"),
    [
        ("2.13.0+cpu", None, "ok"),
        ("2.15.0.dev20261101", None, "ok"),
        ("2.5.1", None, "fail"),
        ("2.5.1", "demo", "fail"),
        (None, None, "fail"),
        (None, "demo", "-"),
    ],
)
def test_a_package_is_fine_when_in_range_or_not_needed(found, extra, status):
    """Local builds and nightlies count; an optional package may be absent but not outdated."""
    assert PackageInfo("torch", ">=2.6", found, extra).status == status


def test_an_unsupported_package_makes_info_fail(capsys, monkeypatch):
    """Exit code 1, so that a launch script can stop there."""
    outdated = PackageInfo("trl", ">=1.16,<2", "0.9.0", None)
    monkeypatch.setattr("longstraw.cli.info.list_packages", lambda: [outdated])
    assert main(["info"]) == 1
    assert "fail  trl" in capsys.readouterr().out


def test_no_command_shows_the_commands_and_a_wrong_one_is_refused(capsys):
    """Both are mistakes of usage: exit code 2."""
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    with pytest.raises(SystemExit, match="2"):
        main(["no-such-command"])


def test_who_stops_reading_gets_no_traceback():
    """As `longstraw bench | head -1` does; here before a line is written."""
    command = [sys.executable, "-m", "longstraw", "bench"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert "BrokenPipe" not in process.stderr.read() and process.wait() == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    """`--help` starts from the command's docstring and ends with the exit codes."""
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    out = capsys.readouterr().out
    assert COMMANDS[name].__doc__.strip().splitlines()[0] in out
    assert "exit codes" in out


def test_python_m_longstraw_is_the_same_program():
    """For machines where the script `longstraw` is not on the path."""
    command = [sys.executable, "-m", "longstraw"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.startswith("usage: longstraw")
