"""Pages on the host of a GPU: the schedule of `longstraw/state/staging.py` on real streams.

That no wait is missing is tested on the CPU, in `tests/engine/test_staging.py`. Here: that streams
and events of CUDA do what that test takes for granted, that copies overlap, and what they take.
"""

import time
from itertools import pairwise

import pytest
import torch

from longstraw import Engine, EngineConfig, MemoryPlanError
from longstraw.state import PageStore
from longstraw.state.free_memory import available_bytes
from longstraw.state.lanes import CudaLanes, Lane
from longstraw.state.staging import NUM_SLOTS
from tests.engine.compare import RandomLoss, engine_gradients, random_groups, worst_error
from tests.engine.staged_program import Program, expected
from tests.models import tiny_model

pytestmark = pytest.mark.gpu

HOST = torch.device("cpu")
CYCLES = 200_000  # of `torch.cuda._sleep`: about a tenth of a millisecond


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def on_gpu(groups):
    """The same groups with their tokens on the GPU."""
    return [type(g)(g.prompt_ids.cuda(), [ids.cuda() for ids in g.completion_ids]) for g in groups]


class SlowLanes(CudaLanes):
    """One lane sleeps before each copy."""

    slow: Lane

    def copy(self, lane, target, source):
        if lane is self.slow:
            with torch.cuda.stream(self._stream(lane)):
                torch.cuda._sleep(CYCLES)
        super().copy(lane, target, source)


@pytest.mark.parametrize("slow", Lane, ids=lambda lane: lane.value)
def test_no_speed_of_a_stream_changes_a_bit(slow: Lane, monkeypatch) -> None:
    """The program of the CPU test, with one stream far behind the others.

    Bitwise equal to the CPU: copies, sums of two numbers, products with one.
    """

    def lanes_between(home, device):
        lanes = SlowLanes(device)
        lanes.slow = slow
        return lanes

    def compute(work):
        if slow is Lane.COMPUTE:
            torch.cuda._sleep(CYCLES)
        work()

    reference = expected()
    monkeypatch.setattr("longstraw.state.store.lanes_between", lanes_between)
    found = Program(PageStore(HOST, 4), compute, gpu()).run()
    for number, (ours, theirs) in enumerate(zip(found, reference, strict=True)):
        assert torch.equal(ours.cpu(), theirs), f"result {number}"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_host_pages_give_the_gradient_of_device_pages(family: str) -> None:
    """Several chunks, members of more than a chunk, two prompts. fp64 and 1e-12: the same
    operations in the same order, but some of torch's own sums on a GPU have no fixed order."""
    groups = on_gpu(random_groups([(153, (9, 4, 40)), (24, (17,))]))
    gradients = {}
    for page_device in ("model", "host"):
        config = EngineConfig(chunk_size=16, page_size=8, replay_batch=2, page_device=page_device)
        gradients[page_device] = engine_gradients(
            tiny_model(family).double().cuda(), groups, config
        )
    error, name = worst_error(gradients["host"], gradients["model"])
    assert error <= 1e-12, name


def test_host_pages_are_pinned_and_leave_the_device() -> None:
    """With pages on the host the device holds two of them, once all have been read."""
    model = tiny_model("llama").cuda()
    engine = Engine(model, EngineConfig(chunk_size=64, page_size=64, page_device="host"))
    (group,) = on_gpu(random_groups([(1025, (4,))]))
    engine.score(group)  # cuBLAS takes its workspace
    engine.release()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    state = engine.capture(group.prompt_ids)
    engine.score(group)
    torch.cuda.synchronize()
    page = state.history(0)[0]
    assert all(page.key.is_pinned() for page in state.history(0))
    assert torch.cuda.memory_allocated() - before <= NUM_SLOTS * page.nbytes + 64 * 1024
    engine.release()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 64 * 1024


