"""What the process of `test_refusals` runs:
`python -m tests.distributed.refusal_program MODEL OUT`.

Under ZeRO-3 on one process: each case is expected to raise, and its error is reported.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from longstraw import DeepSpeedBackend, Engine, EngineConfig
from tests.distributed.fault_program import deepspeed_config
from tests.trl.chat import add, chat_dataset, chat_tokenizer
from tests.trl.parity import Setting, make_model, make_trainer, prompts_dataset


def main(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    setting = Setting(rollout=None).but(deepspeed=deepspeed_config(3))

    def evaluate() -> None:
        trainer = make_trainer(setting, model, out, longstraw=True)
        trainer.evaluate(prompts_dataset((4,)))

    def tools() -> None:
        with_tools = Setting(
            rollout=None,
            trainer=lambda: {"tools": [add]},
            dataset=chat_dataset,
            tokenizer=chat_tokenizer,
        ).but(deepspeed=deepspeed_config(3))
        make_trainer(with_tools, model, out, longstraw=True)

    cases: dict[str, Callable[[], None]] = {
        "evaluate": evaluate,
        "tools": tools,
        "head": adapted_head,
    }
    errors = {}
    for name, case in cases.items():
        try:
            case()
            errors[name] = "none"
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    print("RESULT " + json.dumps(errors), flush=True)  # noqa: T201  (read by the test)


def adapted_head() -> None:
    """An engine whose head is a LoRA layer; TRL refuses that itself."""
    deepspeed = importlib.import_module("deepspeed")
    adapter = LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    model = get_peft_model(make_model("llama", num_hidden_layers=1), adapter)
    options = deepspeed_config(3) | {"train_micro_batch_size_per_gpu": 1}
    options |= {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    options |= {"bf16": {"enabled": False}, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=options)[0]
    Engine(engine.module, EngineConfig(), backend=DeepSpeedBackend(engine))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
