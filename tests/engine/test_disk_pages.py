"""Pages in files: the same gradients bit for bit, the budgets kept, and nothing wrong is read.

What can go wrong with the files themselves is in `test_page_files.py`.
"""

import os
import shutil
from collections import namedtuple
from itertools import product
from pathlib import Path

import pytest
import torch

from longstraw import ConfigError, Engine, EngineConfig, MemoryPlanError, generate
from longstraw.state import PageStore
from longstraw.state.page_files import PageFiles
from longstraw.state.spill import NUM_AHEAD, NUM_PASSING
from tests.engine.compare import RandomLoss, engine_gradients, gradients, random_groups
from tests.engine.late_lanes import LateLanes
from tests.engine.staged_program import Program, expected
from tests.marks import slow_but
from tests.models import tiny_model

CPU = torch.device("cpu")
PAGE_BYTES = 2 * 2 * 4 * 8 * 4
"""Key and value of 1 x 2 x 4 x 8 numbers in fp32; its cotangents take as much again."""


def spilling_store(folder: Path, num_in_memory: int, **options) -> PageStore:
    """Pages of 4 tokens; memory for so many of `PAGE_BYTES` with their cotangents."""
    budget = 2 * PAGE_BYTES * num_in_memory
    return PageStore(CPU, 4, budget, spill_dir=folder, **options)


def write(store: PageStore, num_pages: int, seed: int = 0):
    key, value = torch.randn(2, 1, 2, 4 * num_pages, 8, generator=torch.manual_seed(seed))
    return key, value, store.write(key, value, start=0, needs_cotangent=True)


# -------------------------------------------------------------------- the same gradient


@pytest.mark.parametrize(
    ("family", "page_size", "prompt_gradient", "dtype"),
    slow_but(
        [
            ("llama", 4, "exact", torch.float32),
            ("llama", 3, "stopped", torch.float64),
            ("gemma2", 5, "exact", torch.float32),
            ("glm_moe_dsa", 5, "exact", torch.float32),
        ],
        [
            (*case, *options)
            for case in [
                ("llama", 4),
                ("llama", 3),
                ("gemma2", 5),
                ("qwen3_moe", 4),
                ("glm_moe_dsa", 5),
            ]
            for options in product(["exact", "stopped"], [torch.float32, torch.float64])
        ],
    ),
)
def test_files_do_not_change_a_bit(family, page_size, prompt_gradient, dtype, tmp_path) -> None:
    """A quarter of the state in memory, the rest in files; ragged members, one of several chunks;
    prompts and chunks that pages do not divide. No sum is made in another order."""
    groups = random_groups([(157, (9, 4, 40)), (62, (17,))])
    settings = {
        "chunk_size": 16,
        "page_size": page_size,
        "replay_batch": 2,
        "prompt_gradient": prompt_gradient,
    }

    def run(**changes):
        model = tiny_model(family, num_hidden_layers=2).to(dtype)
        engine = Engine(model, EngineConfig(**settings, **changes))
        engine.accumulate(groups, RandomLoss(groups))
        engine.finalize()
        assert engine.store.bytes_in_use == engine.store.memory_bytes == 0
        return gradients(model), engine.store

    plain, in_memory = run()
    quarter = in_memory.peak_bytes // 4
    spilled, store = run(state_budget_bytes=quarter, spill_dir=str(tmp_path))
    assert store.peak_memory_bytes <= quarter
    assert store.peak_bytes == in_memory.peak_bytes
    assert store.peak_disk_bytes >= store.peak_bytes - quarter
    for name, grad in plain.items():
        assert torch.equal(spilled[name], grad), name


