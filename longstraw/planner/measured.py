"""A planned update, run: what its tensors really take on each rank.

`python -m longstraw.planner.measured FOLDER` is one rank; `measure` starts them. The model is made
from its config with random weights, on the CPU, and trained under DeepSpeed as by the trainer.
"""

import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..audit.memory import PeakTensorBytes
from ..backends.deepspeed import DeepSpeedBackend, prepare_deepspeed
from ..engine import Engine
from ..members import GroupScores
from ..ranks import run_ranks
from ..segments import PromptGroup
from .deepspeed_config import deepspeed_config
from .options import PlanOptions

NUM_STEPS = 2
"""The first makes the optimizer's moments; the second has all that a step ever has."""


def measure(config: Mapping[str, Any], options: PlanOptions) -> list[int]:
    """Most bytes of tensors in an optimizer step, by rank.

    Args:
        config: the model's, as in its `config.json`.

    Raises:
        RanksAbortedError: a rank failed; with the end of what it wrote.
    """
    return run_ranks(__name__, (dict(config), options), options.ranks)


def run_rank(config: dict[str, Any], options: PlanOptions) -> int:
    """One rank's part: the highest count in the last of `NUM_STEPS` steps."""
    counter = PeakTensorBytes(with_meta=False)
    gc.collect()
    gc.disable()  # what lies in a cycle stays, each time alike
    try:
        with counter:
            model = make_model(config, options)
            step = make_step(model, options)
            for _ in range(NUM_STEPS):
                counter.peak_bytes = counter.live_bytes
                step()
    finally:
        gc.enable()
    return counter.peak_bytes


def make_model(config: dict[str, Any], options: PlanOptions) -> nn.Module:
    """With random weights, as the trainer makes it: checkpointed, with adapters if asked."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.itemsize == 2 else torch.float32
    made = AutoConfig.for_model(**config)
    model: Any = AutoModelForCausalLM.from_config(made, dtype=dtype)
    base = model
    if options.lora_rank:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=options.lora_rank, target_modules="all-linear")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
        model.enable_input_require_grads()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def make_step(model: Any, options: PlanOptions) -> Any:
    """One update and optimizer step of a random group, as a function."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as its launcher says it
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(options, batch_size=1))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    prepared, _ = accelerator.prepare(model, optimizer)
    backend = DeepSpeedBackend(prepared)
    engine = Engine(prepared.module, options.engine, backend=backend)
    generator = torch.Generator().manual_seed(dist.get_rank() // options.engine.sp_size)
    vocab = engine.decoder.config.vocab_size

    def tokens(length: int) -> Tensor:
        return torch.randint(2, vocab, (length,), generator=generator)

    prompt = tokens(options.prompt_tokens)
    responses = [tokens(options.response_tokens) for _ in range(options.group_size)]
    advantages = torch.linspace(-1, 1, options.group_size)[:, None]

    def loss_of(scores: list[GroupScores]) -> Tensor:
        return -(scores[0].logps * advantages).mean()

    def step() -> None:
        engine.accumulate([PromptGroup(prompt, responses)], loss_of)
        engine.finalize()
        backend.step()
        engine.weights_changed()

    return step


if __name__ == "__main__":
    from ..ranks import be_rank

    prepare_deepspeed(on_cpu=True)
    be_rank(Path(sys.argv[1]), run_rank)
