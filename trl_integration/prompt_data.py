"""`PromptDataGRPOTrainer`: TRL's trainer for prompts so long that handling a copy takes time.

TRL repeats each row of the data `num_generations` times and fetches, tokenizes, gathers and prints
every copy. How a row gives its prompt is in `prompt_reader`.
"""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import datasets
import numpy as np
import torch
from torch import Tensor
from trl import GRPOTrainer

from longstraw import Engine

from .prompt_reader import COLUMNS, PromptReader, Row, TokenizedPrompt
from .seams import brief_warnings


class PromptDataGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` that handles each prompt once per generation batch.

    * Prompts may be given as token ids, or with a document in a file (`PromptReader`).
    * The members of a group share one text. It is fetched and tokenized once.
    * Reward functions get whole prompts. What is gathered over ranks, printed and written to tables
      of completions is shortened (`shortened`).
    """

    engine: Engine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data_collator = compact_rows
        config, options = cast(Any, self.model).config, cast(Any, self.args)
        self._prompt_reader = PromptReader(
            self.processing_class,
            config.get_text_config().vocab_size,
            options.longstraw_document_dir,
        )

    # ---------------------------------------------------------------- fetching

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: list[str] = self._signature_columns  # type: ignore[assignment]
        columns += [name for name in COLUMNS if name not in columns]

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dataset, datasets.Dataset):
            dataset = RowsFetchedOnce(dataset)
        return super()._get_dataloader(dataset, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[Row]) -> dict[str, Any]:
        with self.engine.lockstep.together("reading prompts"):  # all ranks raise, or none
            inputs = self._prompt_reader.read(
                inputs,
                has_tools=bool(self.tools),
                has_environment=self.environment_factories is not None,
            )
        return super()._generate_and_score_completions(inputs)

    # ---------------------------------------------------------------- tokenizing

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """TRL's result for each of `prompts`; equal prompts share one list of ids."""
        first_of = self._first_equal(prompts)
        texts, ids = [], {}
        for first in dict.fromkeys(first_of):
            if isinstance(prompts[first], TokenizedPrompt):
                ids[first] = prompts[first].prompt_ids
            else:
                texts.append(first)
        images, fields = None, {}
        if texts:
            with self._only_environments_of(texts):
                rows, images, fields = super()._tokenize_prompts([prompts[i] for i in texts])
            ids |= zip(texts, rows, strict=True)
        if images is not None or fields:  # of conversations, none of which was given as ids
            order = [texts.index(first) for first in first_of]
            images = None if images is None else [images[k] for k in order]
            fields = {name: _rows_of(value, order) for name, value in fields.items()}
        return [ids[first] for first in first_of], images, fields

    def _first_equal(self, prompts: Sequence[Any]) -> list[int]:
        """For each prompt the index of the first one that is tokenized to the same ids."""
        found: list[int] = []
        firsts: list[int] = []
        for i in range(len(prompts)):
            # The last one first: members of a group are neighbours.
            same = (k for k in reversed(firsts) if self._are_equal(prompts, i, k))
            found.append(next(same, i))
            if found[-1] == i:
                firsts.append(i)
        return found

    def _are_equal(self, prompts: Sequence[Any], i: int, k: int) -> bool:
        a, b = prompts[i], prompts[k]
        if isinstance(a, TokenizedPrompt) or isinstance(b, TokenizedPrompt):
            return a is b  # the reader made one for equal ids, and two may have the same text
        if a != b:
            return False
        if self.environment_factories is None:
            return True
        return bool(self._batch_environments[i] == self._batch_environments[k])

    @contextmanager
    def _only_environments_of(self, rows: Sequence[int]) -> Iterator[None]:
        """TRL renders the tools of each row's environment; inside, those of `rows`."""
        if self.environment_factories is None:
            yield
            return
        before = self._batch_environments
        self._batch_environments = [before[i] for i in rows]
        try:
            yield
        finally:
            self._batch_environments = before

    # ---------------------------------------------------------------- logging

    def _calculate_rewards(
        self, inputs: Any, prompts: list[Any], completions: Any, completion_ids_list: Any
    ) -> Tensor:
        limit = self.args.longstraw_logged_prompt_chars  # type: ignore[attr-defined]
        with brief_warnings(lambda text: shortened(text, None if limit is None else 5 * limit)):
            rewards = super()._calculate_rewards(
                inputs, list(prompts), completions, completion_ids_list
            )
        # From here on TRL gathers this list for its tables and uses it for nothing else (`seams`
        # holds it to that). In place, since it is a local variable of TRL's.
        prompts[:] = [shortened(prompt, limit) for prompt in prompts]
        return rewards


class RowsFetchedOnce(torch.utils.data.Dataset[Row]):
    """A dataset that is asked for the same row several times per batch, and decodes it once.

    Rows are independent copies, as TRL makes them of a stream: environments and reward functions
    may write to them. Texts and `prompt_ids` are shared, since nobody can or does write to these.
    """

    def __init__(self, dataset: datasets.Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        unique = list(dict.fromkeys(indices))
        rows = dict(zip(unique, self.dataset.__getitems__(unique), strict=True))
        copies = []
        for index in indices:
            ids = rows[index].get("prompt_ids")
            copies.append(copy.deepcopy(rows[index], {id(ids): ids}))
        return copies


def compact_rows(rows: list[Row]) -> list[Row]:
    """The batch, with `prompt_ids` as arrays: accelerate walks through every element of a list.

    Raises nothing, since one rank alone would; what is no list of numbers is left to the reader.
    """
    arrays: dict[int, Any] = {}
    for row in rows:
        ids = row.get("prompt_ids")
        if isinstance(ids, list):
            if id(ids) not in arrays:
                try:
                    arrays[id(ids)] = np.asarray(ids), ids  # the list too: its id is the key
                except ValueError:
                    continue
            row["prompt_ids"] = arrays[id(ids)][0]
    return rows


def shortened(prompt: Any, limit: int | None) -> Any:
    """A prompt as logs show it: of each text the first quarter and the last three of `limit`.

    The end is where a long prompt has its question. Different texts stay different: what was left
    out is there as its length and a hash of the whole.

    Args:
        limit: characters of a text or a message's content that are kept; None keeps all.
    """
    if isinstance(prompt, str):
        text = str(prompt)  # without the ids of a `TokenizedPrompt`
        return text if limit is None else _shortened_text(text, limit)
    if isinstance(prompt, list):
        return [shortened(item, limit) for item in prompt]
    if isinstance(prompt, dict):
        return {key: shortened(item, limit) for key, item in prompt.items()}
    return prompt


def _shortened_text(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    head, tail = limit // 4, limit - limit // 4
    left_out = f" [... {len(text) - limit:,} characters left out, sha256 {digest} ...] "
    short = f"{text[:head]}{left_out}{text[-tail:]}"
    return short if len(short) < len(text) else text


def _rows_of(value: Any, order: Sequence[int]) -> Any:
    """Rows of a field that has one per prompt."""
    return value[list(order)] if isinstance(value, Tensor) else [value[k] for k in order]
