"""A launch configuration in a file: DeepSpeed's JSON, accelerate's YAML; before a launch.

Judged beside the trainer's defaults: a script's own options are not known here.
"""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType

from longstraw import ConfigError

from .config import LongStrawGRPOConfig
from .deepspeed_checks import check_deepspeed_config

_TRAINERS = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
"""Numbers of the script's options, for which a DeepSpeed config has "auto"."""


def check_launch_file(file: str) -> str:
    """What a launch with the file would be, in words.

    Args:
        file: ends in .json (DeepSpeed's config) or .yaml, .yml (accelerate's). Paths in a YAML are
            relative to the working directory, as accelerate takes them; those of a folder
            ds_configs to the folder around it.

    Raises:
        ConfigError: it cannot be read, or the trainer would refuse it. What to change follows the
            first sentence.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{file} is not a file. Give the path of a JSON or YAML file.")
    if path.suffix == ".json":
        return _check_json(path)
    if path.suffix in (".yaml", ".yml"):
        return _check_yaml(path)
    raise ConfigError(
        f"{file} ends in {path.suffix or 'nothing'}. DeepSpeed's config is a .json, accelerate's "
        "a .yaml: rename it."
    )


def default_args() -> Any:
    """The trainer's settings that nobody changed. No processes are connected for them."""
    values = {}
    for item in fields(LongStrawGRPOConfig):
        if item.default is not MISSING:
            values[item.name] = item.default
        elif item.default_factory is not MISSING:
            values[item.name] = item.default_factory()
    if values.get("bf16") is None:
        values["bf16"] = True  # TRL's default, once its config is made
    return SimpleNamespace(**values)


def _check_json(path: Path) -> str:
    config = _read_json(path)
    for key in _TRAINERS:
        value = config.get(key, "auto")
        if value != "auto":
            raise ConfigError(
                f'"{key}" is {json.dumps(value)}, and the script\'s own option decides: the '
                f'trainer refuses a launch in which they differ. Write "{key}": "auto".'
            )
    check_deepspeed_config(config, default_args())
    return f"ZeRO-{config['zero_optimization']['stage']}"


def _read_json(path: Path) -> dict[str, Any]:
    """The config; a key that stands twice is an error, as it is in DeepSpeed."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ConfigError(f'"{twice}" stands twice. Remove one of the two.')
        return dict(pairs)

    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}. Mend that "
            "place: JSON has no comments, no trailing commas, and names in double quotes."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"it is not UTF-8 ({error.reason}). Save it as UTF-8.") from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"it holds a {type(config).__name__}, not an object. Start from ds_configs/zero2.json."
        )
    return config


def _check_yaml(path: Path) -> str:
    config = _read_yaml(path)
    kind = config.distributed_type
    if kind == DistributedType.FSDP:
        raise ConfigError(
            "distributed_type is FSDP, whose sharded parameters are not served. Use DeepSpeed "
            "ZeRO-3, which shards them too: ds_configs/accelerate/zero3.yaml."
        )
    if config.mixed_precision == "fp16":
        raise ConfigError(
            "mixed_precision is fp16: its loss scale is for one backward, and an update has many. "
            'Write mixed_precision: "no"; the script\'s option --bf16 decides.'
        )
    if kind != DistributedType.DEEPSPEED:
        return f"{config.num_processes} process(es), {str(kind.value).lower()}"
    named = (config.deepspeed_config or {}).get("deepspeed_config_file")
    if named is None:
        return _check_inline(config)
    file = _launch_folder(path) / named
    if not file.is_file():
        raise ConfigError(
            f"deepspeed_config_file names {named}, and there is no file {file.resolve()}. Start "
            "the launcher where the path leads to it, or write an absolute path."
        )
    try:
        return f"{config.num_processes} process(es), {_check_json(file)} by {named}"
    except ConfigError as error:
        raise ConfigError(f"it names {named}, of which: {error}") from None


def _check_inline(config: ClusterConfig) -> str:
    """DeepSpeed's settings as keys of the YAML, of which accelerate makes a config."""
    section = config.deepspeed_config or {}
    for key in _TRAINERS:
        if section.get(key, "auto") != "auto":
            raise ConfigError(
                f"{key} of deepspeed_config is {section[key]}, and the script's own option "
                f"decides: the trainer refuses a launch in which they differ. Write {key}: auto."
            )
    warnings.warn(
        "deepspeed_config names no deepspeed_config_file, and what accelerate makes of its other "
        "keys sends and adds up gradients in bf16. Write deepspeed_config_file: "
        "ds_configs/zero2.json, or a file of your own, and leave the other keys out.",
        stacklevel=2,
    )
    return f"{config.num_processes} process(es), ZeRO-{section.get('zero_stage', 2)}"


def _launch_folder(path: Path) -> Path:
    """What paths in the YAML are relative to."""
    folders = [folder.name for folder in path.resolve().parents]
    if "ds_configs" not in folders:
        return Path(os.curdir)
    return path.resolve().parents[folders.index("ds_configs") + 1]


def _read_yaml(path: Path) -> ClusterConfig:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"it is not YAML: {' '.join(str(error).split())}. Mend it.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"it is not UTF-8 ({error.reason}). Save it as UTF-8.") from None
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"it holds a {type(content).__name__}, not a mapping. Start from "
            "ds_configs/accelerate/zero2.yaml, or let `accelerate config` write one."
        )
    try:
        config = load_config_from_file(str(path))
    except (TypeError, ValueError) as error:
        unknown = sorted(content.keys() - ClusterConfig.__dataclass_fields__.keys())
        if unknown:
            raise ConfigError(
                f"accelerate knows no key {', '.join(map(repr, unknown))}. Remove it, or write it "
                "as `accelerate config` does."
            ) from None
        raise ConfigError(
            f"accelerate cannot read it: {error}. Start from ds_configs/accelerate/zero2.yaml."
        ) from None
    if not isinstance(config, ClusterConfig):
        raise ConfigError(
            "compute_environment is Amazon SageMaker's, with which LongStraw has not been run. "
            "Write compute_environment: LOCAL_MACHINE."
        )
    return config
