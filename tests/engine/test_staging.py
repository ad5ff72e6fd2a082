"""Pages on the host, copied ahead of their reader: who waits for whom, tested without a GPU.

`LateLanes` runs copies as late and as much out of order as events allow. A program of captures,
visits and releases has to give bit for bit what it gives on a store that copies nothing, under
every order; with one wait left out it may not.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longstraw.state import PageStore, staging
from longstraw.state.departures import Departures
from longstraw.state.lanes import Lane
from longstraw.state.staging import Staging
from tests.engine.late_lanes import LateLanes, WrittenAfterwards
from tests.engine.staged_program import Program, expected

SCHEDULES = [{"order": order} for order in itertools.permutations(Lane)]
SCHEDULES += [{"seed": seed} for seed in range(12)]


def schedule_id(schedule: dict) -> str:
    order = schedule.get("order")
    return "-".join(lane.value for lane in order) if order else f"random{schedule['seed']}"


def run_late(monkeypatch: pytest.MonkeyPatch, **schedule) -> list[Tensor]:
    """The program's results with its pages behind `LateLanes(**schedule)`."""
    expected()  # before there are lanes
    lanes = LateLanes(**schedule)
    monkeypatch.setattr("longstraw.state.store.lanes_between", lambda home, device: lanes)
    store = PageStore(torch.device("cpu"), 4)
    # Few enough that sources of captures are given up in between.
    monkeypatch.setattr(staging, "MAX_HELD_BYTES", 1500)
    results = Program(store, lanes.compute).run()
    lanes.finish()
    assert store.bytes_in_use == 0 and store.num_pages == 0
    assert lanes.num_synchronized == 0, "the process waited for the device"
    return results


def is_right(monkeypatch: pytest.MonkeyPatch, **schedule) -> bool:
    try:
        found = run_late(monkeypatch, **schedule)
    except WrittenAfterwards:
        return False
    return all(torch.equal(a, b) for a, b in zip(found, expected(), strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=schedule_id)
def test_no_order_of_copies_changes_a_bit(schedule: dict, monkeypatch) -> None:
    """Prefetched, added to and sent back in any order that events allow: the same numbers.

    Bitwise, because sums are in the same order and dtype as on the device.
    """
    found = run_late(monkeypatch, **schedule)
    for number, (ours, theirs) in enumerate(zip(found, expected(), strict=True)):
        assert torch.equal(ours, theirs), f"result {number}"


@pytest.mark.parametrize(
    ("waiting", "for_whom"),
    [
        (Lane.COMPUTE, Lane.IN),  # pages are read before they are in
        (Lane.IN, Lane.COMPUTE),  # a slot is overwritten under its reader
        (Lane.OUT, Lane.COMPUTE),  # what is not computed yet is sent to the host
        (Lane.IN, Lane.OUT),  # pages are fetched before they are written
        (Lane.COMPUTE, Lane.OUT),  # memory is given up before it has been copied
    ],
    ids=lambda lane: lane.value,
)
def test_waits_between_two_lanes_left_out_would_be_seen(waiting, for_whom, monkeypatch) -> None:
    """A planted mistake: one lane ignores another."""
    ignored = (waiting, for_whom)
    assert not all(is_right(monkeypatch, **schedule, ignored=ignored) for schedule in SCHEDULES)


def forget_page_written(monkeypatch) -> None:
    original = Staging.write

    def write(self, copies):
        original(self, copies)

    monkeypatch.setattr(Staging, "write", write)


def forget_cotangent_written(monkeypatch) -> None:
    original = Staging.add_cotangent

    def add_cotangent(self, page, *grads):
        original(self, page, *grads)
        page.cotangent_written = None

    monkeypatch.setattr(Staging, "add_cotangent", add_cotangent)


def forget_slot(name: str) -> Callable:
    def plant(monkeypatch) -> None:
        original = Staging._wait_until_free

        def wait_until_free(self, slot):
            setattr(slot, name, None)
            original(self, slot)

        monkeypatch.setattr(Staging, "_wait_until_free", wait_until_free)

    return plant


def forget_pages_on_their_way(monkeypatch) -> None:
    def end_visit(self):
        self._close_open()
        self._ahead.clear()
        self._visit = None

    monkeypatch.setattr(Staging, "_end_visit", end_visit)


def forget_earlier_cotangents(monkeypatch) -> None:
    original = Staging.add_cotangent

    def add_cotangent(self, page, *grads):
        self._open.has_cotangent = False
        original(self, page, *grads)

    monkeypatch.setattr(Staging, "add_cotangent", add_cotangent)


def add_to_nothing(monkeypatch) -> None:
    original = Staging.add_cotangent

    def add_cotangent(self, page, *grads):
        self._open.has_cotangent = True
        original(self, page, *grads)

    monkeypatch.setattr(Staging, "add_cotangent", add_cotangent)


def let_sources_go_too_early(monkeypatch) -> None:
    """With the oldest that is read, all are dropped."""

    def drop_behind(self, copied):
        while self._held:
            self._drop_oldest()

    monkeypatch.setattr(Departures, "drop_behind", drop_behind)


def hold_no_source(monkeypatch) -> None:
    monkeypatch.setattr(Departures, "hold", lambda self, copied, sources: None)


def record_before_the_reader(monkeypatch) -> None:
    """`consumed` is recorded when a page is handed out, and not when it has been read."""
    original = Staging._fetch

    def close_open(self):
        self._open = None

    def fetch(self, page, *options):
        original(self, page, *options)
        self._ahead[-1].consumed = self.lanes.record(Lane.COMPUTE)

    monkeypatch.setattr(Staging, "_close_open", close_open)
    monkeypatch.setattr(Staging, "_fetch", fetch)


MISTAKES = {
    "the copy that writes a page is not waited for": forget_page_written,
    "the copy that writes a cotangent is not waited for": forget_cotangent_written,
    "a slot is filled while it is read": forget_slot("consumed"),
    "a slot is filled while its cotangent leaves": forget_slot("departed"),
    "a slot counts as read when it is handed out": record_before_the_reader,
    "pages on their way are forgotten": forget_pages_on_their_way,
    "a cotangent replaces those before": forget_earlier_cotangents,
    "the first cotangent is added to what lay there": add_to_nothing,
    "what is captured is not kept until it is copied": hold_no_source,
    "what is captured is kept until another page is read": let_sources_go_too_early,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_schedule_would_be_seen(mistake: str, monkeypatch) -> None:
    """Guards the orders above: some of them must fail for each mistake."""
    MISTAKES[mistake](monkeypatch)
    assert not all(is_right(monkeypatch, **schedule) for schedule in SCHEDULES)
