"""What one update takes in memory, beside what ordinary full sequences take for the same rows.

Counted in bytes of tensors, which no allocator rounds or keeps; the weights are not counted.
"""

from dataclasses import dataclass

import torch

from longstraw import PromptGroup
from longstraw.audit import PeakTensorBytes
from trl_integration import LongStrawGRPOTrainer


@dataclass(frozen=True)
class Memory:
    """Peak bytes of tensors beside the weights, for one micro-batch.

    Attributes:
        weights: of the model, adapter included; the same for all.
        longstraw: one group: captured prompt, replays, the prompt's own backward.
        full_checkpointed: full sequences with gradient checkpointing, TRL's default.
        full: full sequences without.
        num_rows, num_tokens: responses of the group, and tokens of one full sequence.
    """

    weights: int
    longstraw: int
    full_checkpointed: int
    full: int
    num_rows: int
    num_tokens: int


def measure_memory(trainer: LongStrawGRPOTrainer, prompt_ids: list[int], num_tokens: int) -> Memory:
    """Run one update either way, on a real prompt and random responses, and forget its gradients.

    Full sequences are run for one response: activations grow with the rows, so the group takes
    `num_rows` times as much. (Running all rows would need that memory.)

    Args:
        prompt_ids: tokens of the prompt.
        num_tokens: of each response.
    """
    device = trainer.accelerator.device
    prompt = torch.tensor(prompt_ids, device=device)
    num_rows = trainer.args.per_device_train_batch_size
    responses = torch.randint(5, 1000, (num_rows, num_tokens), device=device)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    memory = Memory(
        weights=sum(p.untyped_storage().nbytes() for p in trainer.model.parameters()),
        longstraw=longstraw_bytes(trainer, PromptGroup(prompt, list(responses))),
        full_checkpointed=num_rows * full_sequence_bytes(trainer, prompt, responses[0], True),
        full=num_rows * full_sequence_bytes(trainer, prompt, responses[0], False),
        num_rows=num_rows,
        num_tokens=prompt.numel() + num_tokens,
    )
    trainer.model.zero_grad()
    return memory


def longstraw_bytes(trainer: LongStrawGRPOTrainer, group: PromptGroup) -> int:
    """Peak of a group's update; the loss is any that reaches every token."""
    with PeakTensorBytes() as counter:
        trainer.engine.accumulate([group], lambda scores: scores[0].logps.mean())
    return counter.peak_bytes


def full_sequence_bytes(
    trainer: LongStrawGRPOTrainer, prompt: torch.Tensor, response: torch.Tensor, checkpointing: bool
) -> int:
    """Peak of an ordinary forward and backward of prompt and response.

    Only the response's rows get logits: what TRL's fused head needs as work space does not grow
    with the sequences.
    """
    model = trainer.model
    if checkpointing:
        model.enable_input_require_grads()
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    with PeakTensorBytes() as counter, trainer.accelerator.autocast():
        row = torch.cat([prompt, response])[None]
        logits = model(row, use_cache=False, logits_to_keep=response.numel() + 1).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits.float(), response).backward()
    if checkpointing:
        model.activation_checkpointing_disable()
        model.disable_input_require_grads()
    return counter.peak_bytes
