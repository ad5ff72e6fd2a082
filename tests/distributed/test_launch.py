"""Processes that a launcher started and nobody connected are noticed."""

import pytest

from longstraw import ConfigError, check_ranks, launched_ranks


def launch(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    """What a launcher sets."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def test_ranks_that_accelerate_takes_for_single_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would train alone on the same data and overwrite the others' checkpoints."""
    launch(monkeypatch, 2)
    with pytest.raises(ConfigError, match="started 2 processes, and accelerate counts 1.*gloo"):
        check_ranks(1)


def test_connected_ranks_and_single_processes_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, 2)
    check_ranks(2)
    monkeypatch.delenv("RANK")
    assert launched_ranks() == 1
    check_ranks(1)
