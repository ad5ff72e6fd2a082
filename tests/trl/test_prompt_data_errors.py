"""A row that gives no usable prompt is refused, and the message names the way out.

What a dataset shows as a whole is refused when the trainer is made, what differs from row to row
when the row comes.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from longstraw import ConfigError, DataError
from tests.trl.parity import TWO_LAYERS, ModelPath, Setting, make_trainer
from tests.trl.prompt_rows import GREEDY
from tests.trl.test_prompt_data import read
from trl_integration import LongStrawGRPOConfig

MESSAGE = [{"role": "user", "content": "w5"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents with something wrong."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin1.txt").write_bytes("w5 caf\xe9".encode("latin-1"))
    (tmp_path / "good.txt").write_text("w5")
    (tmp_path / "folder").mkdir()
    return tmp_path


ALONE = {"prompt": "{document}"}
ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nothing": ({"answer": 3}, ("row 0", "no prompt", "answer", "'prompt_ids'")),
    "None": ({"prompt": None}, ("row 0", "no prompt")),
    "a number": ({"prompt": 7}, ("prompt of row 0", "int", "role")),
    "an empty conversation": ({"prompt": []}, ("empty list", "role")),
    "texts": ({"prompt": ["w5", "w6"]}, ("list with 'w5'", "role")),
    "ids as prompt": ({"prompt": [5, 6]}, ("list with 5", "'prompt_ids'")),
    "prompt and ids": (
        {"prompt": "w5", "prompt_ids": [5]},
        ("both 'prompt_ids' and 'prompt'", "Leave one of them out", "None"),
    ),
    "file and ids": (
        {"document_file": "good.txt", "prompt_ids": [5]},
        ("both 'prompt_ids' and 'document_file'", "Leave one"),
    ),
    "no ids": ({"prompt_ids": []}, ("prompt_ids of row 0", "empty", "at least one")),
    "ids out of the vocabulary": (
        {"prompt_ids": [5, 200, 6, -1]},
        ("200 at position 1", "0 ... 199", "2 of 4", "this model's tokenizer"),
    ),
    "floats as ids": ({"prompt_ids": [5.0, 6.0]}, ("list with 5.0", "whole numbers")),
    "booleans as ids": ({"prompt_ids": [True]}, ("list with True", "whole numbers")),
    "a gap in ids": ({"prompt_ids": [None, 5]}, ("list with None", "whole numbers")),
    "a batch of ids": ({"prompt_ids": [[5, 6]]}, ("list with [5, 6]", "flat list")),
    "ragged ids": ({"prompt_ids": [[5], [6, 7]]}, ("list with [5]", "flat list")),
    "text as ids": ({"prompt_ids": "5 6"}, ("str ('5 6')", "flat list")),
    "a missing file": (
        {**ALONE, "document_file": "bok.txt"},
        ("'bok.txt' of row 0", "No such file", "longstraw_document_dir='FOLDER'", "FOLDER/bok.txt"),
    ),
    "a folder": ({**ALONE, "document_file": "folder"}, ("'folder'", "directory")),
    "an empty file": ({**ALONE, "document_file": "empty.txt"}, ("'empty.txt'", "is empty")),
    "a file that is not UTF-8": (
        {**ALONE, "document_file": "latin1.txt"},
        ("'latin1.txt'", "not UTF-8", "byte 6 is 0xe9", "iconv"),
    ),
    "several files": (
        {**ALONE, "document_file": ["good.txt"]},
        ("document_file=['good.txt']", "list", "one"),
    ),
    "no placeholder": (
        {"prompt": "w5 {documents}", "document_file": "good.txt"},
        ("'good.txt'", "where", "{document}"),
    ),
    "no file for a placeholder": (
        {**ALONE, "document_file": None},
        ("contains {document}", "None", "placeholder"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_without_a_usable_prompt_is_refused(name: str, folder: Path) -> None:
    row, words = ROWS[name]
    with pytest.raises(DataError) as error:
        read(row, folder=folder)
    missing = [w for w in words if w.replace("FOLDER", str(folder)) not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


@pytest.mark.parametrize("first", ["text", "ids"])
def test_conversations_and_texts_do_not_share_a_batch(first: str) -> None:
    """TRL would give all rows completions of the first row's form."""
    row: dict[str, Any] = {"prompt": "w5"} if first == "text" else {"prompt_ids": [65]}
    with pytest.raises(DataError, match=r"row 1 of the batch is a text.*row 0 a conversation"):
        read({"prompt": MESSAGE}, row)


