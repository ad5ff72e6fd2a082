"""Two ranks under DeepSpeed end where stock TRL on one process ends that sees the rows of both.

For every ZeRO stage, full fine-tuning and LoRA, exact and stopped prompt gradient, fp32 and bf16,
one micro-batch per step and four. Ranks have prompts of 0 to 4 chunks, members with and without an
advantage, a step in which one rank has nothing to replay and one in which nobody has; see `groups`.
SGD, which shows the scale of a gradient (Adam divides it out); AdamW once per stage.

Truth is an fp32 run on one process: stock TRL for the exact gradient. The stopped gradient has no
counterpart in TRL, and truth is LongStraw without DeepSpeed, which other tests hold against the
definition.

fp32: each parameter within 1e-4 of its movement, as in `tests/trl`; the mean over ranks and
partitions adds roundings of the same size. A gradient that is lost, doubled or averaged over one
rank too many is of the order of 1.

bf16: the fp32 masters are compared with an fp32 run that starts from the same, rounded weights.
How far bf16 may be off is measured: stock TRL under the same DeepSpeed configuration has an error
against that truth, and LongStraw at most twice as much.
"""

import pytest
import torch

from tests.deepspeed.compare import assert_same, error_of
from tests.deepspeed.conftest import Launched, Truth
from tests.deepspeed.jobs import (
    CELLS,
    OFFLOADED,
    STAGES,
    TUNED,
    WORLD_SIZE,
    Cell,
    beside_the_matrix,
)
from tests.trl.parity import TOLERANCE, log_row, worst_parameter

# ---------------------------------------------------------------- the matrix

FP32 = [cell for cell in CELLS if cell.dtype == "fp32"]
BF16 = [cell for cell in CELLS if cell.dtype == "bf16"]


@pytest.mark.parametrize("cell", FP32, ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_fp32_ends_where_one_process_ends(
    stage: int, cell: Cell, launched: Launched, truth: Truth
) -> None:
    """Each parameter within 1e-4 of its movement, and the logged gradient norms and losses."""
    launch = f"stage {stage}"
    record = launched(launch)[str(cell)][0]
    assert record["stage"] == stage
    assert_same(f"ZeRO-{stage}, {cell}", record, truth(launch, str(cell)))


@pytest.mark.parametrize("cell", BF16, ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_is_as_close_as_stock_trl(
    stage: int, cell: Cell, launched: Launched, truth: Truth
) -> None:
    """At most twice stock TRL's own error, in all parameters together and in the worst one.

    Stock TRL has no stopped gradient. Rounding is that of the same products, so the budget of the
    exact gradient, relative to its movement, serves for both.
    """
    exact = str(cell).replace("stopped", "exact")
    assert_within_budget(stage, str(cell), exact, launched, truth)


@pytest.mark.parametrize("cell", OFFLOADED, ids=str)
@pytest.mark.parametrize("stage", STAGES[1:])
def test_bf16_with_the_optimizer_in_host_memory_is_as_close(
    stage: int, cell: Cell, launched: Launched, truth: Truth
) -> None:
    """Masters on the host get the gradient by other ways than masters on the device, and one of
    them dropped what had been accumulated locally. The budget is that without offloading."""
    name = f"{cell}, optimizer in host memory"
    assert_within_budget(stage, name, str(cell), launched, truth)


def assert_within_budget(
    stage: int, name: str, stock: str, launched: Launched, truth: Truth
) -> None:
    """The job's error is at most twice that of stock TRL in the job `stock`."""
    launch = f"stage {stage}"
    records = launched(launch)
    budget, budget_worst = error_of(records[f"stock, {stock}"][0], truth(launch, stock))
    error, worst = error_of(records[name][0], truth(launch, name))
    log_row(f"ZeRO-{stage}, {name}", (error, f"(worst {worst[0]:.1e})"), (budget, "stock"))
    assert error <= 2 * budget, (error, budget)
    assert worst[0] <= 2 * budget_worst[0], (worst, budget_worst)


BESIDE = [(stage, name) for stage in STAGES for name in beside_the_matrix(stage)]


@pytest.mark.parametrize(("stage", "name"), BESIDE)
def test_other_configurations_end_where_one_process_ends(
    stage: int, name: str, launched: Launched, truth: Truth
) -> None:
    """The launcher's own configuration, AdamW, buckets that cut parameters, the other way to
    accumulate: none changes what is computed."""
    record = launched(f"stage {stage}")[name][0]
    assert record["stage"] == stage
    assert_same(f"ZeRO-{stage}, {name}", record, truth(f"stage {stage}", name))


# ---------------------------------------------------------------- what the matrix rests on


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_end_with_the_same_weights_to_the_last_bit(stage: int, launched: Launched) -> None:
    """Any difference would grow from step to step. Under stage 3 there is one copy, in pieces."""
    for name, (first, second) in launched(f"stage {stage}").items():
        for parameter, value in first["after"].items():
            assert torch.equal(value, second["after"][parameter]), (name, parameter)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_replay_different_numbers_of_members(stage: int, launched: Launched) -> None:
    """Else the matrix would not show that ranks need no equal numbers of passes.

    Rank 0: 4, none, none, 3 (two of its responses are the same, and run once). Rank 1: 2, 4, none,
    2. Where passes contain collectives the rank
    with fewer fills up; where they do not, none is made for others' sake.
    """
    ranks = launched(f"stage {stage}")["full, exact, fp32, accumulation 1"]
    assert [rank["calls"]["replay"] for rank in ranks] == [7, 8]
    num_idle = [rank["num_idle"] for rank in ranks]
    assert all(num_idle) if stage >= 2 else num_idle == [0] * WORLD_SIZE
    assert ranks[0]["accumulate"] == ("partitioned" if stage >= 2 else "local")


@pytest.mark.parametrize("tuned", TUNED)
def test_stopped_and_exact_are_told_apart(tuned: str, truth: Truth) -> None:
    """100 times what is accepted as equal lies between them, so no cell passes for another."""
    exact = truth("stage 0", str(Cell(tuned, "exact", "fp32", 1)))
    stopped = truth("stage 0", str(Cell(tuned, "stopped", "fp32", 1)))
    assert worst_parameter(stopped.after, exact)[0] > 100 * TOLERANCE