def test_the_device_peak_does_not_grow_with_the_prompt() -> None:
    """From 2048 to 8192 tokens at most 2 %: the rest is one chunk, whose copies may be on their way
    or done, and two pages. The state of 6144 tokens would be 6 MiB."""
    peaks = []
    for prompt_len in (2049, 8193):
        model = tiny_model("llama", max_position_embeddings=16384).cuda()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        engine = Engine(model, EngineConfig(chunk_size=256, page_size=128, page_device="host"))
        (group,) = on_gpu(random_groups([(prompt_len, (24, 24))]))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        engine.accumulate([group], RandomLoss([group]))
        # The prompt's tokens are there before, and a copy of them is hashed.
        peaks.append(torch.cuda.max_memory_allocated() - 8 * prompt_len)
    assert peaks[1] <= 1.02 * peaks[0]


def big_keys(num_tokens: int) -> torch.Tensor:
    """Keys of 8 heads of 128 in bf16: 2 KiB per token, 4 KiB with as many values."""
    return torch.randn(1, 8, num_tokens, 128, device=gpu(), dtype=torch.bfloat16)


def test_nothing_blocks_the_process() -> None:
    """The device sleeps for about a second; a capture, visits and sums are queued behind it in the
    meantime. In the second round, when buffers and slots are there: allocating does block."""
    store = PageStore(HOST, 512)
    key = big_keys(4096)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000 * CYCLES)
        asleep = torch.cuda.Event()
        asleep.record()
        pages = store.write(key, key, start=0, needs_cotangent=True)
        for _ in range(2):
            for page, k, v in store.read(pages, gpu(), torch.float32, with_cotangents=True):
                store.add_cotangent(page, k, v)
        joined, _ = store.join_cotangents(pages, key, key)
        was_asleep = not asleep.query()
        torch.cuda.synchronize()
        assert torch.equal(joined, 2 * key)
        store.release(pages[1:])  # not the last page: the slots stay
    assert was_asleep


def seconds_of(work) -> float:
    """The fastest of five."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        work()
        torch.cuda.synchronize()
    times.append(time.perf_counter())
    return min(after - before for before, after in pairwise(times))


@pytest.mark.parametrize("with_cotangents", [False, True])
def test_copies_run_while_the_device_computes(with_cotangents: bool) -> None:
    """Copies alone, computation alone, both: together they take less than 3/4 of their sum. Without
    overlap it would be the whole sum; with perfect overlap and equal halves, one half."""
    store, weight = PageStore(HOST, 4096), torch.randn(1024, 1024, device=gpu())
    key = big_keys(16 * 4096)  # pages of 16 MiB, so that neither is bound by the launches
    pages = store.write(key, key, start=0, needs_cotangent=True)
    grad = torch.ones(pages[0].key.shape, device=gpu())

    def visit(num_products: int) -> None:
        for page, _, _ in store.read(pages, gpu(), key.dtype, with_cotangents=with_cotangents):
            compute(num_products)
            if with_cotangents:
                store.add_cotangent(page, grad, grad)

    def compute(num_products: int) -> None:
        for _ in range(num_products):
            torch.mm(weight, weight)

    copies = seconds_of(lambda: visit(0))
    per_product = seconds_of(lambda: compute(1000)) / 1000
    num_products = max(1, round(copies / per_product / len(pages)))
    alone = seconds_of(lambda: compute(num_products * len(pages)))
    together = seconds_of(lambda: visit(num_products))
    assert together <= 0.75 * (copies + alone), (copies, alone, together)


def test_free_memory_of_the_device_counts_what_the_allocator_keeps() -> None:
    """A tensor that was freed leaves as much as there was before, though CUDA says it is in use."""
    torch.cuda.empty_cache()
    before = available_bytes(gpu())
    tensor = torch.empty(2**28, dtype=torch.uint8, device=gpu())
    held = available_bytes(gpu())
    del tensor
    assert before is not None and held is not None
    assert before - held >= 2**28
    assert abs(available_bytes(gpu()) - before) < 2**26
    with pytest.raises(MemoryPlanError, match="page_device='host'"):
        PageStore(gpu(), 512).require(before, "a state of all there is")