@pytest.mark.parametrize(
    "dtype", slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]), ids=str
)
def test_files_and_late_copies_together_do_not_change_a_bit(dtype, tmp_path, monkeypatch) -> None:
    """From a file to the host, from there to a device, and the cotangents back."""
    groups = random_groups([(77, (9, 4, 40))])
    config = {"chunk_size": 16, "page_size": 4, "page_device": "host", "replay_batch": 2}
    plain = engine_gradients(tiny_model("llama").to(dtype), groups, EngineConfig(**config))
    lanes = LateLanes(compute_at_once=True)
    monkeypatch.setattr("longstraw.state.store.lanes_between", lambda home, device: lanes)
    config |= {"state_budget_bytes": 40_000, "spill_dir": str(tmp_path)}
    spilled = engine_gradients(tiny_model("llama").to(dtype), groups, EngineConfig(**config))
    lanes.finish()
    for name, grad in plain.items():
        assert torch.equal(spilled[name], grad), name


@pytest.mark.parametrize("budget", [8_000, 20_000])
@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_copies_changes_a_bit(budget, seed, tmp_path, monkeypatch) -> None:
    """The program of `test_staging.py`, with lanes that run when they like. 8,000 bytes: nothing
    stays in memory; 20,000: some pages do."""
    expected()
    lanes = LateLanes(seed=seed)
    monkeypatch.setattr("longstraw.state.store.lanes_between", lambda home, device: lanes)
    store = PageStore(CPU, 4, budget, spill_dir=tmp_path)
    found = Program(store, lanes.compute).run()
    lanes.finish()
    assert store.peak_disk_bytes > 0 and store.peak_memory_bytes <= budget
    assert store.bytes_in_use == store.disk_bytes == store.memory_bytes == 0
    for number, (ours, theirs) in enumerate(zip(found, expected(), strict=True)):
        assert torch.equal(ours, theirs), f"result {number}"


def test_generation_reads_pages_in_files(tmp_path) -> None:
    """Under inference mode, and then an update on the same captured prompt."""
    (group,) = random_groups([(77, (3, 5))])
    tokens, grads = [], []
    for options in ({}, {"state_budget_bytes": 30_000, "spill_dir": str(tmp_path)}):
        model = tiny_model("llama")
        engine = Engine(model, EngineConfig(chunk_size=16, page_size=4, **options))
        with torch.inference_mode():
            tokens.append(generate(engine, group.prompt_ids, 2, max_new_tokens=5, do_sample=False))
        assert (engine.store.disk_bytes > 0) == bool(options)
        engine.accumulate([group], RandomLoss([group]))
        engine.finalize()
        assert engine.ledger.num_captures == 1
        grads.append(gradients(model))
    assert torch.equal(tokens[0], tokens[1])
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


# -------------------------------------------------------------------- pages


def test_pages_come_back_as_they_were_written(tmp_path) -> None:
    """Keys, values, and cotangents that three readers left; 40 pages, 2 of which stay."""
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING + 2)
    key, value, pages = write(store, 40)
    assert store.disk_bytes == 38 * PAGE_BYTES
    for reader in range(3):
        for i, (page, k, v) in enumerate(
            store.read(pages, CPU, torch.float32, with_cotangents=True)
        ):
            run = slice(4 * i, 4 * i + 4)
            assert torch.equal(k, key[..., run, :]) and torch.equal(v, value[..., run, :])
            store.add_cotangent(page, (reader + 1) * k, v)
    assert store.disk_bytes == 2 * 38 * PAGE_BYTES
    joined = store.join_cotangents(pages, key, value)
    assert torch.equal(joined[0], key + 2 * key + 3 * key)
    assert torch.equal(joined[1], value + value + value)
    assert store.peak_memory_bytes <= store.budget_bytes
    store.release(pages)
    assert store.disk_bytes == store.memory_bytes == store.bytes_in_use == 0


def test_a_page_in_a_file_has_its_shape_and_no_numbers(tmp_path) -> None:
    """Code that reads it beside the store gets an error, and not memory of another page."""
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    _, _, pages = write(store, 40)
    assert pages[0].key.is_meta and pages[0].num_tokens == 4 and pages[0].num_rows == 1
    with pytest.raises(NotImplementedError):
        pages[0].read(CPU, torch.float64)


