"""Ranks that share prompts train as one process does, and do once what is to be done once.

Two launches, of two ranks and (`make test-slow`) of four, run all settings one after the other,
since most of their time goes into imports. What they are compared with runs here. Tolerances as in
`test_parity`: sums over the ranks of a group are other orders of the same sums.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marks import slow_but
from tests.trl.parity import (
    BASE,
    TOLERANCE,
    ModelPath,
    log_row,
    train,
    worst_metric,
    worst_parameter,
)
from tests.trl.ranks import run_ranks
from tests.trl.sequence_parallel import CHAT_VARIANT, FAILURES, GENERATED, PARITY, VARIANT

WORLD_SIZES = {"two": 2, "four": 4}
EVERYWHERE = [(part, name) for part, settings in PARITY.items() for name in settings]
# Groups of two by themselves launch ranks in `make test`; two groups of two in `make test-slow`.
BY_PART = slow_but([case for case in EVERYWHERE if case[0] == "two"], EVERYWHERE)


class Launched:
    """What the ranks of both launches wrote."""

    def __init__(self, model_path: ModelPath, folder: Path) -> None:
        self.model_path = model_path
        self.folder = folder

    def part(self, part: str) -> Path:
        """The folder of a part, which is run when it is first asked for."""
        folder = self.folder / part
        if not folder.exists():
            folder.mkdir()
            paths = [self.model_path(**VARIANT), self.model_path(**CHAT_VARIANT), folder]
            arguments = ["-m", "tests.trl.sequence_parallel", part, *map(str, paths)]
            run_ranks(arguments, WORLD_SIZES[part], folder / "logs", timeout=400)
        return folder

    def records(self, part: str, name: str) -> list[Any]:
        """Per rank."""
        folder = self.part(part)
        ranks = range(WORLD_SIZES[part])
        return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in ranks]


@pytest.fixture(scope="module")
def launched(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched(model_path, tmp_path_factory.mktemp("sequence_parallel"))


def assert_equal_weights(records: list[dict[str, Any]]) -> None:
    for record in records[1:]:
        for name, value in record["after"].items():
            assert torch.equal(value, records[0]["after"][name]), name


# ---------------------------------------------------------------- the same training


@pytest.mark.parametrize(("part", "name"), BY_PART, ids=[name for _, name in EVERYWHERE])
def test_ranks_that_share_prompts_train_as_stock_trl_on_one_process(
    part: str, name: str, launched: Launched, model_path: ModelPath, tmp_path: Path
) -> None:
    """Parameters and all logged metrics, each sample counted once.

    Prompts of 1 to 30 tokens and responses of 1 to 9, shared by up to 4 ranks: most chunks do not
    divide, and some ranks have no token of a response. Where two groups have other prompts, one
    process of stock TRL has the rows of both in one batch; the loss types of these settings are
    means over rows or over all tokens, which do not depend on the division.
    """
    shared = PARITY[part][name]
    stock = train(shared.stock, model_path(**VARIANT), tmp_path, longstraw=False)
    records = launched.records(part, name)
    for rank, record in enumerate(records):
        parameter = worst_parameter(record["after"], stock)
        assert parameter[0] <= TOLERANCE, (rank, parameter)
        assert record["advantages"] == pytest.approx(stock.advantages, rel=TOLERANCE, abs=1e-6)
    metric = worst_metric(records[0]["logs"], stock.logs)
    log_row(f"sequence parallel, {part} ranks, {name}", parameter, metric)
    assert metric[0] <= TOLERANCE, metric
    assert_equal_weights(records)
    assert batch_sizes(records[0]["logs"]) == batch_sizes(stock.logs)


def batch_sizes(logs: list[dict[str, float]]) -> list[int]:
    """Samples per step, as the logged speeds have them."""
    speeds = [
        (log[f"{kind}_samples_per_second"], log[f"{kind}_steps_per_second"])
        for log in logs
        for kind in ("train", "eval")
        if f"{kind}_runtime" in log
    ]
    return [round(samples / steps) for samples, steps in speeds]


@pytest.mark.parametrize(("part", "name"), BY_PART, ids=[name for _, name in EVERYWHERE])
def test_all_ranks_log_the_same(part: str, name: str, launched: Launched) -> None:
    """So that what is decided by a metric (the best checkpoint, stopping early) is decided alike,
    although the rollout's metrics come from one rank of each group."""
    first, *others = launched.records(part, name)
    for other in others:
        assert worst_metric(other["logs"], first["logs"])[0] == 0.0


def test_each_rank_holds_its_part_of_the_prompts(
    launched: Launched, model_path: ModelPath, tmp_path: Path
) -> None:
    """Half, and up to one token more per chunk that does not divide (of 8 tokens), in whole pages
    of 3. What one process holds is the measure."""
    shared = PARITY["two"]["dapo"]
    alone = train(shared.setting, model_path(**VARIANT), tmp_path, longstraw=True)
    whole = alone.trainer.engine.ledger.state_bytes
    for record in launched.records("two", "dapo"):
        assert 0.4 * whole < record["state_bytes"] < 0.75 * whole, (record["state_bytes"], whole)


# ---------------------------------------------------------------- once per group


@pytest.mark.parametrize(
    ("part", "leaders"),
    [("two", ["0"]), pytest.param("four", ["0", "2"], marks=pytest.mark.slow)],
)
def test_rollouts_and_reward_functions_are_called_once_per_group(
    part: str, leaders: list[str], launched: Launched
) -> None:
    """One generation serves three steps. What was called twice would be charged twice, or answered
    otherwise the second time."""
    folder = launched.part(part)
    for name in ("rollouts", "rewards", "async rewards"):
        assert sorted((folder / name).read_text().split()) == leaders, name


