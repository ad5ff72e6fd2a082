"""`PromptReader`: rows of a dataset with their prompts whole, whichever way they were given.

A prompt is given in one of two ways:

* `prompt`, a text or a conversation as in TRL. Where the row has a `document_file` too, the text of
  that file stands for `{document}` in it;
* `prompt_ids`, the token ids.

Knows columns, files and the tokenizer; knows nothing of the trainer, the model or other ranks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longstraw import DataError

PLACEHOLDER = "{document}"
COLUMNS = ("prompt", "prompt_ids", "document_file")

Row = dict[str, Any]


class TokenizedPrompt(str):
    """The text of a prompt that was given as token ids; it carries them.

    Different ids can have the same text, and its tokenization need not be the ids that were given.

    Attributes:
        prompt_ids: as given.
    """

    prompt_ids: list[int]

    def __new__(cls, text: str, prompt_ids: list[int]) -> "TokenizedPrompt":
        prompt = super().__new__(cls, text)
        prompt.prompt_ids = prompt_ids
        return prompt

    def __getnewargs__(self) -> tuple[str, list[int]]:  # type: ignore[override]
        return str(self), self.prompt_ids

    def __deepcopy__(self, memo: dict[int, Any]) -> "TokenizedPrompt":
        return self  # as for any text; the ids are not written to either


class PromptReader:
    """Reads prompts.

    Args:
        tokenizer: gives `prompt_ids` their text.
        vocab_size: rows of the model's embedding.
        folder: what a relative `document_file` is relative to; None is the working directory.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, folder: str | None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.folder = folder

    def read(self, rows: Sequence[Row], *, has_tools: bool, has_environment: bool) -> list[Row]:
        """`rows` with a whole `prompt` each, and without `prompt_ids`.

        Each file is read once, and rows with the same template and file share one text. A prompt
        given as ids becomes a `TokenizedPrompt`. Rows that give a text or a conversation and no
        file keep it as it is.

        Raises:
            DataError: a row gives no prompt, two, or one that cannot be used.
        """
        done: dict[Any, Any] = {}
        whole = []
        for index, row in enumerate(rows):
            where = f"row {index} of the batch"
            if has_environment and row.get("prompt") is None and row.get("prompt_ids") is None:
                # TRL takes it from the environment, where the row has no such key.
                whole.append({k: v for k, v in row.items() if k not in ("prompt", "prompt_ids")})
                continue
            prompt = self._read(row, done, where)
            others = {key: value for key, value in row.items() if key != "prompt_ids"}
            whole.append({**others, "prompt": prompt})
        _check_kinds([row["prompt"] for row in whole if "prompt" in row], has_tools)
        return whole

    def _read(self, row: Row, done: dict[Any, Any], where: str) -> Any:
        prompt, ids, file = (row.get(column) for column in COLUMNS)
        if prompt is None and ids is None:
            raise DataError(
                f"{where} gives no prompt: its columns are {list(row)}. Give 'prompt' (a text or a "
                "list of messages) or 'prompt_ids' (token ids)."
            )
        if ids is not None:
            for other in ("prompt", "document_file"):
                if row.get(other) is not None:
                    raise DataError(
                        f"{where} gives both 'prompt_ids' and {other!r}: the token ids are the "
                        "whole prompt. Leave one of them out, or None in that row."
                    )
            return self._from_ids(ids, done, where)
        _check_prompt(prompt, where)
        if file is None:
            if "document_file" in row and PLACEHOLDER in _texts(prompt):
                raise DataError(
                    f"the prompt of {where} contains {PLACEHOLDER}, and its 'document_file' is "
                    "None. Give the path of the file, or take the placeholder out."
                )
            return prompt
        if PLACEHOLDER not in _texts(prompt):
            raise DataError(
                f"{where} has document_file={file!r}, and its prompt does not say where the text "
                f"belongs. Write {PLACEHOLDER} there, for example "
                f'"{PLACEHOLDER}\\n\\nQuestion: ...", or "{PLACEHOLDER}" alone.'
            )
        path = document_path(file, self.folder, where)
        if path not in done:
            done[path] = read_document(path, file, self.folder, where)
        return _filled(prompt, done[path], done)

    def _from_ids(self, ids: Any, done: dict[Any, Any], where: str) -> TokenizedPrompt:
        array = _checked_ids(ids, self.vocab_size, where)
        key = array.tobytes()
        if key not in done:
            plain = array.tolist()
            # As the model sees it: with special tokens, and spaces as they are.
            text = self.tokenizer.decode(
                plain, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            done[key] = TokenizedPrompt(text, plain)
        return done[key]


# ---------------------------------------------------------------- documents


def document_path(file: Any, folder: str | None, where: str) -> Path:
    """Where the file of a row is.

    Raises:
        DataError: `file` is no path.
    """
    if not isinstance(file, str) or not file:
        raise DataError(
            f"{where} has document_file={file!r}, a {type(file).__name__}. Give the path of one "
            "text file, or None for a prompt without a document."
        )
    return Path(folder or "").expanduser() / Path(file).expanduser()


def read_document(path: Path, file: str, folder: str | None, where: str) -> str:
    """The text of a file, as it is: no line end is changed.

    Raises:
        DataError: it is not there, cannot be read, is empty or is not UTF-8.
    """
    base = f"longstraw_document_dir={folder!r}" if folder else "the working directory"
    found = f"the document_file {file!r} of {where}"
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(
            f"{found} cannot be read: {error.strerror} ({path.absolute()}). Relative paths are "
            f"relative to {base}. Correct the path, or set longstraw_document_dir to the folder of "
            "the files; every node needs them."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{found} is not UTF-8: byte {error.start:,} is 0x{error.object[error.start]:02x} "
            f"({path.absolute()}). Convert it, for example iconv -f latin1 -t utf-8."
        ) from error
    if not text:
        raise DataError(f"{found} is empty ({path.absolute()}). Leave its rows out.")
    return text


def _filled(value: Any, text: str, done: dict[Any, Any]) -> Any:
    """`value` anew, with `text` for the placeholder in all of its strings."""
    if isinstance(value, str):
        key = (value, text)
        if key not in done:
            done[key] = value.replace(PLACEHOLDER, text) if PLACEHOLDER in value else value
        return done[key]
    if isinstance(value, list):
        return [_filled(item, text, done) for item in value]
    if isinstance(value, dict):
        return {key: _filled(item, text, done) for key, item in value.items()}
    return value


def _texts(value: Any) -> str:
    """All strings of a prompt, joined."""
    if isinstance(value, str):
        return value
    items = value.values() if isinstance(value, dict) else value
    return "\0".join(_texts(item) for item in items) if isinstance(value, list | dict) else ""


# ---------------------------------------------------------------- checks


def _check_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str):
        return
    if isinstance(prompt, list) and prompt and all(_is_message(item) for item in prompt):
        return
    found = f"a {type(prompt).__name__}"
    if isinstance(prompt, list):
        found = "an empty list" if not prompt else f"a list with {prompt[0]!r:.60}"
    hint = ""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        hint = " Token ids belong in the column 'prompt_ids'."
    raise DataError(
        f"the prompt of {where} is {found}. Give a text, or a conversation: a list of "
        '{"role": "user", "content": "..."}.' + hint
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and "role" in item


def _check_kinds(prompts: Sequence[Any], has_tools: bool) -> None:
    """TRL looks at the first prompt of a batch and takes the others to be alike."""
    is_text = [isinstance(prompt, str) for prompt in prompts]
    if any(is_text) and not all(is_text):
        raise DataError(
            f"row {is_text.index(True)} of the batch is a text (or token ids) and row "
            f"{is_text.index(False)} a conversation, and completions have one form per batch. Give "
            "all rows as conversations, or all as texts or token ids."
        )
    if has_tools and any(is_text):
        raise DataError(
            "tools or environments are set, and the prompts are texts or token ids. Tool calls "
            "are parts of a conversation: give 'prompt' as a list of messages."
        )


def _checked_ids(ids: Any, vocab_size: int, where: str) -> np.ndarray:
    try:
        array = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids)
    except ValueError:  # lists of different lengths
        array = np.empty((1, 1))
    if array.size == 0:
        raise DataError(
            f"the prompt_ids of {where} are empty: the first response token is predicted by the "
            "last prompt token, so at least one is needed."
        )
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"the prompt_ids of {where} are {_described(ids)}. Give one flat list of whole numbers."
        )
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if outside.size:
        first = int(outside[0])
        raise DataError(
            f"the prompt_ids of {where} have {array[first]} at position {first:,}, and the model "
            f"has embeddings for 0 ... {vocab_size - 1:,} ({outside.size:,} of {array.size:,} ids "
            "are outside). Tokenize the prompt with this model's tokenizer."
        )
    return array.astype(np.int64)


def _described(ids: Any) -> str:
    what = f"with {ids[0]!r:.60}" if isinstance(ids, list | np.ndarray) else f"({ids!r:.60})"
    return f"a {type(ids).__name__} {what}"
