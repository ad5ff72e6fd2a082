"""What each of two ranks runs for `test_prompt_data_logs`: `python -m tests.trl.prompt_program`.

Arguments: the model and a folder, to which each rank writes what it found (`RANK.pt`).
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from trl.trainer import grpo_trainer

from tests.trl.chat import chat_tokenizer
from tests.trl.parity import Setting, train
from tests.trl.prompt_rows import prompts_seen
from tests.trl.test_prompt_data_logs import LOGGED

TEMPLATE = """{%- for message in messages %}{%- if message.role != "user" %}
{{- raise_exception("no such role") }}{%- endif %}{{- message.content }}{%- endfor %}"""


def gathered(model_path: Path, out: Path) -> dict[str, Any]:
    """Bytes of all objects that this rank gives to the others in one step, and what it logs."""
    sizes: list[int] = []
    gather_object = grpo_trainer.gather_object

    def counted(value: Any) -> Any:
        sizes.append(len(pickle.dumps(value)))
        return gather_object(value)

    seen: list[list[str]] = []
    setting = replace(LOGGED, rewards=(prompts_seen(seen),))
    with mock.patch.object(grpo_trainer, "gather_object", counted):
        outcome = train(setting, model_path, out, longstraw=True)
    return {
        "gathered_bytes": sum(sizes),
        "longest_rewarded": max(len(prompt) for prompt in seen[0]),
        "logged": list(outcome.trainer._logs["prompt"]),
    }


def template_tokenizer() -> Any:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def error_of(rows: list[dict[str, Any]], model_path: Path, out: Path, **options: Any) -> str:
    """The error of a run on a stream whose second row, which is rank 1's, is bad."""
    stream = Dataset.from_list(rows).to_iterable_dataset()
    setting = Setting(rollout=None, dataset=lambda: stream, **options)
    setting = setting.but(shuffle_dataset=False, max_steps=1)
    try:
        train(setting, model_path, out, longstraw=True)
    except Exception as error:  # ours, or jinja's
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(model_path: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    (folder / "good.txt").write_text("w5 w6")
    files = [{"prompt": "{document}", "document_file": str(folder / "good.txt")}]
    files += [{"prompt": "{document}", "document_file": "nowhere.txt"}]
    chats = [{"prompt": [{"role": role, "content": "a"}]} for role in ("user", "poet")]
    out = folder / "out"
    found = gathered(model_path, out)
    found["file"] = error_of(files, model_path, out)
    found["ids"] = error_of([{"prompt_ids": [5]}, {"prompt_ids": [97]}], model_path, out)
    found["template"] = error_of(chats, model_path, out, tokenizer=template_tokenizer)
    torch.save(found, folder / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
