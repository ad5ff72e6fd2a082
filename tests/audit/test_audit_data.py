"""What a user gives as --data."""

import pytest

from longstraw.audit.case import TokenSource
from longstraw.audit.policy import PolicySource
from longstraw.errors import DataError


class Words:
    """A tokenizer: the length of each word."""

    def __call__(self, text: str, verbose: bool = True) -> dict:
        return {"input_ids": [len(word) for word in text.split()]}


@pytest.fixture
def read(monkeypatch, tmp_path):
    monkeypatch.setattr(PolicySource, "load_tokenizer", lambda self: Words())

    def read(name: str, content: str) -> TokenSource:
        path = tmp_path / name
        path.write_text(content)
        return TokenSource(PolicySource("some-model"), path, 10)

    return read


def test_rows_are_texts_or_chat_messages(read):
    """In their order, one after the other."""
    rows = '{"prompt": "a bb"}\n\n{"text": "ccc"}\n'
    rows += '{"prompt": [{"role": "user", "content": "dddd"}]}'
    assert read("rows.jsonl", rows).ids.tolist() == [1, 2, 3, 4]
    assert read("text.txt", "a bb").prompt(1).tolist() == [1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"question": "a"}', 'line 1: found question; an object with a "prompt"'),
        ("rows.jsonl", "{", "line 1: not JSON"),
        ("rows.csv", "a", ".txt"),
        ("text.txt", "a bb", "has 2 tokens, and --prompt-tokens asks for 9"),
    ],
)
def test_what_cannot_be_read_is_named(read, name, content, message):
    with pytest.raises(DataError, match=message.replace("(", r"\(")):
        read(name, content).prompt(9)
