"""Files of pages that fail, lie or disappear: an error, no wrong gradient, and nothing left behind.

The files have no name, so a test reaches them by their descriptor, as a broken disk would.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longstraw import Engine, EngineConfig, PageFileError, PromptStateError
from longstraw.state import PageStore, page_files
from longstraw.state.page_files import NUM_THREADS
from longstraw.state.spill import NUM_PASSING
from tests.engine.compare import RandomLoss, gradients, random_groups
from tests.engine.test_disk_pages import CPU, PAGE_BYTES, spilling_store, write
from tests.models import tiny_model


def descriptors(store: PageStore) -> list[int]:
    return [file.handle.fileno() for file in store._spill.files._files.values()]


def open_files(folder: Path) -> list[str]:
    """Files of this process in `folder`, those without a name too."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return [link for link in links if link.startswith(str(folder))]


def settle(store: PageStore) -> None:
    """Wait until nothing is on its way."""
    for page in store._spill._passing:
        for part in page.place.parts:
            part.wait()


# -------------------------------------------------------------------- what a disk does to bytes


def flip_bits_everywhere(descriptor: int) -> None:
    for offset in range(0, os.fstat(descriptor).st_size, 512):
        (byte,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ 16]), offset)


def cut_off(descriptor: int) -> None:
    os.ftruncate(descriptor, 1000)


def take_away(descriptor: int) -> None:
    """As a network disk that is unmounted: reading is an error."""
    folder = os.open("/", os.O_RDONLY)
    os.dup2(folder, descriptor)
    os.close(folder)


def fill_up(descriptor: int) -> None:
    """Writing to this device says that no space is left; reading it gives zeros."""
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, descriptor)
    os.close(full)


DAMAGES: dict[str, tuple[Callable[[int], None], str]] = {
    "changed bytes": (flip_bits_everywhere, "have changed on the disk"),
    "a file that is cut off": (cut_off, "is cut off"),
    "a file that is gone": (take_away, "cannot be read|failed"),
    "a full disk": (fill_up, "No space left|have changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_an_error_and_leaves_no_gradient(damage: str, tmp_path) -> None:
    """Between the capture and the update; nothing is left of the update, all bytes are given back,
    and the next update gives the right gradient, in new files."""
    do, message = DAMAGES[damage]
    groups = random_groups([(77, (9, 4))])
    model = tiny_model("llama")
    options = {"state_budget_bytes": 30_000, "spill_dir": str(tmp_path)}
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=4, **options))
    engine.capture(groups[0].prompt_ids)
    settle(engine.store)
    for descriptor in descriptors(engine.store):
        do(descriptor)
    with pytest.raises(PageFileError, match=message) as error:
        engine.accumulate(groups, RandomLoss(groups))
        engine.finalize()
    assert "longstraw_spill_dir" in str(error.value)
    assert isinstance(error.value, PromptStateError) and isinstance(error.value, OSError)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    store = engine.store
    assert store.bytes_in_use == store.memory_bytes == store.disk_bytes == store.num_pages == 0
    assert not open_files(tmp_path)
    model.zero_grad()
    engine.accumulate(groups, RandomLoss(groups))
    engine.finalize()
    again = gradients(model)
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=4))
    engine.accumulate(groups, RandomLoss(groups))
    engine.finalize()
    assert all(torch.equal(again[name], grad) for name, grad in gradients(model).items())


def test_one_bit_is_noticed(tmp_path) -> None:
    """Of a page's values; the pages before it are read as they are."""
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    _, _, pages = write(store, 40)
    list(store.read(pages, CPU, torch.float32))
    (descriptor,) = descriptors(store)
    position = pages[10].place.slot.offset + 300
    (byte,) = os.pread(descriptor, 1, position)
    os.pwrite(descriptor, bytes([byte ^ 1]), position)
    seen = []
    with pytest.raises(PageFileError, match="checksum"):
        for page, _, _ in store.read(pages, CPU, torch.float32):
            seen.append(page)
    assert seen == pages[:10]