@pytest.mark.parametrize("part", slow_but(["two"], WORLD_SIZES))
def test_what_is_random_is_the_same_on_all_ranks_of_a_group(part: str, launched: Launched) -> None:
    """Completions, rewards and the shuffle: with other ones on some rank, weights would differ, or
    passes would not meet. What a rank reads itself (here each has another word) does not matter.
    """
    records = launched.records(part, "random")
    assert_equal_weights(records)
    for record in records[1:]:
        assert record["advantages"] == records[0]["advantages"]
        assert record["completions"] == records[0]["completions"]
    assert any(records[0]["advantages"])


@pytest.mark.slow
def test_what_a_reward_function_logs_is_counted_once(launched: Launched) -> None:
    """It runs on one rank of each group, so two of the four have nothing to log."""
    first = launched.records("four", "random")[0]
    assert len(first["extra"]["difficulty"]) == len(first["completions"]) == 2 * 16
    assert "luck" in first["logs"][0]
    assert len(list((launched.part("four") / "random" / "completions").glob("*.parquet"))) > 0


@pytest.mark.slow
def test_groups_count_as_processes_to_trl(launched: Launched) -> None:
    """Four ranks, two to a group: what TRL divides or slices by is per group; what names files or
    waits is per rank."""
    for rank, counts in enumerate(launched.records("four", "counts")):
        assert counts["world_size"] == 4
        assert (counts["is_main"], counts["is_last"]) == (rank == 0, rank == 3)
        assert (counts["processes"], counts["index"]) == (2, rank // 2)
        assert counts["seed"] == BASE["seed"] + rank // 2
        # 4 rows, accumulated twice, of two groups
        assert counts["generation_batch_size"] == counts["total"] == 16
        assert counts["gathered"].tolist() == [rank % 2, 2 + rank % 2]
        assert float(counts["mean"]) == 1 + rank % 2
        assert counts["objects"] == [rank % 2, 2 + rank % 2]
        assert counts["padded"].tolist() == ([1.0, 0.0] if rank < 2 else [1.0, 1.0])
    batches = [counts["batches"] for counts in launched.records("four", "counts")]
    rows = [counts["rows"] for counts in launched.records("four", "counts")]
    assert len(set(batches)) == 1
    assert rows[0] == rows[1] and rows[2] == rows[3] and not set(rows[0]) & set(rows[2])


# ---------------------------------------------------------------- generation


@pytest.mark.parametrize("name", GENERATED)
def test_ranks_that_share_prompts_generate_as_one_process(
    name: str, launched: Launched, model_path: ModelPath, tmp_path: Path
) -> None:
    """The same tokens from the same seed, and then the same training. Only one rank of the group
    knows of tools and loops; the others decode along."""
    setting = GENERATED[name]()
    variant = CHAT_VARIANT if "tools" in name else VARIANT
    alone = train(setting, model_path(**variant), tmp_path, longstraw=True)
    records = launched.records("two", name)
    for record in records:
        assert record["completions"] == list(alone.trainer._logs["completion"])
        assert worst_parameter(record["after"], alone)[0] <= TOLERANCE
        assert worst_metric(record["logs"], alone.logs)[0] <= TOLERANCE
    assert_equal_weights(records)


def test_a_resumed_run_is_the_uninterrupted_one(launched: Launched) -> None:
    """On both ranks of a group and to the last bit, from the middle of a generation's use."""
    assert launched.records("two", "resumed") == [[], []]


# ---------------------------------------------------------------- errors


def test_a_rollout_that_fails_is_told_to_the_group(launched: Launched) -> None:
    """The rank that serves waits for the next turn, and would for as long as the timeout."""
    leader, other = launched.records("two", "error rollout")
    assert leader == "KeyError: 'the environment is gone'"
    assert "RanksAbortedError" in other and "the environment is gone" in other


def test_a_reward_function_that_fails_is_told_to_all(launched: Launched) -> None:
    leader, other = launched.records("two", "error reward")
    assert leader == "KeyError: 'the judge is gone'"
    assert "RanksAbortedError" in other and "the judge is gone" in other


def test_an_error_in_work_that_all_ranks_do_is_raised_by_all(launched: Launched) -> None:
    """Tokenizing is the leader's, in a meeting of all ranks, who hear of it there."""
    leader, other = launched.records("two", "error empty prompt")
    assert leader.startswith("DataError") and "no tokens" in leader
    assert "RanksAbortedError" in other and "tokenizing prompts" in other


def test_ranks_that_cannot_be_divided_are_refused_by_the_config(launched: Launched) -> None:
    for message in launched.records("two", "error three ranks"):
        assert "ConfigError" in message and "longstraw_sp_size" in message
        assert "2 processes" in message and "1, 2" in message


@pytest.mark.parametrize(
    ("name", "found"), [("switched off", "longstraw_shared_rollout=False"), ("beams", "beams")]
)
def test_what_trl_generates_by_itself_is_refused(name: str, found: str, launched: Launched) -> None:
    for message in launched.records("two", f"error {name}"):
        assert "ConfigError" in message and found in message
        assert "longstraw_sp_size=2" in message and "rollout_func" in message


def test_all_failures_were_looked_at() -> None:
    looked_at = {"rollout", "reward", "empty prompt", "three ranks", "switched off", "beams"}
    assert set(FAILURES) == looked_at
