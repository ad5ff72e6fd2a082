"""The launch configurations are read, agree with the trainer and with each other, and start.

One of them is launched as a user launches it, with two processes on this machine's CPUs.
"""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from tests.trl.parity import TWO_LAYERS, prompts_dataset, save_model, word_tokenizer
from tests.trl.ranks import free_port, patience
from tests.trl.test_deepspeed_checks import arguments
from trl_integration.deepspeed_checks import check_deepspeed_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ds_configs"
YAMLS = sorted(FOLDER.rglob("*.yaml"))
JSONS = sorted(FOLDER.rglob("*.json"))


def relative(file: Path) -> str:
    return str(file.relative_to(FOLDER))


def read_json(file: Path) -> dict[str, Any]:
    """The config; a key that stands twice is an error here, as it is in DeepSpeed."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        assert len(set(keys)) == len(keys), f"{file.name}: a key stands twice among {keys}"
        return dict(pairs)

    return json.loads(file.read_text(), object_pairs_hook=unique)


@pytest.mark.parametrize("file", YAMLS, ids=relative)
def test_accelerate_reads_it(file: Path) -> None:
    """accelerate raises on unknown keys, so a typo fails here and not at a launch."""
    config = load_config_from_file(str(file))
    assert config.num_machines == 1
    if config.distributed_type == DistributedType.DEEPSPEED:
        # Relative to where the launcher is started, which is the repository.
        named = ROOT / config.deepspeed_config["deepspeed_config_file"]
        assert named in JSONS and named.stem == file.stem.removeprefix("sequence_parallel_")
    if file.stem.startswith("sequence_parallel"):
        assert config.parallelism_config == {"parallelism_config_sp_size": config.num_processes}


@pytest.mark.parametrize("file", JSONS, ids=relative)
def test_the_trainer_takes_it_without_a_word(file: Path) -> None:
    """With any batch, accumulation, clipping and learning rate: those are the trainer's."""
    config = read_json(file)
    args = arguments(per_device_train_batch_size=3, gradient_accumulation_steps=5)
    args.max_grad_norm, args.bf16 = 0.3, False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_deepspeed_config(config, args)
    stage = config["zero_optimization"]["stage"]
    assert file.stem.startswith(f"zero{stage}")
    assert ("offload_optimizer" in config["zero_optimization"]) == file.stem.endswith("_offload")


def test_each_json_is_launched_by_a_yaml_of_its_name() -> None:
    without = {"single_process", "data_parallel", "sequence_parallel", "sequence_parallel_zero3"}
    launched = {file.stem for file in YAMLS} - without
    assert launched == {file.stem for file in JSONS}


def test_the_readmes_name_every_file_and_no_other() -> None:
    """Paths in the folder's README are relative to it, those in the main one to the repository."""
    text = (FOLDER / "README.md").read_text()
    named = set(re.findall(r"`((?:accelerate/)?\w+\.(?:json|yaml))`", text))
    assert named == {relative(file) for file in [*YAMLS, *JSONS]}
    main = (ROOT / "README.md").read_text()
    for path in re.findall(r"ds_configs/[\w/]+\.(?:json|yaml)", text + main):
        assert (ROOT / path).is_file(), path


def launch(folder: Path, configuration: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Two steps of `examples/train_grpo.py` as a user starts them, on two processes of the CPU."""
    save_model("llama", folder / "model", **TWO_LAYERS)
    word_tokenizer().save_pretrained(folder / "model")
    prompts_dataset().save_to_disk(folder / "data")
    (folder / "launched_rewards.py").write_text(
        "def distinct(completion_ids, **_):\n"
        "    return [float(len(set(ids))) for ids in completion_ids]\n"
    )
    (folder / "extensions").mkdir()
    options = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data",
        "reward_funcs": "launched_rewards.distinct",
        "output_dir": folder / "out",
        "num_generations": 4,
        "max_completion_length": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        **options,
    }
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
        + ["--main_process_port", str(free_port())]
        + ["--config_file", f"ds_configs/accelerate/{configuration}", "examples/train_grpo.py"]
        + [str(word) for name, value in options.items() for word in (f"--{name}", value)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
            "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def test_accelerate_launch_trains_on_two_cpu_processes(tmp_path: Path) -> None:
    """The configuration for GPUs, on CPU: one group of two, one step per update, no compiler.

    An update is two micro-batches. DeepSpeed names its checkpoint after the steps that it made, and
    every rank of its group writes one partition of the optimizer. A C++ extension, if one were
    built, would take a minute and would be left in TORCH_EXTENSIONS_DIR.
    """
    done = launch(tmp_path, "zero2.yaml")
    assert done.stdout.count("DeepSpeed ZeRO-2: gradients of") == 1, "one process is the main one"
    assert done.stdout.count("'grad_norm'") == 2
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert (checkpoint / "latest").read_text() == "global_step2"
    partitions = [file.name for file in (checkpoint / "global_step2").glob("*_optim_states.pt")]
    assert sorted(partitions) == [
        f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)
    ]
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert list((tmp_path / "extensions").iterdir()) == []


def test_accelerate_launch_lets_two_cpu_processes_share_prompts(tmp_path: Path) -> None:
    """The section `parallelism_config` alone does it: the script's options are those of one
    process. Of 8 prompts one epoch has 8 steps of 4 rows; two processes with prompts of their own
    would halve it.
    """
    done = launch(tmp_path, "sequence_parallel_zero3.yaml")
    assert done.stdout.count("'grad_norm'") == 2
    assert "'epoch': '0.25'" in done.stdout
    state = torch.load(tmp_path / "out" / "checkpoint-2" / "longstraw_state_1.pt")
    assert state["geometry"]["longstraw_sp_size"] == state["world_size"] == 2