def test_bytes_of_another_time_are_noticed(tmp_path) -> None:
    """A page whose write was lost: its place holds older cotangents, which were right once."""
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    _, _, pages = write(store, 40)
    (descriptor,) = descriptors(store)
    for _ in range(2):
        older = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        for page, k, v in store.read(pages, CPU, torch.float32, with_cotangents=True):
            store.add_cotangent(page, k, v)
        settle(store)
    os.pwrite(descriptor, older, 0)
    with pytest.raises(PageFileError, match="checksum"):
        list(store.read(pages, CPU, torch.float32, with_cotangents=True))


def test_a_full_disk_is_an_error_at_the_next_page(tmp_path) -> None:
    """It fails in a thread; the process hears of it when it needs the memory."""
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    _, _, pages = write(store, 2)
    settle(store)
    for descriptor in descriptors(store):
        fill_up(descriptor)
    with pytest.raises(PageFileError, match="longstraw_spill_budget_gib") as error:
        write(store, 40)
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.__cause__.errno == errno.ENOSPC
    assert store.num_pages == 2, "pages that nobody knows of are held"
    store.release(pages)
    assert store.memory_bytes == 0


def test_an_error_in_a_thread_reaches_the_caller(tmp_path, monkeypatch) -> None:
    """Whatever it is."""

    def fail(buffers):
        raise ZeroDivisionError("in a thread")

    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    _, _, pages = write(store, 40)
    settle(store)
    monkeypatch.setattr(page_files, "_checksum", fail)
    with pytest.raises(ZeroDivisionError, match="in a thread"):
        list(store.read(pages, CPU, torch.float32))


def test_a_transfer_that_stops_early_is_continued(tmp_path, monkeypatch) -> None:
    """The system may transfer less than it was asked to, in the middle of a tensor."""

    def at_most(num_bytes: int, call: Callable) -> Callable:
        def some(descriptor, buffers, offset):
            return call(descriptor, [buffers[0][:num_bytes]], offset)

        return some

    monkeypatch.setattr(page_files.os, "pwritev", at_most(100, os.pwritev))
    monkeypatch.setattr(page_files.os, "preadv", at_most(37, os.preadv))
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    key, value, pages = write(store, 40)
    for i, (_, k, v) in enumerate(store.read(pages, CPU, torch.float32)):
        run = slice(4 * i, 4 * i + 4)
        assert torch.equal(k, key[..., run, :]) and torch.equal(v, value[..., run, :])


@pytest.mark.parametrize("folder", ["file/below", "file", "/proc/nowhere"])
def test_a_folder_that_takes_no_files_is_refused_at_the_start(folder, tmp_path) -> None:
    """Below a file, a file, and a file system that takes none."""
    (tmp_path / "file").touch()
    config = EngineConfig(spill_dir=str(tmp_path / folder))
    with pytest.raises(PageFileError, match=r"no file can be made in .*longstraw_spill_dir"):
        Engine(tiny_model("llama"), config)


def test_a_folder_that_is_deleted_is_an_error_before_the_capture(tmp_path) -> None:
    """What is free there is asked before a state is begun."""
    folder = tmp_path / "pages"
    engine = Engine(tiny_model("llama"), EngineConfig(spill_dir=str(folder)))
    folder.rmdir()
    (group,) = random_groups([(20, (3,))])
    with pytest.raises(PageFileError, match="pages cannot be found out"):
        engine.capture(group.prompt_ids)


# -------------------------------------------------------------------- writes that are on their way