def test_tools_need_conversations() -> None:
    """TRL would look for tool calls in a text: "'str' object has no attribute 'get'"."""
    with pytest.raises(DataError, match="Tool calls are parts of a conversation"):
        read({"prompt_ids": [65]}, has_tools=True)


# ---------------------------------------------------------------- when the trainer is made


def make(rows: dict[str, list[Any]], model_path: ModelPath, folder: Path) -> None:
    setting = Setting(
        rollout=None,
        dataset=lambda: Dataset.from_dict(rows),
        longstraw={"longstraw_document_dir": str(folder)},
    )
    make_trainer(setting, model_path(**TWO_LAYERS), folder / "out", longstraw=True)


DATASETS: dict[str, tuple[dict[str, list[Any]], tuple[str, ...]]] = {
    "another name": ({"question": ["w5"]}, ("question", "rename_column", "'prompt_ids'")),
    "files without a place": (
        {"document_file": ["good.txt"]},
        ("'document_file'", "none named 'prompt'", "'{document}' alone"),
    ),
    "missing files": (
        {
            "prompt": ["{document}"] * 4,
            "document_file": ["good.txt", "bok.txt", None, "bok2.txt"],
        },
        ("2 of the 3 files", "train_dataset", "FOLDER/bok.txt", "longstraw_document_dir"),
    ),
    "files as lists": (
        {"prompt": ["{document}"], "document_file": [["good.txt"]]},
        ("'document_file'", "List", "one text file"),
    ),
    "ids as text": ({"prompt_ids": ["5 6"]}, ("'prompt_ids'", "string", "whole numbers")),
    "ids as floats": ({"prompt_ids": [[5.0]]}, ("'prompt_ids'", "float64", "whole numbers")),
}


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_that_cannot_give_prompts_is_refused_at_once(
    name: str, folder: Path, model_path: ModelPath
) -> None:
    """Before a model is run, and not when the row with the missing file comes."""
    rows, words = DATASETS[name]
    with pytest.raises(DataError) as error:
        make(rows, model_path, folder)
    missing = [w for w in words if w.replace("FOLDER", str(folder)) not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


def test_columns_without_a_value_have_any_type(folder: Path, model_path: ModelPath) -> None:
    """A JSON file in which no row uses them says nothing of their type."""
    make({"prompt": ["w5"], "document_file": [None], "prompt_ids": [None]}, model_path, folder)


def test_a_placeholder_without_a_column_of_files_is_told(
    folder: Path, model_path: ModelPath, caplog: pytest.LogCaptureFixture
) -> None:
    """A misspelt column would train on the placeholder. It is no error: a prompt may be about
    templates."""
    with caplog.at_level(logging.WARNING):
        make({"prompt": ["{document}"], "documentfile": ["good.txt"]}, model_path, folder)
    assert "no column is named 'document_file' (columns: ['prompt', 'documentfile'])" in caplog.text


def test_an_error_in_a_row_ends_the_training(model_path: ModelPath, tmp_path: Path) -> None:
    """The vocabulary is the model's: 97 words."""
    rows = Dataset.from_dict({"prompt_ids": [[5, 97]] * 2})
    setting = Setting(rollout=None, dataset=lambda: rows, config=GREEDY.config)
    trainer = make_trainer(setting, model_path(**TWO_LAYERS), tmp_path, longstraw=True)
    with pytest.raises(DataError, match=r"97 at position 1, and the model has embeddings for 0"):
        trainer.train()


def test_a_shortened_prompt_has_characters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"longstraw_logged_prompt_chars=0: give a positive"):
        LongStrawGRPOConfig(
            str(tmp_path), longstraw_logged_prompt_chars=0, use_cpu=True, report_to="none"
        )
