"""Pages on the host, read through slots on the device: what readers see, and what it takes.

`LateLanes` stands for the GPU. That no wait is missing is tested in `test_staging.py`.
"""

from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from longstraw import Engine, EngineConfig
from longstraw.state import PageStore
from longstraw.state.lanes import Lane
from longstraw.state.pinned import PinnedPool
from longstraw.state.staging import NUM_SLOTS
from tests.engine.compare import engine_gradients, random_groups
from tests.engine.late_lanes import LateLanes
from tests.marks import slow_but
from tests.models import tiny_model

CPU = torch.device("cpu")


def staged_store(monkeypatch: pytest.MonkeyPatch, lanes: LateLanes) -> PageStore:
    """Pages of 4 tokens on a host whose device is `lanes`."""
    monkeypatch.setattr("longstraw.state.store.lanes_between", lambda home, device: lanes)
    return PageStore(CPU, 4)


@pytest.mark.parametrize(
    ("family", "dtype"),
    slow_but(
        [("llama", torch.bfloat16), ("glm_moe_dsa", torch.bfloat16)],
        product(
            ["llama", "gemma2", "gpt_oss", "qwen3_moe", "qwen3_5", "glm_moe_dsa"],
            [torch.float64, torch.bfloat16],
        ),
    ),
)
def test_the_engine_on_late_copies_gives_the_same_gradient(family, dtype, monkeypatch) -> None:
    """Several chunks, members of more than a chunk, two prompts, windows: not a bit differs from
    pages that stay on the device, and the process never waits for a copy."""
    groups = random_groups([(53, (9, 4, 40)), (24, (17,))])
    settings = _config(replay_batch=2)
    plain = engine_gradients(tiny_model(family).to(dtype), groups, settings)
    lanes = LateLanes(compute_at_once=True)
    monkeypatch.setattr("longstraw.state.store.lanes_between", lambda home, device: lanes)
    late = engine_gradients(tiny_model(family).to(dtype), groups, settings)
    assert lanes.num_copies[Lane.IN] > 100 and lanes.num_copies[Lane.OUT] > 100
    assert lanes.num_synchronized == 0
    lanes.finish()
    for name, grad in plain.items():
        assert torch.equal(late[name], grad), name


def _config(**changes) -> EngineConfig:
    return EngineConfig(**{"chunk_size": 16, "page_size": 8, "page_device": "host", **changes})


def test_the_engine_sees_a_copy_that_nobody_waits_for(monkeypatch) -> None:
    """Guards the test above: what has not come in yet is NaN, and reaches the scores."""
    lanes = LateLanes(compute_at_once=True, ignored=(Lane.COMPUTE, Lane.IN))
    monkeypatch.setattr("longstraw.state.store.lanes_between", lambda home, device: lanes)
    (group,) = random_groups([(53, (9, 4))])
    scores = Engine(tiny_model("llama"), _config()).score(group)
    assert scores.logps[0].isnan().all()


@pytest.mark.parametrize("order", [None, *permutations(Lane)], ids=str)
def test_what_was_read_of_a_snapshot_outlives_its_slot(order, monkeypatch) -> None:
    """A recurrent layer holds it for a whole pass, while its slot goes to the next page: a copy
    that is made a moment too late finds other numbers there. Its two parts have a dtype each."""
    lanes = LateLanes(order)
    store = staged_store(monkeypatch, lanes)
    sources = [(torch.randn(1, 2, 3, 4), torch.randn(1, 5, 3).bfloat16()) for _ in range(5)]
    snapshots = [store.write_snapshot(*source, i, False) for i, source in enumerate(sources)]
    found = [store.read_snapshot(snapshot, CPU) for snapshot in snapshots]
    lanes.finish()
    for source, parts in zip(sources, found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(source, parts, strict=True))


# -------------------------------------------------------------------- bytes and pages


def test_staging_takes_two_pages_however_many_there_are(monkeypatch) -> None:
    """fp32 pages of 1 x 2 x 4 x 8 numbers: key, value and two cotangents of 256 bytes, each on a
    boundary of 512; freed with the last page."""
    lanes = LateLanes(compute_at_once=True)
    store = staged_store(monkeypatch, lanes)
    key = torch.randn(1, 2, 400, 8)
    pages = store.write(key, key, start=0, needs_cotangent=True)
    assert len(pages) == 100
    for page, k, v in store.read(pages, CPU, torch.float32, with_cotangents=True):
        store.add_cotangent(page, k, v)
    (stage,) = store._active_stagings()
    assert stage.nbytes == NUM_SLOTS * 4 * 512
    assert store.staging_bytes == stage.nbytes + key.nbytes  # the source was on its way
    store.release(pages)
    assert stage.nbytes == 0


