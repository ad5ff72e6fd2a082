"""What each rank of `test_data_parallel` runs: `python -m tests.trl.data_parallel MODEL FOLDER`.

Trains every setting with stock TRL and with LongStraw, in one process group, and writes what this
rank ended with to `FOLDER/NAME-TRAINER-RANK.pt`.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from tests.trl.parity import (
    ADAMW,
    TWO_LAYERS,
    Setting,
    fixed_rollout,
    modular_reward,
    prompts_dataset,
    train,
)

TRAINERS = ("stock", "longstraw")


def reward_of_one_rank(
    completion_ids: list[list[int]], trainer_state: Any, **kwargs: Any
) -> list[float | None]:
    """In each step one rank's group gets one reward for all, and so no advantage."""
    rank = torch.distributed.get_rank()
    if trainer_state.global_step % 2 == rank:
        return [0.5] * len(completion_ids)
    return modular_reward(completion_ids)


_UNEQUAL = Setting(
    rewards=(reward_of_one_rank,),
    longstraw={"longstraw_replay_batch": 1},  # replays are counted
)
SETTINGS = {
    "sgd": _UNEQUAL,
    # Accumulation over half groups, the normalizer gathered over ranks, and a reference model.
    "adamw, accumulation 2, beta": _UNEQUAL.but(
        **ADAMW, per_device_train_batch_size=2, gradient_accumulation_steps=2, beta=0.2
    ),
    # The quantile is taken over the entropies of all ranks. See `later_tokens_only`.
    "top_entropy_quantile, evaluation": replace(
        _UNEQUAL,
        rollout=lambda: fixed_rollout(lambda _, n: [0] + [1] * (n - 1), shortest=2),
        trainer=lambda: {"eval_dataset": prompts_dataset((4, 19), seed=9)},
    ).but(
        top_entropy_quantile=0.5, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4
    ),
    # Responses decoded from captured state, of a model that is wrapped for data parallelism.
    "greedy, LoRA, entropy bonus": replace(
        _UNEQUAL,
        rollout=None,
        trainer=lambda: {
            "peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        },
    ).but(generation_kwargs={"do_sample": False}, entropy_coef=0.5),
}
VARIANT = TWO_LAYERS


def main(model_path: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    for number, setting in enumerate(SETTINGS.values()):
        for trainer in TRAINERS:
            is_ours = trainer == "longstraw"
            outcome = train(setting, model_path, folder / "out", longstraw=is_ours)
            record: dict[str, Any] = {
                "before": outcome.before,
                "after": outcome.after,
                "logs": outcome.logs,
                "advantages": outcome.advantages,
            }
            if is_ours:
                table = outcome.trainer.engine.ledger.table()
                record["calls"] = {row["phase"]: row["calls"] for row in table}
                record["captures"] = outcome.trainer.engine.ledger.num_captures
            rank = torch.distributed.get_rank()
            torch.save(record, folder / f"{number}-{trainer}-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
