"""The options for state that exceeds the memory: they reach the engine, or are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw import ConfigError, PageFileError
from tests.trl.parity import BASE, ModelPath, Setting, make_trainer
from trl_integration import LongStrawGRPOConfig

IN_FILES = {
    "longstraw_page_size": 3,
    "longstraw_chunk_size": 8,
    # Half of what a prompt of 30 tokens takes with its cotangents.
    "longstraw_state_budget_gib": 16 / 2**20,
}


def test_options_reach_the_engine(tmp_path: Path) -> None:
    """In bytes."""
    options = {
        "longstraw_spill_dir": str(tmp_path),
        "longstraw_spill_budget_gib": 0.5,
        "longstraw_state_budget_gib": 0.25,
        "longstraw_cotangent_dtype": "bfloat16",
    }
    config = LongStrawGRPOConfig(str(tmp_path), **BASE, **options).to_engine_config()
    assert config.spill_dir == str(tmp_path)
    assert (config.spill_budget_bytes, config.state_budget_bytes) == (2**29, 2**28)
    assert config.cotangent_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longstraw_spill_dir": ""}, "^longstraw_spill_dir=''.*name a folder"),
        ({"longstraw_spill_budget_gib": 1.0}, "^longstraw_spill_budget_gib=1.0.*longstraw_spill_d"),
        (
            {"longstraw_spill_budget_gib": 0.0, "longstraw_spill_dir": "here"},
            "^longstraw_spill_budget_gib=0.0.*positive",
        ),
        (
            {"longstraw_cotangent_dtype": "bfloat"},
            "^longstraw_cotangent_dtype='bfloat'.*Did you mean 'bfloat16'",
        ),
    ],
)
def test_values_that_cannot_be_honoured_are_refused_by_their_name(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """At the config's construction, and with the name that the user wrote."""
    with pytest.raises(ConfigError, match=message):
        LongStrawGRPOConfig(str(tmp_path), **BASE, **options)


def test_a_folder_that_takes_no_files_is_refused_before_training(
    model_path: ModelPath, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    setting = Setting(longstraw={"longstraw_spill_dir": str(tmp_path / "file")})
    with pytest.raises(PageFileError, match="longstraw_spill_dir"):
        make_trainer(setting, model_path(setting.family), tmp_path, longstraw=True)


def test_training_with_files_is_the_same_bit_for_bit(model_path: ModelPath, tmp_path: Path) -> None:
    """Generation, scoring, replay and the prompt's backward read them."""
    ends = []
    for options in ({}, {"longstraw_spill_dir": str(tmp_path / "pages")}):
        setting = Setting(longstraw={**IN_FILES, **options} if options else _without_budget())
        trainer = make_trainer(
            setting, model_path(setting.family), tmp_path / str(len(ends)), longstraw=True
        )
        trainer.train()
        store = trainer.engine.store
        assert (store.peak_disk_bytes > 0) == bool(options)
        assert store.bytes_in_use == 0
        ends.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
    assert all(torch.equal(ends[1][name], parameter) for name, parameter in ends[0].items())
    assert not list((tmp_path / "pages").iterdir())


def _without_budget() -> dict[str, Any]:
    return {name: value for name, value in IN_FILES.items() if "budget" not in name}
