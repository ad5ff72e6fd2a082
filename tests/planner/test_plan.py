"""`longstraw plan`: the numbers of the examples from their configs alone, and its exit status."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longstraw.cli import main
from longstraw.config import EngineConfig
from longstraw.planner.config_file import read_config
from longstraw.planner.model_shape import ModelShape
from longstraw.planner.options import PlanOptions
from longstraw.planner.parameters import adapter_numel
from longstraw.planner.sizes import GIB, parse_count
from longstraw.planner.terms import state_terms, token_bytes

EXAMPLES = Path(__file__).parents[2] / "examples"
QWEN, GLM = str(EXAMPLES / "qwen36_27b"), str(EXAMPLES / "glm52" / "config.json")
QLORA = ["--lora-rank", "16", "--nf4"]
CHUNKS = ["--chunk-size", "32Ki", "--page-size", "1Ki"]


def shape_of(model: str) -> ModelShape:
    return ModelShape.from_config(read_config(model))


def state_of(model: str, num_tokens: int, sp_size: int) -> int:
    """Bytes of keys and values, or latents, on a rank."""
    engine = EngineConfig(sp_size=sp_size, chunk_size=32768)
    options = PlanOptions(num_tokens, ranks=sp_size, engine=engine)
    return state_terms(shape_of(model), options, num_tokens)[0].num_bytes


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Exit status and output of `longstraw plan .. --json`."""
    status = main(["plan", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_papers_numbers_of_a_hybrid() -> None:
    """Qwen3.6-27B: 16 attention layers of 4 key heads of 256; 496 projections at rank 16."""
    shape = shape_of(QWEN)
    assert token_bytes(shape, 2) == 65_536
    assert adapter_numel(shape, 16) == 116_727_808
    assert state_of(QWEN, 2_097_152, 8) == 16 * GIB
    assert state_of(QWEN, 4_456_448, 8) == 34 * GIB


def test_the_papers_numbers_of_latent_attention() -> None:
    """GLM-5.2: 78 layers of 512 + 64, and index keys of 128 in 21 of them."""
    assert token_bytes(shape_of(GLM), 2) == 95_232
    assert state_of(GLM, 2_097_152, 32) == 5.8125 * GIB
    assert state_of(GLM, 2_097_152, 1) == 186 * GIB


def test_planning_imports_no_torch() -> None:
    """In a process of its own, as a user's: neither torch nor transformers, and no network."""
    words = ["plan", "--model", QWEN, "--prompt-tokens", "2Mi", "--sp", "8", *QLORA, *CHUNKS]
    program = (
        f"import sys; from longstraw.cli import main; status = main({words!r}); "
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules), file=sys.stderr); "
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip() == "set()"
    assert "116,727,808 x 12 B" in done.stdout and "65,536 B x 2,097,152 tokens / 8" in done.stdout


def test_what_fits_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    """80 GiB hold the state and its cotangents of 2Mi tokens on 8 ranks, and not of twice that."""
    words = ["--model", QWEN, "--sp", "8", *QLORA, *CHUNKS, "--device-gib"]
    status, found = plan(capsys, *words, "141", "--prompt-tokens", "2Mi")
    assert status == 0 and found["fits"]
    assert found["limit"] == "cotangents"
    longest = found["longest_prompt"]
    assert plan(capsys, *words, "141", "--prompt-tokens", str(longest))[0] == 0
    status, found = plan(capsys, *words, "141", "--prompt-tokens", str(longest + 1))
    assert status == 1 and not found["fits"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--sp", "3"], "Set it to one of 1, 2, 4, 8, 16."),
        (["--sp", "8", "--ranks", "12"], "Take --ranks 16"),
        (["--zero", "4"], "stages 0, 1, 2 and 3"),
        (["--nf4"], "--lora-rank 16"),
        (["--ep", "2", "--ranks", "2"], "0 routed experts"),
        (["--model", "no/such/folder"], "no such file or folder"),
        (["--device-gib", "-1"], "a positive number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_says_what_to_change(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", QWEN, "--prompt-tokens", "2Mi", *words]) == 2
    assert reason in capsys.readouterr().err


def test_an_unknown_family_names_the_known_ones(tmp_path: Path) -> None:
    """And the nearest one; a size that is missing is named as well."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen33"}))
    with pytest.raises(NotImplementedError, match="Did you mean 'qwen3'"):
        shape_of(str(path))
    path.write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ValueError, match="num_hidden_layers=None"):
        shape_of(str(tmp_path))
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        shape_of(str(path))


def test_a_hub_id_without_network_says_what_to_do() -> None:
    """The hub is offline in tests; the error names the exception and the way out."""
    with pytest.raises(ValueError, match=r"the hub gave no config.json .*Download the file"):
        read_config("nobody/no-such-model")


@pytest.mark.parametrize(
    ("text", "value"), [("2Mi", 2**21), ("8Ki", 8192), ("1.5k", 1500), ("100,000", 100_000)]
)
def test_sizes_are_written_as_people_do(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["2Mb", "many", "0", "1.5", "-3"])
def test_other_sizes_are_refused_with_an_example(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as found:
        main(["plan", "--model", QWEN, f"--prompt-tokens={text}"])
    assert found.value.code == 2
    assert "needed" in capsys.readouterr().err