def test_a_page_is_on_its_way_before_the_one_before_is_read(monkeypatch) -> None:
    """One page ahead and not more: two numbers of copies differ by one page's two tensors."""
    lanes = LateLanes(order=tuple(Lane))
    store = staged_store(monkeypatch, lanes)
    key = torch.randn(1, 2, 40, 8)
    pages = store.write(key, key, start=0, needs_cotangent=False)
    begun = [lanes.num_copies[Lane.IN] // 2 for _ in store.read(pages, CPU, torch.float32)]
    assert begun == [2, 3, 4, 5, 6, 7, 8, 9, 10, 10]


def test_pages_without_cotangents_bring_none(monkeypatch) -> None:
    """A stopped prompt's pages cross the bus as keys and values only, in a backward too."""
    lanes = LateLanes(compute_at_once=True)
    store = staged_store(monkeypatch, lanes)
    key = torch.randn(1, 2, 40, 8)
    pages = store.write(key, key, start=0, needs_cotangent=False)
    list(store.read(pages, CPU, torch.float32, with_cotangents=True))
    assert lanes.num_copies[Lane.IN] == 2 * len(pages)


def test_a_page_can_be_looked_at_by_the_process(monkeypatch) -> None:
    """`Page.read` and `Page.cotangents` wait themselves."""
    lanes = LateLanes(order=tuple(Lane))
    store = staged_store(monkeypatch, lanes)
    key = torch.randn(1, 2, 4, 8)
    (page,) = store.write(key, key, start=0, needs_cotangent=True)
    assert torch.equal(page.read(CPU, torch.float32)[0], key)
    for handed, *_ in store.read([page], CPU, torch.float32, with_cotangents=True):
        store.add_cotangent(handed, key, 2 * key)
    assert torch.equal(page.cotangents()[1], 2 * key)


def test_a_released_page_is_not_read_or_released_again(monkeypatch) -> None:
    """Its buffers may hold another page's keys by now."""
    store = staged_store(monkeypatch, LateLanes(order=tuple(Lane)))
    key = torch.randn(1, 2, 8, 8)
    pages = store.write(key, key, start=0, needs_cotangent=True)
    store.release(pages[:1])
    with pytest.raises(AssertionError, match="released twice"):
        store.release(pages)
    with pytest.raises(AssertionError, match="after its release"):
        list(store.read(pages, CPU, torch.float32))


def test_a_visit_that_another_interrupts_does_not_go_on(monkeypatch) -> None:
    """Both would hand out the same slots."""
    store = staged_store(monkeypatch, LateLanes(order=tuple(Lane)))
    key = torch.randn(1, 2, 16, 8)
    pages = store.write(key, key, start=0, needs_cotangent=True)
    first = store.read(pages, CPU, torch.float32)
    next(first)
    next(store.read(pages, CPU, torch.float32))
    with pytest.raises(AssertionError, match="after another had begun"):
        next(first)


def test_pinned_buffers_are_cut_from_slabs_and_used_again() -> None:
    """A thousand buffers, then a thousand more after they came back: no slab is added, a buffer is
    at most an eighth too large, and no two that are lent at a time overlap."""
    slabs: list[int] = []

    def allocate(num_bytes: int) -> Tensor:
        slabs.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    pool = PinnedPool(allocate)
    shape = torch.Size((1, 3, 37, 8))
    for _ in range(2):
        lent = [pool.take(shape, torch.float32) for _ in range(1000)]
        for number, tensor in enumerate(lent):
            tensor.fill_(number)
        assert all(bool((tensor == number).all()) for number, tensor in enumerate(lent))
        for tensor in lent:
            pool.give_back(tensor)
    assert len(slabs) < 10 and sum(slabs) == pool.num_bytes
    exact = 1000 * 3 * 37 * 8 * 4
    assert exact <= pool.num_bytes < 2 * 1.125 * exact  # the last slab may be half empty
    pool.trim()
    assert pool.num_bytes == pool.free_bytes == 0


def test_the_pool_is_trimmed_only_when_nothing_is_lent() -> None:
    """Slabs are shared by pages: unlocking one under a page would lose it."""
    pool = PinnedPool(lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    tensor = pool.take(torch.Size((4,)), torch.float32)
    pool.trim()
    assert pool.num_bytes > 0
    pool.give_back(tensor)
    pool.trim()
    assert pool.num_bytes == 0
