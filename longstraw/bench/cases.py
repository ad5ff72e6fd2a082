"""What is timed: parts of an update on random tokens, and the plain step that it replaces.

A case prepares what the part needs, each time anew and untimed, and returns the part. Knows models
and tokens; knows nothing of clocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..audit.case import AuditCase
from ..audit.steps import definition_step
from ..config import EngineConfig
from ..engine import Engine
from ..segments import PromptGroup

Run = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """How large an update is: P, R and G."""

    prompt_tokens: int
    response_tokens: int
    group_size: int

    def make(self, model: Any) -> AuditCase:
        """Random tokens of this shape, and random advantages; the same at every call."""
        generator = torch.Generator().manual_seed(0)
        vocab = model.config.get_text_config(decoder=True).vocab_size

        def ids(length: int) -> torch.Tensor:
            return torch.randint(2, vocab, (length,), generator=generator)

        replies = [ids(self.response_tokens) for _ in range(self.group_size)]
        advantages = torch.randn(self.group_size, generator=generator)
        case = AuditCase(PromptGroup(ids(self.prompt_tokens), replies), advantages)
        return case.to(next(model.parameters()).device)


@dataclass(frozen=True)
class Case:
    """One part of an update.

    Attributes:
        what: one line for people.
        prepare: (model, tokens, config) -> the part, ready to run once.
        count_tokens: tokens that the part passes through the model, for tokens/s.
    """

    name: str
    what: str
    prepare: Callable[[Any, AuditCase, EngineConfig], Run]
    count_tokens: Callable[[Shape], int]


def _capture(model: Any, tokens: AuditCase, config: EngineConfig) -> Run:
    engine = Engine(model, config)
    return lambda: engine.capture(tokens.group.prompt_ids)


def _replay_step(model: Any, tokens: AuditCase, config: EngineConfig) -> Run:
    engine = Engine(model, replace(config, prompt_gradient="stopped"))
    engine.capture(tokens.group.prompt_ids)
    return lambda: engine.accumulate([tokens.group], tokens.loss)


def _prompt_backward(model: Any, tokens: AuditCase, config: EngineConfig) -> Run:
    engine = Engine(model, config)
    engine.accumulate([replace(tokens.group, is_complete=False)], tokens.loss)
    return engine.finalize


def _full_sequence_step(model: Any, tokens: AuditCase, config: EngineConfig) -> Run:
    return lambda: definition_step(model, tokens, "exact", config)


CASES = {
    case.name: case
    for case in (
        Case(
            "capture",
            "the prompt, once, without a graph",
            _capture,
            lambda shape: shape.prompt_tokens - 1,
        ),
        Case(
            "replay_step",
            "the replies on a captured prompt: scored, and replayed with a graph",
            _replay_step,
            lambda shape: 2 * shape.group_size * (shape.response_tokens + 1),
        ),
        Case(
            "prompt_backward",
            "the prompt's own backward, from what the replies left on its pages",
            _prompt_backward,
            lambda shape: shape.prompt_tokens - 1,
        ),
        Case(
            "full_sequence_step",
            "the baseline: one graph over prompt and reply, reply by reply, eager attention",
            _full_sequence_step,
            lambda shape: shape.group_size * (shape.prompt_tokens + shape.response_tokens),
        ),
    )
}
