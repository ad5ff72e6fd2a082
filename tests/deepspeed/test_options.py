"""What a user may add to ZeRO changes nothing but what it is for.

Once per stage where the stage matters. Compared as in `test_zero`: with stock TRL on one process
that sees the rows of both ranks, or, where rows meet by a shuffle, with stock TRL on two ranks.
"""

import pytest

from tests.deepspeed.compare import assert_same, logged
from tests.deepspeed.conftest import Launched, Truth
from tests.deepspeed.jobs import AGAINST_STOCK, AGAINST_UNION
from tests.trl.parity import TOLERANCE, Outcome, log_row, worst_parameter

UNION = [(launch, name) for launch, jobs in AGAINST_UNION.items() for name in jobs]
STOCK = [(launch, name) for launch, jobs in AGAINST_STOCK.items() for name in jobs]


@pytest.mark.parametrize(("launch", "name"), UNION)
def test_options_end_where_one_process_ends(
    launch: str, name: str, launched: Launched, truth: Truth
) -> None:
    """With a reference model the KL divergence is logged as well, with evaluation its numbers.

    Not `eval_loss`: `Trainer` keeps as many of the gathered losses as the dataset has prompts,
    which on two ranks are those of rank 0.
    """
    right = truth(launch, name)
    keys = [key for key in ("kl", "eval_reward", "eval_entropy") if right.logged(key)]
    assert bool(keys) == any(word in name for word in ("reference", "evaluation"))
    assert_same(name, launched(launch)[name][0], right, *keys)


@pytest.mark.parametrize(("launch", "name"), STOCK)
def test_options_end_where_stock_trl_ends_on_two_ranks(
    launch: str, name: str, launched: Launched, truth: Truth
) -> None:
    """Under the same DeepSpeed configuration, with the same rows in each micro-batch."""
    records = launched(launch)
    stock, ours = records[f"stock, {name}"][0], records[name][0]
    before = truth(launch, name).before
    right = Outcome(before, stock["after"], stock["logs"], [], None)
    worst = worst_parameter(ours["after"], right)
    log_row(name, worst, (0.0, ""))
    assert worst[0] <= TOLERANCE, worst
    for key in ("grad_norm", "loss"):
        assert logged(ours, key) == pytest.approx(logged(stock, key), rel=TOLERANCE, abs=1e-5)