def test_pages_are_read_ahead_in_the_order_of_their_reader(tmp_path, monkeypatch) -> None:
    """Those that stay need no read; the others are asked for in order, `NUM_AHEAD` before their
    turn, from the beginning of the visit on, and once each."""
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING + 2)
    _, _, pages = write(store, 40)
    for _ in store.read(pages[2:10], CPU, torch.float32):
        pass  # what the capture left in memory is gone
    begun: list[int] = []
    number = {page.place.slot.offset: i for i, page in enumerate(pages) if page.place}
    read = PageFiles.read
    monkeypatch.setattr(
        PageFiles,
        "read",
        lambda self, slot, *rest: begun.append(number[slot.offset]) or read(self, slot, *rest),
    )
    seen = []
    visit = [*pages[:2], *pages[12:30]]
    for page, _, _ in store.read(visit, CPU, torch.float32):
        seen.append(len(begun))
        assert not page.key.is_meta
    assert begun == list(range(12, 30))
    ahead = [min(NUM_AHEAD + max(i - 1, 0), 18) for i in range(20)]
    assert seen == ahead


def test_pages_ahead_do_not_push_out_the_page_in_use(tmp_path, monkeypatch) -> None:
    """Memory for two pages, and a disk so fast that a page ahead always wants the room."""
    read = PageFiles.read

    def read_at_once(self, *rest):
        future = read(self, *rest)
        future.exception()
        return future

    monkeypatch.setattr(PageFiles, "read", read_at_once)
    store = spilling_store(tmp_path, num_in_memory=2)
    key, _, pages = write(store, 10)
    found = [k for _, k, _ in store.read(pages, CPU, torch.float32)]
    assert torch.equal(torch.cat(found, dim=-2), key)


def test_larger_pages_send_away_what_was_to_stay(tmp_path) -> None:
    """Small pages fill the memory; then pages of 8 rows pass through it. The budget holds, and all
    are read as they were written."""
    store = spilling_store(tmp_path, num_in_memory=24)
    key, value, pages = write(store, 20)
    staying = sum(page.place is None for page in pages)
    assert staying == 24 - NUM_PASSING
    wide = torch.randn(8, 2, 40, 8)
    wide_pages = store.write(wide, wide, start=80, needs_cotangent=True)
    for page, k, v in store.read(wide_pages, CPU, torch.float32, with_cotangents=True):
        store.add_cotangent(page, k, v)
    assert sum(page.place is None for page in pages) < staying
    assert torch.equal(store.join_cotangents(wide_pages, wide, wide)[0], wide)
    for i, (_, k, v) in enumerate(store.read(pages, CPU, torch.float32)):
        run = slice(4 * i, 4 * i + 4)
        assert torch.equal(k, key[..., run, :]) and torch.equal(v, value[..., run, :])
    assert store.peak_memory_bytes <= store.budget_bytes


def test_cotangents_that_were_not_expected_find_room(tmp_path) -> None:
    """Pages written as constants that become differentiable, in memory and in files."""
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING + 4)
    key = torch.randn(1, 2, 80, 8)
    pages = store.write(key, key, start=0, needs_cotangent=False)
    for page in pages:
        page.needs_cotangent = True
    for page, k, v in store.read(pages, CPU, torch.float32, with_cotangents=True):
        store.add_cotangent(page, k, v)
    assert torch.equal(store.join_cotangents(pages, key, key)[1], key)
    assert store.peak_memory_bytes <= store.budget_bytes
    store.release(pages)
    assert store.memory_bytes == store.disk_bytes == 0


# -------------------------------------------------------------------- budgets


def test_what_exceeds_memory_and_files_is_refused_before_it_starts(tmp_path) -> None:
    """The state fits both budgets, its cotangents do not; then not even the state."""
    (group,) = random_groups([(157, (3,))])
    model = tiny_model("llama")
    options = {"chunk_size": 16, "page_size": 4, "spill_dir": str(tmp_path)}
    config = EngineConfig(**options, state_budget_bytes=60_000, spill_budget_bytes=160_000)
    engine = Engine(model, config)
    assert engine.decoder.state_bytes(156, with_cotangents=False) == 159_744
    engine.capture(group.prompt_ids)
    disk_bytes = engine.store.disk_bytes
    with pytest.raises(MemoryPlanError, match="longstraw_spill_budget_gib"):
        engine.accumulate([group], RandomLoss([group]))
    assert engine.store.peak_disk_bytes == disk_bytes
    assert all(p.grad is None for p in model.parameters())
    config = EngineConfig(**options, state_budget_bytes=60_000, spill_budget_bytes=80_000)
    engine = Engine(model, config)
    with pytest.raises(MemoryPlanError, match=str(tmp_path)):
        engine.capture(group.prompt_ids)
    assert engine.store.peak_bytes == 0


