"""TRL's loss of a micro-batch evaluated once more, on the scores of prompts captured anew.

Knows what TRL's loss leaves behind in its trainer; knows nothing of how scores are made.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from longstraw import UpdateReport

# What TRL's loss takes from one step to the next: the adaptive coefficient of the entropy.
_CARRIED = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
_OLD = "old_per_token_logps"


class RepeatableLoss:
    """The loss function of one micro-batch: called under autograd, then maybe without once more.

    The second call is the same function of log-probs and leaves no trace. Where TRL takes the
    first call's log-probs for the old ones, the second has them as constants: their ratio to
    themselves would be 1 whatever they are.

    Args:
        inputs: TRL's micro-batch.
        loss_of: TRL's loss of it.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        inputs: dict[str, Any],
        loss_of: Callable[[dict[str, Any]], Tensor],
    ) -> None:
        self.trainer: Any = trainer
        self.inputs = inputs
        self.loss_of = loss_of
        self._carried = {name: getattr(trainer, name) for name in _CARRIED}

    def __call__(self, logps: Tensor) -> Tensor:
        """The loss of `logps` `[B, C]`, which are what the trainer scores with."""
        if torch.is_grad_enabled():
            if self.inputs.get(_OLD) is None:
                self._old = logps.detach()
            return self.loss_of(self.inputs)
        inputs = dict(self.inputs)
        if inputs.get(_OLD) is None:
            inputs[_OLD] = self._old
        with self._without_a_trace():
            return self.loss_of(inputs)

    @contextmanager
    def _without_a_trace(self) -> Iterator[None]:
        metrics = self.trainer._metrics["train"]
        lengths = {name: len(values) for name, values in metrics.items()}
        carried = {name: getattr(self.trainer, name) for name in _CARRIED}
        vars(self.trainer).update(self._carried)
        try:
            yield
        finally:
            vars(self.trainer).update(carried)
            for name in list(metrics):
                del metrics[name][lengths.get(name, 0) :]
                if name not in lengths:
                    del metrics[name]


def refresh_metrics(report: UpdateReport) -> dict[str, float]:
    """What is logged of a prompt's state that is read in several steps, by name."""
    found: dict[str, float] = {"prompt_age": report.prompt_age}
    if report.drift is not None:
        found |= {f"prompt_drift/{name}": value for name, value in vars(report.drift).items()}
    return found
