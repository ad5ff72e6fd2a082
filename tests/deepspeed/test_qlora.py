"""Adapters on NF4 weights end under DeepSpeed where stock TRL on one process ends.

Compared as in `test_zero`, at every stage of ZeRO. Stage 3 cuts the packed weights up as any other:
they are loaded whole by each rank, as bitsandbytes quantizes whole matrices, and partitioned when
training starts; their constants (absmax) stay on every rank.

All errors: `pytest tests/deepspeed/test_qlora.py --log-cli-level=INFO
--log-cli-format='%(message)s' | grep '^|'`
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.deepspeed.compare import Record, assert_same, error_of, reference_of
from tests.deepspeed.conftest import Launched, Truth
from tests.deepspeed.jobs import WORLD_SIZE
from tests.deepspeed.qlora_jobs import BF16, FEW, FP32, LAUNCH, LAUNCHES, MORE, fp32_of
from tests.marks import slow_but
from tests.trl.parity import ModelPath, Outcome, log_row, train


def split(record: Record, right: Outcome) -> tuple[Record, Outcome]:
    """Both without the packed weights, which are what they were, bit for bit."""
    packed = {name for name, x in right.after.items() if not x.is_floating_point()}
    assert packed
    for name in packed:
        assert torch.equal(right.before[name], right.after[name]), name
        assert torch.equal(record["after"][name], right.before[name].float()), name

    def others(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x for name, x in parameters.items() if name not in packed}

    right = replace(right, before=others(right.before), after=others(right.after))
    return {**record, "after": others(record["after"])}, right


@pytest.mark.parametrize("name", slow_but(FEW, FP32))
def test_nf4_ends_where_one_process_ends(name: str, launched: Launched, truth: Truth) -> None:
    """Each parameter within 1e-4 of its movement, losses and gradient norms to 1e-4; the packed
    weights as they were. Adapters are fp32 here."""
    launch = LAUNCH if name in FEW else MORE
    record = launched(launch)[name][0]
    assert record["stage"] == FP32[name].stage
    keys = ["kl"] if "reference" in name else []
    assert_same(name, *split(record, truth(launch, name)), *keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", BF16)
def test_bf16_is_as_close_as_stock_trl(
    name: str, launched: Launched, model_path: ModelPath, tmp_path: Path
) -> None:
    """Everything in bf16 as users have it, with masters in fp32: at most twice the error of stock
    TRL under the same configuration, against fp32 on the same packed weights."""
    setting = fp32_of(reference_of(BF16[name]))
    right = train(setting, model_path(setting.family, **setting.variant), tmp_path, longstraw=False)
    records = launched(MORE)
    (error, worst), (budget, budget_worst) = (
        error_of(*split(records[job][0], right)) for job in (name, f"stock, {name}")
    )
    log_row(name, (error, f"(worst {worst[0]:.1e})"), (budget, f"stock ({budget_worst[0]:.1e})"))
    assert error <= 2 * budget, (error, budget)
    assert worst[0] <= 2 * budget_worst[0], (worst, budget_worst)


def test_zero_3_holds_its_share_of_the_packed_weights(launched: Launched) -> None:
    """After each update: 1/N of every parameter, two 4-bit weights per byte, and none left whole
    by a replay."""
    ranks = launched(LAUNCH)["ZeRO-3, NF4"]
    num_elements = ranks[0]["found"]["num_parameters"]
    num_tensors = len(ranks[0]["after"])
    for step, _ in enumerate(ranks[0]["found"]["partitions"]):
        shares = [rank["found"]["partitions"][step] for rank in ranks]
        assert num_elements <= sum(shares) <= num_elements + num_tensors * (WORLD_SIZE - 1)
        assert max(shares) == min(shares)
        assert [rank["found"]["whole"][step] for rank in ranks] == [0, 0]


@pytest.mark.parametrize("launch", [LAUNCH, pytest.param(MORE, marks=pytest.mark.slow)])
def test_ranks_end_with_the_same_weights_to_the_last_bit(launch: str, launched: Launched) -> None:
    """Gathered under stage 3."""
    records = launched(launch)
    assert records.keys() == LAUNCHES[launch].keys()
    for name, (first, second) in records.items():
        for parameter, value in first["after"].items():
            assert torch.equal(value, second["after"][parameter]), (name, parameter)
