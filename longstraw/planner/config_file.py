"""Finds a model's `config.json`: a file, a folder, or a name on the Hugging Face hub."""

import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError

CONFIG_NAME = "config.json"


def read_config(model: str) -> dict[str, Any]:
    """The config of `model`, as a dict.

    Args:
        model: path of a config.json or of the folder that holds it, or a hub id.

    Raises:
        ConfigError: nothing is found there, or it is no JSON object.
    """
    path = Path(model)
    if path.is_dir():
        path = path / CONFIG_NAME
    if not path.is_file():
        path = _from_hub(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}). Give a model's {CONFIG_NAME}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object. Give a model's {CONFIG_NAME}.")
    return config


def _from_hub(model: str) -> Path:
    """The config of a hub id: what is in the cache, else downloaded."""
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".json"):
        raise ConfigError(
            f"--model {model}: no such file or folder. Give a folder with a {CONFIG_NAME}, that "
            "file, or a hub id such as Qwen/Qwen3-8B."
        )
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(model, CONFIG_NAME)
        return Path(cached if isinstance(cached, str) else hf_hub_download(model, CONFIG_NAME))
    except Exception as error:  # of many kinds: no network, no such name, no permission
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ConfigError(
            f"--model {model}: no such file or folder, and the hub gave no {CONFIG_NAME} "
            f"({type(error).__name__}: {reason}). Download the file and give its path."
        ) from None