def test_the_free_space_of_the_disk_is_a_limit(tmp_path, monkeypatch) -> None:
    """Without a budget of their own, files take what is free, a 20th and other ranks' parts apart.
    A budget that is larger than the disk does not help."""
    usage = namedtuple("usage", "total used free")
    free = 100_000
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 0, free))
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    in_memory = store.budget_bytes or 0  # all of it, as long as no page says what must pass through
    store.require(in_memory + 95_000, "a state")
    with pytest.raises(MemoryPlanError, match="95,000"):
        store.require(in_memory + 95_001, "a state")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING, spill_budget_bytes=10**9)
    room = in_memory + 95_000 // 4
    assert store.fits(room) and not store.fits(room + 1)


def test_without_a_budget_the_free_memory_decides_who_stays(tmp_path, monkeypatch) -> None:
    """Room for 12 pages with cotangents, 8 of which are passed through."""
    store = PageStore(CPU, 4, spill_dir=tmp_path)
    free = 2 * PAGE_BYTES * 12 * 20 // 19 + 1
    monkeypatch.setattr(
        "longstraw.state.free_memory.available_bytes", lambda device: free - store.memory_bytes
    )
    write(store, 20)
    assert store.disk_bytes == (20 - 12 + NUM_PASSING) * PAGE_BYTES


def test_memory_for_less_than_two_pages_is_refused(tmp_path) -> None:
    """One is read while the next comes in; the page that has no room is not written."""
    store = spilling_store(tmp_path, num_in_memory=1)
    with pytest.raises(MemoryPlanError, match="longstraw_page_size"):
        _, _, pages = write(store, 3)
        list(store.read(pages, CPU, torch.float32))
    store = PageStore(CPU, 4, PAGE_BYTES, spill_dir=tmp_path)
    with pytest.raises(MemoryPlanError, match="longstraw_page_size"):
        write(store, 3)
    assert store.bytes_in_use == store.memory_bytes == store.disk_bytes == 0


def test_pages_that_are_not_on_the_host_do_not_go_to_files(tmp_path) -> None:
    with pytest.raises(ConfigError, match="page_device='host'"):
        PageStore(torch.device("meta"), 4, spill_dir=tmp_path)


def test_what_is_free_again_is_used_again(tmp_path) -> None:
    """Pages of 20 updates, released in between: the files grow to one update's."""
    store = spilling_store(tmp_path, num_in_memory=NUM_PASSING)
    kept = write(store, 12)[2]  # so that the file is never empty
    for seed in range(20):
        key, value, pages = write(store, 30, seed)
        joined = torch.cat([k for _, k, _ in store.read(pages, CPU, torch.float32)], dim=-2)
        assert torch.equal(joined, key)
        store.release(pages)
    (file,) = store._spill.files._files.values()
    assert os.fstat(file.handle.fileno()).st_size <= 42 * 2 * PAGE_BYTES
    store.release(kept)
    assert not store._spill.files._files


def test_the_same_update_fits_again(tmp_path: Path) -> None:
    """Room is kept for the largest page there is, not for the largest there ever was: pages of four
    responses of more than a chunk are larger than the prompt's."""
    groups = random_groups([(157, (40, 40, 40, 40))])
    engine = Engine(
        tiny_model("llama"),
        EngineConfig(
            chunk_size=16,
            page_size=4,
            replay_batch=4,
            page_device="host",
            spill_dir=str(tmp_path),
            state_budget_bytes=80_000,
            spill_budget_bytes=524_000,
        ),
    )
    for _ in range(2):
        engine.accumulate(groups, RandomLoss(groups))
        engine.finalize()
        assert engine.store.bytes_in_use == 0
