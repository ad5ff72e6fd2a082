"""One gradient, taken in either of two ways: by the engine, or by the full-sequence step."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import EngineConfig
from ..engine import Engine, LossFunction
from ..members import GroupScores
from ..segments import PromptGroup
from .case import AuditCase
from .closeness import Gradients
from .full_sequence import full_sequence_step
from .precision import whole_precision


@dataclass(frozen=True)
class Step:
    """What one step gave.

    Attributes:
        gradients: by parameter; of those without one zeros are meant.
        logps: per member `[R_i]`.
    """

    gradients: Gradients
    logps: list[Tensor]

    @property
    def sha256(self) -> str:
        """Of the gradients' bits."""
        digest = hashlib.sha256()
        for name, gradient in self.gradients.items():
            digest.update(name.encode())
            digest.update(gradient.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def engine_step(
    model: nn.Module, group: PromptGroup, loss: LossFunction, config: EngineConfig
) -> Step:
    """By the engine. Collective where there are ranks."""
    listener = _Listener(group, loss)
    engine = Engine(model, config)
    with whole_precision(model):
        engine.accumulate([group], listener)
        engine.finalize()
    return Step(_take_gradients(model), listener.logps)


def definition_step(
    model: nn.Module, case: AuditCase, prompt_gradient: str, config: EngineConfig
) -> Step:
    """By the full-sequence step, one member after the other: one graph at a time."""
    logps = []
    for group, loss in case.members():
        listener = _Listener(group, loss)
        with whole_precision(model):
            full_sequence_step(
                model,
                [group],
                listener,
                prompt_gradient=prompt_gradient,
                temperature=config.temperature,
                index_ties=config.index_ties,
            )
        logps += listener.logps
    return Step(_take_gradients(model), logps)


def both_gradients(model: nn.Module, case: AuditCase, config: EngineConfig) -> tuple[Step, Step]:
    """The engine's exact and stopped steps."""
    exact, stopped = (
        engine_step(model, case.group, case.loss, replace(config, prompt_gradient=mode))
        for mode in ("exact", "stopped")
    )
    return exact, stopped


class _Listener:
    """A loss that keeps the log-probs it is given."""

    def __init__(self, group: PromptGroup, loss: LossFunction) -> None:
        self._lengths = [ids.numel() for ids in group.completion_ids]
        self._loss = loss
        self.logps: list[Tensor] = []

    def __call__(self, scores: list[GroupScores]) -> Tensor:
        rows = scores[0].logps.detach()
        self.logps = [row[:n].clone() for row, n in zip(rows, self._lengths, strict=True)]
        return self._loss(scores)


def _take_gradients(model: nn.Module) -> Gradients:
    """The gradients, which the model then has no more."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def full_sequence_bytes(model: Any, num_tokens: int, itemsize: int) -> int:
    """About what the graph of one sequence takes, with the eager attention of the definition.

    Attention weights of all layers, the activations beside them, logits three times, and weights
    and gradients of a copy of the model in that precision.
    """
    config = model.config.get_text_config(decoder=True)
    layers, hidden = config.num_hidden_layers, config.hidden_size
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    square = config.num_attention_heads * num_tokens**2
    weights = (layers + 4) * square * max(itemsize, 4)
    rows = num_tokens * (layers * (12 * hidden + 4 * wide) + 3 * config.vocab_size)
    parameters = sum(p.numel() * (1 + p.requires_grad) for p in model.parameters())
    return weights + (rows + parameters) * itemsize
