"""The options of an example's `run.sh`, read and checked as the run itself does."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from peft import LoraConfig
from trl import ModelConfig, TrlParser, get_peft_config

from longstraw import ConfigError, EngineConfig
from trl_integration import LongStrawGRPOConfig
from trl_integration.checks import check_config
from trl_integration.deepspeed_checks import check_deepspeed_config

ROOT = Path(__file__).parents[2]
PLACEHOLDERS = ["--dataset_name", "-", "--reward_funcs", "-", "--output_dir", "out"]


@dataclass(frozen=True)
class Run:
    """What is to be run.

    Attributes:
        args: the trainer's options; those of one process, see `read_run`.
        engine: what they say to the engine, for `engine.sp_size` ranks.
        lora: the adapters.
        world_size: processes.
        deepspeed: its config, "auto" values as they are.
    """

    args: LongStrawGRPOConfig
    engine: EngineConfig
    lora: LoraConfig
    world_size: int
    deepspeed: dict[str, Any]

    @property
    def zero_stage(self) -> int:
        return self.deepspeed["zero_optimization"]["stage"]


def launch_words(folder: Path) -> tuple[list[str], list[str]]:
    """The words of `folder`'s `run.sh`: the launcher's, and the run's own options."""
    text = (folder / "run.sh").read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("accelerate launch ")]
    words = shlex.split(line)[:-1]  # the last stands for the user's
    script = words.index("--module") + 2
    return words[2:script], words[script:]


def read_run(
    folder: Path, parser: TrlParser, options: Sequence[str], needs: Sequence[str] = ()
) -> tuple[Run, ModelConfig]:
    """Parse and check the options of `run.sh` and those given behind them.

    The trainer's config counts the processes it runs in, and here is one: it is made as for a rank
    by itself, and what concerns several is checked for those of the run.

    Args:
        needs: the launcher's options beside `--config_file`, `--num_processes` and `--module`.

    Raises:
        ConfigError: an option, or the launch, cannot be honoured.
        SystemExit, ValueError: an option is unknown.
    """
    launcher, own = launch_words(folder)
    launched = argparse.ArgumentParser()
    launched.add_argument("--config_file", type=Path, required=True)
    launched.add_argument("--num_processes", type=int, required=True)
    launched.add_argument("--module", required=True)
    for name in needs:
        launched.add_argument(name, required=True)
    launch = launched.parse_args(launcher)
    words = [*PLACEHOLDERS, *own, *options]
    sp_size = parser.parse_known_args(words)[0].longstraw_sp_size
    alone = ["--longstraw_sp_size", "1", "--use_cpu", "true"]
    _, args, model_args = parser.parse_args_and_config([*words, *alone])
    engine = replace(args.to_engine_config(), sp_size=sp_size)
    args.longstraw_sp_size = sp_size
    check_config(args)
    config = yaml.safe_load((ROOT / launch.config_file).read_text())["deepspeed_config"]
    deepspeed = yaml.safe_load((ROOT / config["deepspeed_config_file"]).read_text())
    check_deepspeed_config(deepspeed, args)
    lora = get_peft_config(model_args)
    if lora is None:
        raise ConfigError("the table is that of adapters: --use_peft.")
    return Run(args, engine, lora, launch.num_processes, deepspeed), model_args


def check_groups(run: Run) -> None:
    """Raise `ConfigError` if the processes do not make up whole groups that share a prompt."""
    sp_size = run.engine.sp_size
    if run.world_size % sp_size:
        raise ConfigError(
            f"longstraw_sp_size={sp_size} with --num_processes {run.world_size}: the number "
            "of processes is a multiple of the ranks that share a prompt."
        )
