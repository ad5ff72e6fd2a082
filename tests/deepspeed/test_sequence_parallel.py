"""Ranks that share prompts end under DeepSpeed where stock TRL on one process ends.

One sequence group of two or of four ranks, and two groups of two, at the stages of ZeRO. In each
optimizer step they see the rows that two ranks see in `test_zero`, so truth is the same one-process
run, and the tolerances are those told there. Prompts have 1 to 30 tokens in chunks of 8 or 32, and
responses 1 to 9: most chunks do not divide by the ranks, and some ranks have no token of one.

DeepSpeed knows nothing of groups, and takes the mean over all dp * sp ranks at every stage. SGD
shows what becomes of the scale; `Engine._differentiate` derives it.

All errors, with rows of their own for the weights of keys and values, whose gradients come from the
queries of all ranks: `pytest tests/deepspeed/test_sequence_parallel.py --log-cli-level=INFO
--log-cli-format='%(message)s' | grep '^|'`
"""

from pathlib import Path

import pytest
import torch

from tests.deepspeed.compare import Record, assert_same, error_of, logged
from tests.deepspeed.conftest import Launched, Truth
from tests.deepspeed.sequence_jobs import (
    AUXILIARY_LOSS,
    GRIDS,
    LAUNCHES,
    MODELS,
    PLANTED,
    STATE,
    UNEQUAL_PAIRS,
)
from tests.deepspeed.test_every_backward import LOST
from tests.trl.parity import (
    TOLERANCE,
    ModelPath,
    Outcome,
    log_row,
    train,
    worst_metric,
    worst_parameter,
)

LAUNCH = {name: launch for launch, jobs in LAUNCHES.items() for name in jobs}
GRID = {name: job for grid in GRIDS.values() for name, job in grid.items()}
FP32 = [name for name in GRID if "bf16" not in name]
BF16 = [name for name in GRID if "bf16" in name]


def found(name: str, launched: Launched, truth: Truth) -> tuple[list[Record], Outcome]:
    """What the ranks of a job left, and what one process does."""
    return launched(LAUNCH[name])[name], truth(LAUNCH[name], name)


def assert_ends_alike(name: str, record: Record, right: Outcome) -> None:
    """Parameters, gradient norms, losses and rewards; `log_row` for keys and values as well."""
    for part in ("k_proj", "v_proj"):
        others = {key: value for key, value in right.after.items() if part not in key}
        log_row(f"{name}, {part}", worst_parameter({**record["after"], **others}, right), (0.0, ""))
    assert_same(name, record, right)


# ---------------------------------------------------------------- the grid


@pytest.mark.parametrize("name", FP32)
def test_fp32_ends_where_one_process_ends(name: str, launched: Launched, truth: Truth) -> None:
    """Each parameter within 1e-4 of its movement, and every number that is logged: rewards,
    lengths, tokens and entropies count each sample once.

    Not the entropy of 4 micro-batches: TRL takes the mean over each one's tokens, then over them.
    """
    (record, *_), right = found(name, launched, truth)
    assert record["stage"] == GRID[name].stage
    assert_ends_alike(name, record, right)
    skipped = {"entropy"} if "accumulation 4" in name else set()
    ours, stock = (
        [{key: log[key] for key in log.keys() - skipped} for log in logs]
        for logs in (record["logs"], right.logs)
    )
    metric = worst_metric(ours, stock)
    log_row(f"{name}, logged", (0.0, ""), metric)
    assert metric[0] <= TOLERANCE, metric


@pytest.mark.parametrize("name", BF16)
def test_bf16_is_as_close_as_stock_trl(name: str, launched: Launched, truth: Truth) -> None:
    """At most twice the error of stock TRL under the same configuration, on two ranks that share
    nothing; in all parameters together and in the worst one."""
    stock = f"stock, ZeRO-{GRID[name].stage}"
    budget, budget_worst = error_of(launched(LAUNCH[stock])[stock][0], truth(LAUNCH[stock], stock))
    (record, *_), right = found(name, launched, truth)
    error, worst = error_of(record, right)
    log_row(name, (error, f"(worst {worst[0]:.1e})"), (budget, "stock"))
    assert error <= 2 * budget, (error, budget)
    assert worst[0] <= 2 * budget_worst[0], (worst, budget_worst)