class SlowDisk:
    """Writes that wait until they are let go, and look whether their bytes changed meanwhile.

    Attributes:
        offsets: where was written, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.pwritev = threading.Event(), os.pwritev
        self.offsets: list[int] = []
        monkeypatch.setattr(page_files.os, "pwritev", self._wait)

    def _wait(self, descriptor, buffers, offset):
        before = [bytes(buffer) for buffer in buffers]
        assert self.gate.wait(timeout=60)
        assert before == [bytes(buffer) for buffer in buffers], "changed under its write"
        self.offsets.append(offset)
        return self.pwritev(descriptor, buffers, offset)


def test_a_page_is_read_while_it_is_written(tmp_path, monkeypatch) -> None:
    """From memory: no write is done yet."""
    disk = SlowDisk(monkeypatch)
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    key, value, pages = write(store, 6)
    assert store.disk_bytes > 0
    for i, (_, k, v) in enumerate(store.read(pages, CPU, torch.float32)):
        run = slice(4 * i, 4 * i + 4)
        assert torch.equal(k, key[..., run, :]) and torch.equal(v, value[..., run, :])
    disk.gate.set()


def test_a_released_page_is_not_written_over_the_next(tmp_path, monkeypatch) -> None:
    """Pages whose writes are queued are released, and others get their places in the file: what is
    read later is the others'. The first `NUM_THREADS` writes are under way and stay."""
    disk = SlowDisk(monkeypatch)
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    _, _, pages = write(store, 8)
    places = {page.place.slot.offset for page in pages[NUM_THREADS:]}
    store.release(pages[NUM_THREADS:])
    key, _, others = write(store, 8 - NUM_THREADS, seed=1)
    assert {page.place.slot.offset for page in others} == places
    disk.gate.set()
    settle(store)
    assert all(disk.offsets.count(place) == 1 for place in places)
    write(store, 20, seed=2)  # the others leave memory
    assert others[0].key.is_meta
    found = torch.cat([k for _, k, _ in store.read(others, CPU, torch.float32)], dim=-2)
    assert torch.equal(found, key)


def test_cotangents_wait_for_their_own_write(tmp_path, monkeypatch) -> None:
    """A page is added to again while its cotangents are written: the second sum waits, or the
    checksum would be of other bytes than the file's."""
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    _, _, (page,) = write(store, 1)
    ones = torch.ones(1, 2, 4, 8)
    settle(store)
    disk = SlowDisk(monkeypatch)
    for _ in store.read([page], CPU, torch.float32, with_cotangents=True):
        store.add_cotangent(page, ones, ones)
        threading.Timer(0.2, disk.gate.set).start()
        store.add_cotangent(page, ones, ones)
        assert disk.gate.is_set()
    settle(store)
    write(store, 20, seed=2)
    assert page.key_cotangent.is_meta
    assert torch.equal(store.join_cotangents([page], ones, ones)[0], 2 * ones)


# -------------------------------------------------------------------- nothing is left


def test_files_are_gone_when_their_pages_are(tmp_path) -> None:
    """And have no name meanwhile."""
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    _, _, pages = write(store, 40)
    assert open_files(tmp_path) and not list(tmp_path.iterdir())
    store.release(pages)
    assert not open_files(tmp_path)


def test_two_stores_in_a_folder_do_not_meet(tmp_path) -> None:
    """As two ranks, or the policy's and the reference's: the same sizes, written in turns."""
    stores = [spilling_store(tmp_path, num_in_memory=NUM_PASSING) for _ in range(2)]
    written = [[write(store, 10, seed=2 * turn + i) for i, store in enumerate(stores)]
               for turn in range(3)]  # fmt: skip
    for turn in written:
        for store, (key, _, pages) in zip(stores, turn, strict=True):
            found = [k for _, k, _ in store.read(pages, CPU, torch.float32)]
            assert torch.equal(torch.cat(found, dim=-2), key)


@pytest.mark.parametrize("end", ["error", "kill"])
def test_nothing_is_left_when_the_process_ends(end: str, tmp_path) -> None:
    """With pages in files and writes on their way: at an error, and when it is killed."""
    program = f"""
import os, signal, torch
from pathlib import Path
from longstraw.state import PageStore
store = PageStore(torch.device("cpu"), 4, {2 * PAGE_BYTES * 8}, spill_dir=Path({str(tmp_path)!r}))
key = torch.randn(1, 2, 4 * 2000, 8)
pages = store.write(key, key, start=0, needs_cotangent=True)
assert store.disk_bytes > 0
print("written", flush=True)
if {end!r} == "error": raise RuntimeError("an error")
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    codes = {"error": 1, "kill": -signal.SIGKILL}
    assert result.returncode == codes[end], result.stderr
    assert "written" in result.stdout
    assert not list(tmp_path.iterdir())
