"""When a prompt's captured state is captured anew: every optimizer step, every N steps, or never.

A state that is read in several steps must be the same one for all who read it, so a policy says
three things: what a state is labelled with, which labels may be read under the weights of now, and
with which adapters a prompt is run. Knows weights and adapters; knows nothing of members or losses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .captured import CapturedSegments
from .config import EngineConfig
from .errors import ConfigError
from .models import Decoder, PolicyVersion
from .state import SegmentState

_WITHOUT_ADAPTERS = PolicyVersion(step=0, writes=0, adapters=None)
"""Of every state that no training changes, whoever reads it."""


class PromptRefresh:
    """The refresh policy of `EngineConfig.prompt_refresh` for one decoder's prompts.

    Let z(w) be the state of a prompt under weights w = base + adapters, and w_t those of step t:

        every step    responses of step t read z(w_t)
        N steps       responses of steps s ... s + N - 1 read z(w_s)
        never         all responses read z(base)

    Attributes:
        num_steps: for how many optimizer steps a state is read; None where it stays what it is.

    Raises:
        ConfigError: "never" for a model of which something trained stays on without adapters.
    """

    def __init__(self, decoder: Decoder, captured: CapturedSegments, config: EngineConfig) -> None:
        self.num_steps = config.refresh_steps
        self._writes: int | None = None  # when a state was last asked for
        self._decoder = decoder
        self._captured = captured
        self._has_budget = config.state_budget_bytes is not None
        if self.num_steps is None:
            _check_adapters(decoder.model)

    @property
    def spans_steps(self) -> bool:
        """Whether a state may be read after the optimizer's step."""
        return self.num_steps != 1

    @property
    def keeps_unused(self) -> bool:
        """Whether what a whole step has not read stays: where a budget says how much may."""
        return self._has_budget or not self.spans_steps

    def describe(self) -> str:
        """A few words for a list in logs; none for the default."""
        if self.num_steps is None:
            return "prompts run once, without adapters, "
        return f"prompts run every {self.num_steps} steps, " if self.spans_steps else ""

    # ---------------------------------------------------------------- labels

    def label(self, now: PolicyVersion) -> PolicyVersion:
        """What a prompt that is captured under the weights `now` is labelled with."""
        return _WITHOUT_ADAPTERS if self.num_steps is None else now

    def is_valid(self, version: object, now: PolicyVersion) -> bool:
        """Whether a state of this label may be read under the weights `now`."""
        if self.num_steps is None:
            return version == _WITHOUT_ADAPTERS
        if not isinstance(version, PolicyVersion) or replace(version, step=now.step) != now:
            return False
        return 0 <= now.step - version.step < self.num_steps

    def find(self, token_ids: Tensor, now: PolicyVersion) -> SegmentState | None:
        """The state that readers of `token_ids[:-1]` share, the oldest that may be read.

        Args:
            token_ids: 1-D, on the CPU.
        """
        self._writes = now.writes
        held = {state.policy_version for state in self._captured.roots()}
        valid = [v for v in held if isinstance(v, PolicyVersion) and self.is_valid(v, now)]
        for version in sorted(valid, key=lambda version: version.step):
            state = self._captured.find(token_ids, version)
            if state is not None:
                return state
        return None

    def is_settled(self, token_ids: Tensor, now: PolicyVersion) -> bool:
        """Whether a prompt has a state that another step captured, and will not be run now."""
        if not self.spans_steps:
            return False
        held = self.find(token_ids, now)
        return held is not None and held.policy_version != self.label(now)

    def drop_stale(self, now: PolicyVersion) -> None:
        """Free what may not be read under the weights `now`, and label what may be.

        Ages are counted in announced steps, so ranks agree on them. What a write that nobody
        announced has made stale stays so.
        """
        before, self._writes = self._writes, now.writes
        for state in self._captured.states():
            version = state.policy_version
            if self.spans_steps and state.is_prompt and isinstance(version, PolicyVersion):
                if version.adapters == now.adapters and version.writes == before:
                    state.policy_version = version = replace(version, writes=now.writes)
                if self.is_valid(version, now):
                    continue
            self._captured.drop(state)

    # ---------------------------------------------------------------- adapters

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Run a prompt inside with the adapters that its state is of."""
        model: Any = self._decoder.model
        if self.num_steps is not None:
            yield
            return
        flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            with model.disable_adapter():
                yield
        finally:
            # PEFT makes all of an adapter trainable when it is switched on again, and none of it
            # when it is switched off.
            for parameter, is_trained in flags:
                parameter.requires_grad_(is_trained)


def _check_adapters(model: nn.Module) -> None:
    """Raise unless everything that is trained is switched off with the adapters."""
    adapted: Any = model
    if not hasattr(adapted, "disable_adapter"):
        raise ConfigError(
            "prompt_refresh='never' (longstraw_prompt_refresh in the trainer) runs prompts with "
            f"PEFT's adapters switched off, and this {type(model).__name__} has none: its training "
            "changes what prompts leave behind. Train an adapter (peft_config=LoraConfig(...) in "
            "the trainer), or refresh prompts every step or every few steps."
        )
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with adapted.disable_adapter():
        names = [name for name, p in model.named_parameters() if p.requires_grad]
    for parameter, is_trained in flags:
        parameter.requires_grad_(is_trained)
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ConfigError(
            "prompt_refresh='never' (longstraw_prompt_refresh in the trainer) needs prompts that "
            "training does not change, and these parameters are trained and stay on without "
            f"adapters: {shown}. Freeze them (LoraConfig(bias='none'); modules_to_save trains a "
            "copy that is switched off), or refresh prompts every step or every few steps."
        )