def test_the_grid_has_every_option_at_every_stage() -> None:
    """It is no product of them: this says that nothing has fallen out of it."""
    for grid in ("a pair", "two pairs"):
        for stage in range(4):
            settings = [job.setting for job in GRIDS[grid].values() if job.stage == stage]
            for field, option, values in (
                ("longstraw", "longstraw_prompt_gradient", {"exact", "stopped"}),
                ("longstraw", "longstraw_sp_layout", {None, "zigzag"}),
                ("longstraw", "longstraw_page_device", {None, "host"}),
                ("longstraw", "longstraw_replay_batch", {None, 1}),
                ("config", "gradient_accumulation_steps", {1, 4}),
                ("config", "loss_type", {"dapo", "dr_grpo"}),
                ("config", "gradient_checkpointing", {None, True}),
                ("config", "bf16", {False, True}),
                ("config", "optim", {None, "adamw_torch"}),
            ):
                assert {getattr(s, field).get(option) for s in settings} == values, option
            assert {bool(setting.trainer()) for setting in settings} == {False, True}  # adapters


# ---------------------------------------------------------------- unequal groups, other models


@pytest.mark.parametrize("name", UNEQUAL_PAIRS)
def test_unequal_groups_end_where_one_process_ends(
    name: str, launched: Launched, truth: Truth
) -> None:
    """A group that has less to do, or nothing, makes passes of zero weight in the other's stead.
    All its ranks make them: a pass has the collectives of DeepSpeed and those of the group."""
    ranks, right = found(name, launched, truth)
    assert_ends_alike(name, ranks[0], right)
    num_idle = [rank["num_idle"] for rank in ranks]
    assert num_idle[0] == num_idle[1] > 0 and num_idle[2] == num_idle[3] > 0, num_idle


@pytest.mark.parametrize("name", [*MODELS, *AUXILIARY_LOSS])
def test_other_models_end_where_one_process_ends(
    name: str, launched: Launched, truth: Truth
) -> None:
    """Windows that hide one rank's keys and not another's; experts that no token of some rank is
    sent to; the routing of all ranks' tokens in one loss."""
    (record, *_), right = found(name, launched, truth)
    assert_ends_alike(name, record, right)
    if name in AUXILIARY_LOSS:
        assert logged(record, "aux_loss") == pytest.approx(right.logged("aux_loss"), rel=TOLERANCE)
        assert right.logged("aux_loss")


# ---------------------------------------------------------------- what the grid rests on


@pytest.mark.parametrize("launch", LAUNCHES)
def test_ranks_end_with_the_same_weights_to_the_last_bit(launch: str, launched: Launched) -> None:
    """In a group and between groups, gathered under stage 3; and they have logged the same."""
    for name, (first, *others) in launched(launch).items():
        for other in others:
            for parameter, value in first["after"].items():
                assert torch.equal(value, other["after"][parameter]), (name, parameter)
            assert worst_metric(other["logs"], first["logs"])[0] == 0.0, name


@pytest.mark.parametrize("probe", PLANTED)
def test_mistakes_in_composing_a_gradient_are_seen(
    probe: str, launched: Launched, truth: Truth
) -> None:
    """A mean over ranks that share a prompt, and keys that miss the queries of other ranks, are off
    by more than 1000 times what is accepted as equal."""
    (record, *_), right = found(probe, launched, truth)
    _, worst = error_of(record, right)
    log_row(f"planted: {probe}", worst, (0.0, ""))
    assert worst[0] > LOST, worst


@pytest.mark.parametrize("name", [name for name in STATE if STATE[name].sp_size > 1])
def test_each_rank_holds_its_share_of_the_state(
    name: str, launched: Launched, model_path: ModelPath, tmp_path: Path
) -> None:
    """1 / sp of what one process holds, to the byte where all chunks divide: of the prompts' keys
    and values, of their cotangents, and of those of the response that is replayed."""
    setting = STATE["(1, 1), state"].setting
    path = model_path(setting.family, **setting.variant)
    alone = train(setting, path, tmp_path, longstraw=True).logged("longstraw/state_bytes")
    for rank in launched(LAUNCH[name])[name]:
        shares = logged(rank, "longstraw/state_bytes")
        assert [STATE[name].sp_size * share for share in shares] == alone
    assert min(alone) > 0
