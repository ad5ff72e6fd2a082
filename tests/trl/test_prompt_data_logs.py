"""Reward functions get whole prompts; logs, checkpoints and other ranks get shortened ones."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from longstraw import ConfigError
from tests.marks import slow_but
from tests.trl.parity import (
    TWO_LAYERS,
    ModelPath,
    Setting,
    fixed_rollout,
    make_trainer,
    modular_reward,
    train,
)
from tests.trl.prompt_rows import make_dataset, prompts_seen
from tests.trl.ranks import run_ranks
from tests.trl.resuming import BUFFERED, VARIANT, resumed, uninterrupted
from trl_integration.prompt_data import shortened
from trl_integration.prompt_reader import TokenizedPrompt
from trl_integration.seams import check_seams

MIDDLE = "in the middle"
LONG = "begin " + "w5 " * 5000 + MIDDLE + " w6" * 5000 + " end?"


def short_tokens() -> Any:
    """A rollout function whose prompts have two tokens, whatever their text."""
    rollout = fixed_rollout()

    def two_tokens(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        out = rollout(["w5 w6"] * len(prompts), trainer)
        return {**out, "prompt_ids": [[5, 6]] * len(prompts)}

    return two_tokens


def long_dataset() -> Dataset:
    """Prompts that differ in the middle only."""
    return Dataset.from_dict({"prompt": [LONG.replace(MIDDLE, f"{MIDDLE} {i}") for i in range(4)]})


LOGGED = Setting(
    rollout=short_tokens,
    dataset=long_dataset,
    config={"log_completions": True, "max_steps": 1, "per_device_train_batch_size": 8},
)


# ---------------------------------------------------------------- the shortened form


def test_a_shortened_text_shows_its_end_and_keeps_its_identity() -> None:
    found = shortened(LONG, 40)
    form = (
        r"begin w5 w \[\.\.\. 29,9\d\d characters left out, sha256 \w{8} \.\.\.\] [w6 ]{25} end\?"
    )
    assert re.fullmatch(form, found), found
    assert shortened(LONG.replace(MIDDLE, MIDDLE[::-1]), 40) != found


def test_what_is_short_stays() -> None:
    """Also a text that its shortened form would make longer."""
    assert shortened("w5", 2) == "w5"
    assert shortened("w" * 50, 40) == "w" * 50
    assert shortened(None, 40) is None


def test_messages_keep_their_form() -> None:
    """Each message is shortened by itself, and the whole of one is not written to."""
    message = {"role": "user", "content": [{"type": "text", "text": LONG}], "tool_calls": None}
    (found,) = shortened([message], 40)
    assert found["role"] == "user" and found["tool_calls"] is None
    assert found["content"] == [{"type": "text", "text": shortened(LONG, 40)}]
    assert message["content"] == [{"type": "text", "text": LONG}]


@pytest.mark.parametrize("limit", [None, 9])
def test_a_logged_prompt_leaves_its_ids_behind(limit: int | None) -> None:
    assert type(shortened(TokenizedPrompt("w5", [5]), limit)) is str


# ---------------------------------------------------------------- tables of completions


def test_tables_show_shortened_prompts_and_rewards_whole_ones(
    model_path: ModelPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed table and the file. A list of prompts that a reward function keeps stays whole.
    Prompts that differ in the middle only are still counted apart, as `log_unique_prompts` does."""
    seen: list[list[str]] = []
    setting = replace(LOGGED, rewards=(prompts_seen(seen),))
    train(setting, model_path(**TWO_LAYERS), tmp_path, longstraw=True)
    assert all(prompt.startswith("begin") and len(prompt) > 30_000 for prompt in seen[0])
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(table) == 8 and table["prompt"].str.len().max() < 500
    assert table["prompt"].str.endswith("w6 end?").all()
    assert len(table["prompt"].astype(str).unique()) == len(set(seen[0])) == 2
    assert len(capsys.readouterr().out) < 40_000


def test_whole_prompts_are_logged_on_demand(model_path: ModelPath, tmp_path: Path) -> None:
    setting = replace(LOGGED, longstraw={"longstraw_logged_prompt_chars": None})
    train(setting, model_path(**TWO_LAYERS), tmp_path, longstraw=True)
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert table["prompt"].str.contains(MIDDLE).all()


def unscored(completions: list[Any], **_: Any) -> list[None]:
    return [None] * len(completions)


