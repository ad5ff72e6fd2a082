"""What cannot be right under ZeRO-3 is refused before it hangs."""

import json
from pathlib import Path

import pytest

from tests.trl.parity import ModelPath
from tests.trl.ranks import run_ranks


@pytest.fixture(scope="module")
def errors(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each case's error; all in one process."""
    folder: Path = tmp_path_factory.mktemp("refusals")
    module = ["-m", "tests.distributed.refusal_program"]
    arguments = [*module, str(model_path(num_hidden_layers=2)), str(folder / "out")]
    (log,) = run_ranks(arguments, 1, folder / "logs", timeout=120)
    (line,) = [line for line in log.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_an_evaluation_before_training_is_refused(errors: dict[str, str]) -> None:
    """Trainer would make an engine of its own for it, of which LongStraw knows nothing."""
    assert errors["evaluate"].startswith("ConfigError: evaluate() was called before train()")
    assert "eval_on_start=True" in errors["evaluate"]


def test_tools_without_vllm_are_refused(errors: dict[str, str]) -> None:
    """Whole weights are brought together for each turn, and ranks have different numbers."""
    assert errors["tools"].startswith("ConfigError: tools or environment_factory under ZeRO-3")


def test_a_head_of_several_modules_is_refused(errors: dict[str, str]) -> None:
    """ZeRO-3 would bring its weights together once per slice of rows."""
    assert errors["head"].startswith("ConfigError: the head is a Linear of several modules")
