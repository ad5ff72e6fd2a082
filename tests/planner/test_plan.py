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
    """On 8 ranks of 141 GiB; the longest prompt is the last that does."""
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


def test_a_stage_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="stages 0, 1, 2 and 3"):
        PlanOptions(100, zero_stage=4)


def test_the_stage_is_the_lowest_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Of full fine-tuning on 8 ranks, as there is less and less room; a stage that is asked for
    stays, and one rank has nothing to divide."""
    words = ["--model", QWEN, "--prompt-tokens", "8Ki", "--response-tokens", "1Ki"]
    found = [
        plan(capsys, *words, "--ranks", "8", "--device-gib", room)[1]["zero_stage"]
        for room in ("300", "160", "110")
    ]
    assert found == [1, 2, 3]
    assert plan(capsys, *words, "--ranks", "8", "--zero", "2")[1]["zero_stage"] == 2
    assert plan(capsys, *words)[1]["zero_stage"] == 0


def test_the_written_config_is_one_that_the_trainer_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the keys of `ds_configs`, whose files the trainer's tests launch."""
    path = tmp_path / "zero.json"
    words = ["--model", QWEN, "--prompt-tokens", "64Ki", "--ranks", "8", "--write", str(path)]
    for stage in (0, 1, 2, 3):
        plan(capsys, *words, "--zero", str(stage))
        theirs = EXAMPLES.parent / "ds_configs" / f"zero{stage}.json"
        assert json.loads(path.read_text()) == json.loads(theirs.read_text())
    assert main(["plan", *words[:-1], str(tmp_path / "no" / "file")]) == 2
    assert "--write" in capsys.readouterr().err


def test_pages_in_host_memory_take_the_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """Which has to have room for those of all ranks."""
    words = ["--model", QWEN, "--sp", "8", *QLORA, *CHUNKS, "--prompt-tokens", "2Mi"]
    words += ["--page-device", "host", "--device-gib", "80"]
    status, found = plan(capsys, *words)
    assert status == 0 and found["host_bytes"] > 8 * 48 * GIB
    assert found["device_bytes"] < plan(capsys, *words[:-4])[1]["device_bytes"] - 40 * GIB
    assert plan(capsys, *words, "--host-gib", "300")[0] == 1


def test_seconds_are_products_over_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the rates, half the time; attention takes four times as long for twice the prompt."""
    words = ["--model", QWEN, *QLORA, "--prompt-tokens"]
    times = {
        name: {time["name"]: time["seconds"] for time in plan(capsys, *words, *more)[1]["times"]}
        for name, more in {
            "once": ["1Mi"],
            "faster": ["1Mi", "--tflops", "700", "--bandwidth", "5"],
            "longer": ["2Mi"],
        }.items()
    }
    assert set(times["once"]) == {"decoding", "capture", "score", "replay", "prompt backward"}
    for name, seconds in times["once"].items():
        assert times["faster"][name] == pytest.approx(seconds / 2)
    assert 3 < times["longer"]["capture"] / times["once"]["capture"] < 4


def test_a_small_update_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """With layers of both kinds of the model, narrower, on this machine."""
    words = ["--model", QWEN, *QLORA, "--prompt-tokens", "2Ki", "--measure"]
    status, found = plan(capsys, *words)
    measured = found["measured"]
    assert status == 0 and measured["measured_bytes"] > 10_000_000
    assert abs(measured["error"]) <= 0.05


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