@pytest.mark.parametrize("longstraw", [True, False])
def test_the_warning_of_an_unscored_row_is_brief(
    longstraw: bool, model_path: ModelPath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL's own has the whole row in it. Other messages of the logger are not touched."""
    setting = replace(LOGGED, rewards=(unscored,)).but(log_completions=False)
    trainer = make_trainer(setting, model_path(**TWO_LAYERS), tmp_path, longstraw=longstraw)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (message,) = (m for m in caplog.messages if "All reward functions returned" in m)
    assert message.endswith("at least one reward function returns a valid reward.")
    assert "w6 end?" in message
    assert (len(message) < 2200) == longstraw
    assert not logging.getLogger("trl.trainer.grpo_trainer").filters


class Later:
    """Ways in which a later TRL could use prompts after their rewards are known."""

    def shown(self: Any, inputs: Any, prompts: Any) -> None:
        self._calculate_rewards(inputs, prompts)
        self._logs["prompt"].extend(prompts)

    def measured(self: Any, inputs: Any, prompts: Any) -> Any:
        self._calculate_rewards(inputs, prompts)
        return len(prompts), [len(prompt) for prompt in prompts]

    def unrewarded(self: Any, inputs: Any, prompts: Any) -> int:
        return len(inputs) + sum(map(len, prompts))


@pytest.mark.parametrize("way", ["shown", "measured", "unrewarded"])
def test_another_use_of_prompts_than_a_table_is_found(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get the shortened ones."""
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", getattr(Later, way))
    with pytest.raises(ConfigError, match="uses prompts after _calculate_rewards"):
        check_seams()


# ---------------------------------------------------------------- checkpoints


def test_a_checkpoint_holds_no_long_text(model_path: ModelPath, tmp_path: Path) -> None:
    """Between two steps of one generation's use, with the printed table in it: 8 rows of 30,000
    characters would be 240,000 bytes."""
    setting = replace(BUFFERED, rollout=short_tokens, dataset=long_dataset).but(
        log_completions=True, max_steps=2
    )
    uninterrupted(setting, model_path(**VARIANT), tmp_path / "run")
    file = tmp_path / "run" / "checkpoint-1" / "longstraw_state_0.pt"
    printed = torch.load(file, weights_only=True)["printed"]["prompt"]
    assert len(printed) == 8 and all(type(prompt) is str for prompt in printed)
    assert max(len(prompt) for prompt in printed) < 500
    assert file.stat().st_size < 60_000


def tabled(prompts: list[Any], log_extra: Any, **rows: Any) -> list[float | None]:
    """A reward function that adds the prompts to the table itself."""
    log_extra("again", prompts)
    return modular_reward(**rows)


@pytest.mark.parametrize("form", slow_but(["disk"], ["prompt_ids", "disk", "json stream"]))
def test_a_resumed_run_is_the_uninterrupted_one(
    form: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """To the last bit, between two uses of one generation; and the table of its completions."""
    data = tmp_path / "data"
    rows = make_dataset(form, data)
    setting = replace(
        BUFFERED,
        dataset=lambda: rows,
        rewards=(tabled,),
        longstraw={"longstraw_document_dir": str(data), "longstraw_logged_prompt_chars": None},
    ).but(log_completions=True, max_steps=6)
    whole = uninterrupted(setting, model_path(**VARIANT), tmp_path / "run")
    for step in (3, 5):
        checkpoint = tmp_path / "run" / f"checkpoint-{step}"
        assert not whole.differences(resumed(setting, model_path(**VARIANT), checkpoint))
    table = Path("completions", "completions_00006.parquet")
    first, second = (pandas.read_parquet(tmp_path / run / table) for run in ("run", "resumed"))
    assert first.equals(second)
    assert first["again"].equals(first["prompt"]) and first["prompt"].str.endswith("w11").all()


# ---------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def ranks(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found in `tests.trl.prompt_program`."""
    folder = tmp_path_factory.mktemp("prompt_ranks")
    arguments = ["-m", "tests.trl.prompt_program", str(model_path(**TWO_LAYERS)), str(folder)]
    run_ranks(arguments, 2, folder / "logs", timeout=240)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_no_text_of_prompts_goes_over_the_network(ranks: list[dict[str, Any]]) -> None:
    """Eight rows of 30,000 characters per rank. Rank 0 logs the prompts of both."""
    for found in ranks:
        assert 0 < found["gathered_bytes"] < 8 * 1000
        assert found["longest_rewarded"] > 30_000
    assert len(set(ranks[0]["logged"])) == 4
    assert all(prompt.endswith("w6 end?") for prompt in ranks[0]["logged"])


@pytest.mark.parametrize("what", ["file", "ids", "template"])
def test_an_error_in_one_ranks_rows_is_raised_on_both(
    what: str, ranks: list[dict[str, Any]]
) -> None:
    """Rank 1 has the bad row. Rank 0 says so instead of waiting."""
    words = {
        "file": "nowhere.txt",
        "ids": "97 at position 0",
        "template": "no such role",
    }[what]
    assert words in ranks[1][what] and words in ranks[0][what]
    assert "rank 1 failed in" in ranks[0][what]
