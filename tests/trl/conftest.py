"""Fixtures of the tests against TRL."""

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.trl.parity import ModelPath, save_model

# Each `Trainer.train` collects garbage, which here means walking through the objects of all
# imported modules: two thirds of a training's time. They are no garbage.
gc.freeze()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> ModelPath:
    """`model_path(family, **changes)`: a folder with that tiny model, written once."""
    written: dict[str, Path] = {}

    def path(family: str = "llama", **changes: Any) -> Path:
        key = f"{family}-{sorted(changes.items())}"
        if key not in written:
            written[key] = save_model(family, tmp_path_factory.mktemp(family), **changes)
        return written[key]

    return path
