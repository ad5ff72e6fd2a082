"""Train any model with GRPO on long prompts: copy this file, or run it as it is.

    accelerate launch examples/train_grpo.py \
        --model_name_or_path Qwen/Qwen3-0.6B --dtype bfloat16 --use_peft \
        --dataset_name my-org/my-dataset --reward_funcs my_package.rewards.exact_match \
        --output_dir out --num_generations 8 --max_completion_length 1024

QLoRA takes `--load_in_4bit --use_bnb_nested_quant --use_peft --lora_target_modules all-linear`
(`pip install bitsandbytes`); arithmetic is in `--dtype`.

`--dataset_name` may be a local file as well (.jsonl, .json, .parquet, .csv). Each row has a
`prompt`; where it contains `{document}`, the text of the row's `document_file` is put there.

`--help` lists all options: those below, TRL's `GRPOConfig` with the added `longstraw_*` ones, and
TRL's `ModelConfig` (LoRA, quantization). `--config run.yaml` reads them from a file.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_integration import LongStrawGRPOConfig, LongStrawGRPOTrainer

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""Loaders of `datasets` by the ending of a file."""


@dataclass
class ScriptArguments:
    """Which data and which rewards."""

    dataset_name: str = field(
        metadata={
            "help": "Hub id, data file (.jsonl, .json, .parquet, .csv), folder of data files, or "
            "folder written by `save_to_disk`."
        }
    )
    reward_funcs: list[str] = field(
        metadata={"help": "Import paths (`my_package.rewards.f`), or names in `trl.rewards`."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration on the Hub."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str | None = field(default=None, metadata={"help": "Split to evaluate on, if any."})
    dataset_streaming: bool = field(
        default=False, metadata={"help": "Read rows as they are needed; `--max_steps` is required."}
    )


def load_split(
    name: str, config: str | None, split: str, streaming: bool = False
) -> Dataset | IterableDataset:
    """Read one split from disk or from the Hub.

    Raises:
        ValueError: a folder written by `save_to_disk` has no such split.
    """
    path = Path(name)
    if path.suffix in FILE_FORMATS:  # one file is one split, which `datasets` calls train
        loader = FILE_FORMATS[path.suffix]
        return load_dataset(loader, data_files=name, split=split, streaming=streaming)
    if not any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        return load_dataset(name, config, split=split, streaming=streaming)
    saved = load_from_disk(name)  # a folder written by `save_to_disk`
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise ValueError(f"{name} has the splits {list(saved)} and none named {split!r}.")
        saved = saved[split]
    return saved.to_iterable_dataset() if streaming else saved


def load_reward(path: str) -> Callable[..., list[float]]:
    """Import a reward function; modules in the current folder are found too.

    Raises:
        ValueError: the path leads to no function; the message names what was tried.
    """
    module_name, _, name = path.rpartition(".")
    module_name = module_name or "trl.rewards"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"reward function {path!r} was not found: tried `from {module_name} import {name}` "
            f"({error}).\n  Give the import path of a function, such as my_package.rewards."
            "exact_match, or a name in trl.rewards, such as think_format_reward."
        ) from error


def main(
    script_args: ScriptArguments, training_args: LongStrawGRPOConfig, model_args: ModelConfig
) -> None:
    """Build the trainer, train, save."""
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    source = (script_args.dataset_name, script_args.dataset_config)
    eval_split = script_args.eval_split
    trainer = LongStrawGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[load_reward(path) for path in script_args.reward_funcs],
        args=training_args,
        train_dataset=load_split(*source, script_args.dataset_split, script_args.dataset_streaming),
        eval_dataset=load_split(*source, eval_split) if eval_split else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, LongStrawGRPOConfig, ModelConfig))
    parser.set_defaults(lora_dropout=0.0)  # TRL's 0.05 is refused: a replay would draw a new mask
    main(*parser.parse_args_and_config())
