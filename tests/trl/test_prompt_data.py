"""A prompt is handled once, however often TRL repeats it and whichever way it was given.

Stock TRL gets the same prompts as text, so a difference is one of reading or tokenizing.
"""

import copy
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from trl import GRPOTrainer

from examples.train_grpo import load_split
from tests.marks import slow_but
from tests.trl.chat import CHAT_VOCAB, add, chat_dataset, chat_tokenizer
from tests.trl.parity import (
    TOLERANCE,
    TWO_LAYERS,
    ModelPath,
    Setting,
    make_trainer,
    train,
    worst_metric,
    worst_parameter,
)
from tests.trl.prompt_rows import (
    FORMS,
    GREEDY,
    count_tokenized,
    make_dataset,
    prompts_seen,
    text_dataset,
    texts,
    write_documents,
)
from trl_integration.prompt_data import RowsFetchedOnce, compact_rows
from trl_integration.prompt_reader import PromptReader, TokenizedPrompt

# ---------------------------------------------------------------- the same training


@pytest.mark.parametrize("form", slow_but(["prompt_ids", "document_file", "json stream"], FORMS))
def test_training_is_stock_trls_on_the_same_text(
    form: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """Three steps of two groups each, with responses decoded from the prompt. The eight rows hold
    seven prompts. Tolerance of `test_parity`."""
    path = model_path(**TWO_LAYERS)
    is_stream = "stream" in form
    stock_rows = text_dataset().to_iterable_dataset() if is_stream else text_dataset()
    stock_setting = replace(GREEDY, dataset=lambda: stock_rows)
    stock = train(stock_setting, path, tmp_path / "stock", longstraw=False, shuffle="groups")
    rows = make_dataset(form, tmp_path / "data")
    setting = replace(
        GREEDY,
        dataset=lambda: rows,
        longstraw={"longstraw_document_dir": str(tmp_path / "data")},
    )
    ours = train(setting, path, tmp_path / "ours", longstraw=True)
    assert worst_parameter(ours.after, stock)[0] <= TOLERANCE
    assert worst_metric(ours.logs, stock.logs)[0] <= TOLERANCE
    assert list(ours.trainer._logs["completion"]) == list(stock.trainer._logs["completion"])


def test_paths_are_relative_to_the_working_directory(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = make_dataset("document_file", tmp_path)
    setting = replace(GREEDY, dataset=lambda: rows).but(max_steps=1)
    ours = train(setting, model_path(**TWO_LAYERS), tmp_path / "out", longstraw=True)
    assert ours.trainer.state.global_step == 1


def test_unused_columns_may_be_removed(model_path: ModelPath, tmp_path: Path) -> None:
    """`remove_unused_columns=True` keeps the columns that TRL knows, and those of prompts."""
    for form in ("document_file", "prompt_ids", "stream"):
        rows = make_dataset(form, tmp_path)
        setting = replace(
            GREEDY,
            dataset=lambda rows=rows: rows,
            longstraw={"longstraw_document_dir": str(tmp_path)},
        )
        trainer = make_trainer(
            setting.but(remove_unused_columns=True),
            model_path(**TWO_LAYERS),
            tmp_path / "out",
            longstraw=True,
        )
        batch = next(iter(trainer.get_train_dataloader()))
        assert batch[0].keys() <= {"prompt", "document_file", "prompt_ids"}
        assert batch[0].keys() & {"document_file", "prompt_ids"}


LOADED = {
    "jsonl": Dataset.to_json,
    "parquet": Dataset.to_parquet,
    "csv": Dataset.to_csv,
    "": lambda rows, file: rows.save_to_disk(file),
}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ending", LOADED, ids=lambda ending: ending or "disk")
def test_the_example_reads_local_files(
    ending: str, is_stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = make_dataset("document_file", tmp_path)
    file = str(tmp_path / "rows") + (f".{ending}" if ending else "")
    LOADED[ending](rows, file)
    found = load_split(file, None, "train", is_stream)
    assert isinstance(found, IterableDataset) == is_stream
    assert list(found) == list(rows)


def test_the_example_names_the_splits_there_are(tmp_path: Path) -> None:
    DatasetDict({"train": text_dataset(), "dev": text_dataset()}).save_to_disk(tmp_path)
    assert len(load_split(str(tmp_path), None, "dev")) == 8
    with pytest.raises(ValueError, match=r"splits \['train', 'dev'\] and none named 'test'"):
        load_split(str(tmp_path), None, "test")


# ---------------------------------------------------------------- tokenized once


class Greeter:
    """An environment with a tool of its own."""

    def reset(self, **_: Any) -> None: ...

    def greet(self, name: str) -> str:
        """
        Greet.

        Args:
            name: Whom.

        Returns:
            A greeting.
        """
        return f"Hi {name}"


class Adder:
    """An environment with another tool."""

    def reset(self, **_: Any) -> None: ...

    def total(self, a: int) -> int:
        """
        Sum up.

        Args:
            a: More.

        Returns:
            The sum.
        """
        return a


CHAT = Setting(
    variant={**TWO_LAYERS, "vocab_size": CHAT_VOCAB},
    rollout=None,
    dataset=chat_dataset,
    tokenizer=chat_tokenizer,
)
ENVIRONMENTS = {"first": Greeter, "second": Adder}


def routed_dataset() -> Dataset:
    return chat_dataset().add_column("environment", ["first", "second"] * 2)


TOKENIZED: dict[str, tuple[Setting, int]] = {
    "text": (Setting(rollout=None, dataset=text_dataset), 7),
    "conversation": (CHAT, 4),
    "tools": (replace(CHAT, trainer=lambda: {"tools": [add]}), 4),
    "chat_template_kwargs": (CHAT.but(chat_template_kwargs={"enable_thinking": False}), 4),
    "environments": (
        replace(
            CHAT,
            dataset=routed_dataset,
            trainer=lambda: {"environment_factory": ENVIRONMENTS},
        ),
        4,
    ),
}


@pytest.mark.parametrize("name", TOKENIZED)
def test_each_prompt_is_tokenized_once_to_trls_ids(
    name: str, model_path: ModelPath, tmp_path: Path
) -> None:
    """Every prompt four times, as members of a group, and the whole twice, as from rows that
    repeat."""
    setting, num_unique = TOKENIZED[name]
    path = model_path(setting.family, **setting.variant)
    trainer = make_trainer(setting, path, tmp_path, longstraw=True)
    rows = [row for row in trainer.train_dataset for _ in range(4)] * 2
    prompts = [copy.deepcopy(row["prompt"]) for row in rows]
    trainer._batch_environments = [row.get("environment") for row in rows]
    environments = list(trainer._batch_environments)
    expected = GRPOTrainer._tokenize_prompts(trainer, prompts)
    counting = count_tokenized(trainer)
    found = trainer._tokenize_prompts(prompts)
    assert list(found[0]) == list(expected[0])
    assert tuple(found[1:]) == tuple(expected[1:])
    assert counting.num_prompts == num_unique
    assert trainer._batch_environments == environments


def test_one_conversation_under_two_environments_is_two_prompts(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """Their tools are in the prompt. Told apart from a key of the conversation alone: both would
    get the first environment's tools."""
    setting = TOKENIZED["environments"][0]
    trainer = make_trainer(
        setting, model_path("llama", **setting.variant), tmp_path, longstraw=True
    )
    prompts = [chat_dataset()[0]["prompt"] for _ in range(4)]
    trainer._batch_environments = ["first", "second", "second", "first"]
    expected = GRPOTrainer._tokenize_prompts(trainer, prompts)[0]
    counting = count_tokenized(trainer)
    found = trainer._tokenize_prompts(prompts)[0]
    assert found == list(expected) and found[0] != found[1]
    assert counting.num_prompts == 2


def test_fields_that_a_tokenizer_gives_beside_ids_stay_with_their_rows(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """`token_type_ids` have a row per conversation."""

    def with_types() -> Any:
        tokenizer = chat_tokenizer()
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        return tokenizer

    setting = replace(CHAT, tokenizer=with_types)
    trainer = make_trainer(
        setting, model_path("llama", **setting.variant), tmp_path, longstraw=True
    )
    rows = chat_dataset()["prompt"]
    prompts = [rows[i] for i in (0, 0, 2, 1, 2)]
    _, _, expected = GRPOTrainer._tokenize_prompts(trainer, prompts)
    _, _, found = trainer._tokenize_prompts(prompts)
    assert found == expected and "token_type_ids" in found


def test_prompts_given_as_ids_are_not_tokenized(model_path: ModelPath, tmp_path: Path) -> None:
    """Different ids with the same text stay different, and the text of one of them is a third."""
    setting = Setting(rollout=None)
    trainer = make_trainer(setting, model_path(**TWO_LAYERS), tmp_path, longstraw=True)
    first, second = TokenizedPrompt("w5 w6", [5, 6]), TokenizedPrompt("w5 w6", [5, 2, 6])
    counting = count_tokenized(trainer)
    prompts = copy.deepcopy([first, first, second, "w7", "w5 w6", "w7"])
    ids, images, fields = trainer._tokenize_prompts(prompts)
    assert ids == [[5, 6], [5, 6], [5, 2, 6], [7], [5, 6], [7]]
    assert images is None and fields == {}
    assert counting.num_prompts == 2


# ---------------------------------------------------------------- fetched and read once


def rows_with_boards() -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": text * 99}] for text in ("w5 ", "w6 ")],
            "board": [[[0, 1], [2, 3]], [[4]]],
        }
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_members_of_a_group_share_one_text(
    num_workers: int, model_path: ModelPath, tmp_path: Path
) -> None:
    """Also when a worker process sends the batch."""
    setting = replace(CHAT, dataset=rows_with_boards).but(dataloader_num_workers=num_workers)
    trainer = make_trainer(
        setting, model_path("llama", **setting.variant), tmp_path, longstraw=True
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert [row["prompt"] for row in batch] == [batch[0]["prompt"]] * 4
    assert len({id(row["prompt"][0]["content"]) for row in batch}) == 1


def test_what_can_be_written_to_is_a_rows_own() -> None:
    """An environment may keep its board in the row, and a tool loop continues the conversation."""
    batch = RowsFetchedOnce(rows_with_boards()).__getitems__([0, 0, 1, 0])
    batch[0]["prompt"][0]["content"] = "changed"
    batch[0]["board"][0][0] = 7
    batch[0]["answer"] = "new"
    assert batch[1] == batch[3] == rows_with_boards()[0]
    assert batch[2] == rows_with_boards()[1]


@pytest.mark.parametrize("form", ["prompt_ids", "stream of prompt_ids"])
def test_ids_reach_the_trainer_as_arrays(form: str, model_path: ModelPath, tmp_path: Path) -> None:
    """accelerate calls itself once per element of a list: 8 seconds for 8 copies of a million."""
    rows: Any = make_dataset("prompt_ids", tmp_path)
    if "stream" in form:
        rows = rows.to_iterable_dataset()
    setting = Setting(rollout=None, dataset=lambda: rows)
    trainer = make_trainer(setting, model_path(**TWO_LAYERS), tmp_path, longstraw=True)
    batch = next(iter(trainer.get_train_dataloader()))
    assert all(isinstance(row["prompt_ids"], np.ndarray) for row in batch)
    if "stream" not in form:
        assert len({id(row["prompt_ids"]) for row in batch}) == 1


def test_what_is_no_list_of_numbers_is_left_to_the_reader() -> None:
    """One rank alone would raise here."""
    rows = [{"prompt_ids": [[1], [2, 3]]}, {"prompt_ids": "w5"}, {"prompt": "w5"}]
    assert compact_rows(copy.deepcopy(rows)) == rows


def test_a_file_is_read_once_per_generation_batch(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen rows of four groups, two of which have the same document."""
    seen: list[list[str]] = []
    rows = make_dataset("document_file", tmp_path).select([0, 1, 2, 7])
    setting = replace(
        GREEDY,
        dataset=lambda: rows,
        rewards=(prompts_seen(seen),),
        longstraw={"longstraw_document_dir": str(tmp_path)},
    ).but(per_device_train_batch_size=16, max_steps=1)
    trainer = make_trainer(setting, model_path(**TWO_LAYERS), tmp_path / "out", longstraw=True)
    reads: Counter[str] = Counter()
    read_bytes = Path.read_bytes

    def counted(path: Path) -> bytes:
        reads[path.name] += 1
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    counting = count_tokenized(trainer)
    trainer.train()
    assert {n: c for n, c in reads.items() if n.startswith("document")} == {
        "document0.txt": 1,
        "document1.txt": 1,
        "document2.txt": 1,
    }
    assert counting.num_prompts == 3
    assert sorted(set(seen[0])) == sorted({texts()[i] for i in (0, 1, 2)})
    assert len({id(prompt) for prompt in seen[0]}) == 3


def test_evaluation_reads_prompts_the_same_way(model_path: ModelPath, tmp_path: Path) -> None:
    seen: list[list[str]] = []
    rows = make_dataset("document_file", tmp_path)
    setting = replace(
        GREEDY,
        rewards=(prompts_seen(seen),),
        trainer=lambda: {"eval_dataset": rows.select([3])},
        longstraw={"longstraw_document_dir": str(tmp_path)},
    ).but(per_device_eval_batch_size=4)
    trainer = make_trainer(setting, model_path(**TWO_LAYERS), tmp_path / "out", longstraw=True)
    trainer.evaluate()
    assert seen == [[texts()[3]] * 4]


# ---------------------------------------------------------------- the reader


class BytesTokenizer:
    """Decodes ids as the bytes that they are."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("latin-1")


def read(*rows: dict[str, Any], folder: Path | None = None, **options: bool) -> list[Any]:
    """The prompts of `rows`, as a model with 200 embeddings gets them."""
    reader = PromptReader(BytesTokenizer(), 200, None if folder is None else str(folder))
    options = {"has_tools": False, "has_environment": False, **options}
    return [row.get("prompt") for row in reader.read(rows, **options)]


def test_a_document_takes_its_place_in_a_message(tmp_path: Path) -> None:
    """In every text of the conversation, with other braces and line ends as they are. Nothing of
    the dataset's row is written to."""
    write_documents(tmp_path)
    (tmp_path / "book.txt").write_bytes("a\r\n{document} é".encode())
    prompt = [
        {"role": "system", "content": 'Answer as {"answer": ...}.'},
        {"role": "user", "content": [{"type": "text", "text": "{document}\n\nWho is {x}?"}]},
    ]
    row = {"prompt": prompt, "document_file": "book.txt"}
    before = copy.deepcopy(row)
    (found,) = read(row, folder=tmp_path)
    assert found[0] == prompt[0]
    assert found[1]["content"] == [
        {"type": "text", "text": "a\r\n{document} é\n\nWho is {x}?"},
    ]
    assert row == before


def test_texts_and_ids_share_a_batch(tmp_path: Path) -> None:
    """Rewards get the text of the ids; a placeholder in a dataset without files is no placeholder.
    Ids of other integer types with the same bytes are not taken for each other."""
    rows = [
        {"prompt": "{document}"},
        {"prompt": None, "prompt_ids": np.array([65, 0], dtype=np.int32)},
        {"prompt": None, "prompt_ids": np.array([65], dtype=np.int64)},
        {"prompt": None, "prompt_ids": [65, 0]},
    ]
    found = read(*rows, folder=tmp_path)
    assert found == ["{document}", "A\0", "A", "A\0"]
    assert [p.prompt_ids for p in found[1:]] == [[65, 0], [65], [65, 0]]
    assert found[1] is found[3]


def test_a_prompt_of_an_environment_may_be_missing() -> None:
    """TRL puts an empty message there, which the environment continues."""
    assert read({"environment": "first"}, has_environment=True) == [None]


def test_ids_go_with_their_text_into_other_processes() -> None:
    """A reward function may score in a pool."""
    found = pickle.loads(pickle.dumps(TokenizedPrompt("ab", [1, 2])))
    assert found == "ab" and found.prompt_ids == [1, 2]
