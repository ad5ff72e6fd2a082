"""How many ranks share a prompt: where it is given, what it counts, and what does not go with it.

All without ranks: this process takes itself for one of several.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import ParallelismConfig

import trl_integration.config as config_module
import trl_integration.parallelism as parallelism
from longstraw import ConfigError, RankAxes, SequenceGroup
from tests.trl.parity import BASE
from trl_integration import LongStrawGRPOConfig
from trl_integration.deepspeed_checks import count_every_rank
from trl_integration.run_state import check_geometry
from trl_integration.sequence_parallel import refuse_environments


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process takes itself for the first of two that share prompts."""
    axes = RankAxes(SequenceGroup(0, 2), 0, 1)
    monkeypatch.setattr(config_module, "rank_axes", lambda *_: axes)
    monkeypatch.setattr(parallelism, "launched_ranks", lambda: 2)


def make_config(tmp_path: Path, **options: Any) -> LongStrawGRPOConfig:
    return LongStrawGRPOConfig(str(tmp_path), **{**BASE, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_vllm": True}, ["use_vllm=True", "rollout_func"]),
        ({"accelerator_config": {"dispatch_batches": True}}, ["dispatch_batches", "Leave it out"]),
        ({"eval_use_gather_object": True}, ["eval_use_gather_object", "Leave it out"]),
        ({"longstraw_sp_layout": "ring"}, ["longstraw_sp_layout='ring'", "zigzag"]),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, ["tp_size=2", "zero3.yaml"]),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, ["cp_size=2", "sp_size=2"]),
        (
            {"parallelism_config": {"sp_size": 2, "dp_replicate_size": 3}},
            ["dp_replicate_size=3", "1 groups", "Leave both out"],
        ),
        (
            {"parallelism_config": "sp.json"},
            ["'sp.json'", "ParallelismConfig", "longstraw_sp_size"],
        ),
        (
            {"longstraw_sp_size": 4, "parallelism_config": {"sp_size": 2}},
            ["longstraw_sp_size=4", "sp_size=2", "Give one"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_cannot_be_shared_are_refused(
    options: dict[str, Any], words: list[str], two_ranks: None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(tmp_path, **{"longstraw_sp_size": 2, **options})
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, str(error.value)


def test_environments_are_refused() -> None:
    refuse_environments(1, has_environment=True)
    refuse_environments(2, has_environment=False)
    with pytest.raises(ConfigError, match=r"environment_factory.*longstraw_sp_size=2.*tools"):
        refuse_environments(2, has_environment=True)


@pytest.mark.parametrize("sp_size", [0, -1])
def test_a_size_below_one_is_refused(sp_size: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longstraw_sp_size"):
        make_config(tmp_path, longstraw_sp_size=sp_size)


def test_one_process_cannot_share_prompts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"longstraw_sp_size.*1 processes.*--num_processes 2"):
        make_config(tmp_path, longstraw_sp_size=2)


@pytest.fixture
def launcher_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As `accelerate launch` with a configuration that has sp_size 2."""
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    yield


@pytest.mark.parametrize("given", [{"sp_size": 2}, ParallelismConfig(sp_size=2)], ids=type)
def test_the_sequence_parallel_size_of_accelerate_is_taken(
    given: Any, two_ranks: None, tmp_path: Path
) -> None:
    """An object, or what a YAML of the script's arguments has; TRL would refuse it."""
    config = make_config(tmp_path, parallelism_config=given)
    assert config.longstraw_sp_size == config.to_engine_config().sp_size == 2
    assert config.parallelism_config is None


def test_the_sequence_parallel_size_of_the_launcher_is_taken(
    two_ranks: None, launcher_sizes: None, tmp_path: Path
) -> None:
    """By every config of this process; accelerate, which would act on it, does not see it."""
    for _ in range(2):
        assert make_config(tmp_path).longstraw_sp_size == 2
    assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"].lower() != "true"
    with pytest.raises(ConfigError, match=r"longstraw_sp_size=4.*accelerate's configuration"):
        make_config(tmp_path, longstraw_sp_size=4)


def test_sizes_that_name_the_groups_are_taken(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Eight processes in groups of two: four groups, as TRL's documentation writes it down."""
    monkeypatch.setattr(parallelism, "launched_ranks", lambda: 8)
    sizes = {"sp_size": 2, "dp_shard_size": 4}
    assert make_config(tmp_path, parallelism_config=sizes).longstraw_sp_size == 2


class FilledConfig:
    """A DeepSpeed config that transformers has filled in for one group of 4 x 2 rows."""

    def __init__(self, train_batch_size: int | None, mismatches: list[str]) -> None:
        self.config = {} if train_batch_size is None else {"train_batch_size": train_batch_size}
        self.mismatches = mismatches


def test_deepspeeds_batch_counts_every_rank(tmp_path: Path) -> None:
    """DeepSpeed checks it against its own number of processes."""
    args = make_config(tmp_path, gradient_accumulation_steps=2)
    args.longstraw_sp_size = 2  # with the one process that there is: 4 x 2 x 1 rows
    filled = FilledConfig(4, [])
    count_every_rank(filled, args)
    assert filled.config == {"train_batch_size": 8}
    absent = FilledConfig(None, [])
    count_every_rank(absent, args)
    assert absent.config == {}
    other = "- ds gradient_clipping=2 vs hf max_grad_norm=1"
    own = FilledConfig(8, ["- ds train_batch_size=8 vs hf train_batch_size (calculated)=4", other])
    count_every_rank(own, args)
    assert (own.config["train_batch_size"], own.mismatches) == (8, [other])
    wrong = FilledConfig(6, ["- ds train_batch_size=6 vs hf train_batch_size (calculated)=4"])
    with pytest.raises(ConfigError, match=r'"train_batch_size" is 6.*make 8.*"auto"'):
        count_every_rank(wrong, args)


def test_a_checkpoint_of_another_division_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With as many processes; before there were groups each process was one."""
    here = {"num_generations": 4, "longstraw_sp_size": 2}
    monkeypatch.setattr("trl_integration.run_state._geometry", lambda _: here)
    trainer: Any = None
    check_geometry({"geometry": here}, trainer, "run/checkpoint-1")
    with pytest.raises(ConfigError, match=r"longstraw_sp_size=1, .* has longstraw_sp_size=2"):
        check_geometry({"geometry": {"num_generations": 4}}, trainer, "run/checkpoint-1")
