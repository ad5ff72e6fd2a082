"""Cotangents in bfloat16: half the bytes, and what that costs."""

import pytest
import torch

from longstraw import Engine, EngineConfig, PromptGroup
from longstraw.state import PageStore
from tests.engine.compare import RandomLoss, gradients, random_groups
from tests.engine.late_lanes import LateLanes
from tests.models import tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cotangent_dtype", ["float32", "bfloat16"])
def test_state_and_cotangents_take_the_bytes_that_the_formula_says(dtype, cotangent_dtype) -> None:
    """Held between the members' replays and the prompt's backward."""
    model = tiny_model("llama").to(dtype)
    config = EngineConfig(chunk_size=16, page_size=8, cotangent_dtype=cotangent_dtype)
    engine = Engine(model, config)
    (group,) = random_groups([(101, (7, 2))])
    open_group = PromptGroup(group.prompt_ids, group.completion_ids, is_complete=False)
    engine.accumulate([open_group], RandomLoss([group]))
    kept = engine.decoder.state_bytes(100, with_cotangents=False)
    assert engine.store.bytes_in_use == engine.decoder.state_bytes(100, with_cotangents=True)
    itemsize = 2 if cotangent_dtype == "bfloat16" else max(dtype.itemsize, 4)
    assert engine.store.bytes_in_use == kept // dtype.itemsize * (dtype.itemsize + itemsize)


@pytest.mark.parametrize(
    ("chunk_size", "largest"),
    [(64, 4e-3), (16, 6e-3), pytest.param(4, 8e-3, marks=pytest.mark.slow)],
)
def test_rounding_at_each_reader_stays_below_a_percent(chunk_size: int, largest: float) -> None:
    """4, 16 and 64 chunks read the first page, and two members: each rounds its sum by 2^-9 at
    most, in either direction, so that the error grows like the root of their number and slower.

    Relative L2 per parameter against fp32 cotangents; `largest` is 1.5 times what was measured.
    The parameters of the last layer behind the attention never depend on a cotangent.
    """
    (group,) = random_groups([(257, (16, 16))])

    def run(cotangent_dtype):
        model = tiny_model("llama", num_hidden_layers=2)
        config = EngineConfig(chunk_size=chunk_size, page_size=64, cotangent_dtype=cotangent_dtype)
        engine = Engine(model, config)
        engine.accumulate([group], RandomLoss([group]))
        engine.finalize()
        return gradients(model)

    exact, rounded = run("float32"), run("bfloat16")
    errors = {n: float((rounded[n] - g).norm() / g.norm()) for n, g in exact.items()}
    worst = max(errors, key=lambda name: errors[name])
    assert 1e-3 < errors[worst] < largest
    assert errors["lm_head.weight"] == 0


def test_readers_that_all_agree_are_lost_after_some_hundred() -> None:
    """The limit of it: 1000 readers that each add 1 are 256 in bfloat16, whose next number is 258.
    In fp32 they are 1000."""
    ones = torch.ones(1, 1, 4, 2)
    for dtype, total in (("bfloat16", 256), ("float32", 1000)):
        store = PageStore(CPU, 4, cotangent_dtype=dtype)
        (page,) = store.write(ones, ones, start=0, needs_cotangent=True)
        for _ in range(1000):
            store.add_cotangent(page, ones, ones)
        assert torch.equal(store.join_cotangents([page], ones, ones)[0], total * ones)


def test_a_sum_is_rounded_once_wherever_it_is_made(tmp_path, monkeypatch) -> None:
    """In memory, on its way to a device, and with files: fp32 gradients are added before they are
    rounded, bit for bit the same."""
    (group,) = random_groups([(77, (9, 4))])
    options = {"chunk_size": 16, "page_size": 4, "cotangent_dtype": "bfloat16"}
    found = []
    for changes in ({}, {"state_budget_bytes": 30_000, "spill_dir": str(tmp_path)}):
        for lanes in (None, LateLanes(compute_at_once=True)):
            monkeypatch.setattr("longstraw.state.store.lanes_between", lambda *_, at=lanes: at)
            model = tiny_model("llama")
            engine = Engine(model, EngineConfig(**options, **changes))
            engine.accumulate([group], RandomLoss([group]))
            engine.finalize()
            found.append(gradients(model))
    for other in found[1:]:
        assert all(torch.equal(other[name], grad) for name, grad in found[0].items())
