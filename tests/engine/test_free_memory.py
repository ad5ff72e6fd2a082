"""State that the machine has no room for is refused before it is written."""

from pathlib import Path

import pytest
import torch

from longstraw import Engine, EngineConfig, MemoryPlanError
from longstraw.state import PageStore, free_memory
from longstraw.state.free_memory import FreeMemory, available_bytes, ranks_on_node
from tests.engine.compare import RandomLoss, random_groups
from tests.engine.late_lanes import LateLanes
from tests.models import tiny_model

CPU = torch.device("cpu")


class Machine:
    """A machine with so many bytes free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, ranks: int = 1) -> None:
        self.free = free
        self.num_asked = 0
        monkeypatch.setattr(free_memory, "available_bytes", self._available)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    def _available(self, device: torch.device) -> int:
        self.num_asked += 1
        return self.free


def _engine(model, **changes) -> Engine:
    return Engine(model, EngineConfig(**{"chunk_size": 16, "page_size": 8, **changes}))


def test_without_a_budget_the_free_memory_is_the_limit(monkeypatch) -> None:
    """A prompt that does not fit is an error with the numbers, and nothing was written; with room
    for state but not for cotangents too, nothing was accumulated either."""
    model = tiny_model("llama")
    (group,) = random_groups([(41, (3,))])
    engine = _engine(model)
    state = engine.decoder.state_bytes(40, with_cotangents=False)
    machine = Machine(monkeypatch, free=state)  # a 20th of which is reserved
    with pytest.raises(MemoryPlanError, match="left for this process, one of 1"):
        engine.capture(group.prompt_ids)
    assert engine.store.peak_bytes == 0
    machine.free = int(1.5 * state)
    engine.capture(group.prompt_ids)
    machine.free -= state
    with pytest.raises(MemoryPlanError, match="cotangents of 40 prompt tokens"):
        engine.accumulate([group], RandomLoss([group]))
    assert all(p.grad is None for p in model.parameters())
    machine.free = int(1.5 * state)
    engine.accumulate([group], RandomLoss([group]))
    engine.finalize()


def test_a_budget_larger_than_the_machine_does_not_help(monkeypatch) -> None:
    """The user's number is a promise that the system may not keep."""
    engine = _engine(tiny_model("llama"), state_budget_bytes=2**40)
    Machine(monkeypatch, free=1000)
    (group,) = random_groups([(41, (3,))])
    with pytest.raises(MemoryPlanError, match="Run fewer ranks per node"):
        engine.capture(group.prompt_ids)


def test_states_that_can_be_captured_again_make_room_in_memory_too(monkeypatch) -> None:
    """Room for one prompt's state and a half: three prompts one after the other all fit."""
    engine = _engine(tiny_model("llama"), prompt_gradient="stopped")
    one = engine.decoder.state_bytes(40, with_cotangents=False)
    groups = random_groups([(41, (3,)), (41, (5,)), (41, (2,))])
    total = one * 8 // 5
    monkeypatch.setattr(
        free_memory, "available_bytes", lambda device: total - engine.store.bytes_in_use
    )
    for group in groups:
        engine.capture(group.prompt_ids)
        assert engine.store.bytes_in_use == one


def test_the_system_is_asked_per_state_and_not_per_page(monkeypatch) -> None:
    """A prompt of 40 pages a layer, four layers: some questions, not hundreds."""
    machine = Machine(monkeypatch, free=2**40)
    engine = _engine(tiny_model("llama"))
    (group,) = random_groups([(321, (3, 5))])
    engine.accumulate([group], RandomLoss([group]))
    assert 0 < machine.num_asked <= 5


def test_ranks_of_a_node_take_equal_shares(monkeypatch) -> None:
    """1000 bytes, 4 ranks, a 20th in reserve: 237 each. When the others have taken theirs, 290 are
    free: still the whole share, where a division of what is left would give 68. When others have
    taken more than shares, what is left counts."""
    machine = Machine(monkeypatch, free=1000, ranks=4)
    memory = FreeMemory(CPU)
    assert memory.bytes_left(held=0) == 950 // 4
    machine.free = 290
    assert memory.bytes_left(held=0) == 950 // 4
    assert memory.bytes_left(held=200) == 950 // 4 - 200
    machine.free = 100
    assert memory.bytes_left(held=0) == 95


def test_what_the_pinned_pool_keeps_counts_as_free(monkeypatch) -> None:
    """Pages that were released left their buffers to the next ones: no memory has to be free."""
    machine = Machine(monkeypatch, free=10**6)
    monkeypatch.setattr(
        "longstraw.state.store.lanes_between",
        lambda home, device: LateLanes(compute_at_once=True),
    )
    store = PageStore(CPU, 4)
    key = torch.randn(1, 2, 400, 8)
    store.release(store.write(key, key, start=0, needs_cotangent=True))
    kept = store.pinned_bytes
    assert kept >= 2 * key.nbytes
    machine.free = 0
    store.require(2 * key.nbytes, "the same again")
    with pytest.raises(MemoryPlanError):
        store.require(2 * kept, "more")
    assert store.pinned_bytes == 0  # given up in search of room


def test_a_device_without_figures_is_not_judged(monkeypatch) -> None:
    """Where nobody can say what is free, only the budget counts."""
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: None)
    PageStore(CPU, 4).require(2**60, "anything")


def test_the_launchers_word_on_ranks_is_taken(monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_on_node() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks_on_node() == 8


def test_the_tightest_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    """Version 2: a limit on the job, none on the step inside it; 300 of the 900 bytes in use are
    cached files, which give way. The root has no files, as on a host."""
    job, step = tmp_path / "job", tmp_path / "job" / "step"
    step.mkdir(parents=True)
    for group, limit in ((job, "1000"), (step, "max")):
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text("900\n")
        (group / "memory.stat").write_text("anon 600\ninactive_file 300\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert free_memory._limits_along(tmp_path, "/job/step", names) == [400]
    assert free_memory._limits_along(tmp_path, "/elsewhere", names) == []


def test_the_host_of_this_process_has_memory() -> None:
    """The real question, with whatever limits hold here."""
    assert available_bytes(CPU) > 0
    assert available_bytes(torch.device("meta")) is None
