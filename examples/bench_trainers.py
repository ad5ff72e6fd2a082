"""Stock TRL's trainer and LongStraw's, made to do the same work and to tell what it took.

Both generate at a fixed length for the time it takes, and then train on completions, rewards and a
prompt that are given, so that losses and gradient norms can be compared. Nothing else is changed.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_integration import LongStrawGRPOTrainer

PHASES = (
    "rollout",
    "capture",
    "score",
    "forward",
    "backward",
    "loss",
    "replay",
    "prompt_backward",
    "optimizer",
    "other",
)
"""All phases in their order. Stock TRL has forward and backward; LongStraw capture, score, loss,
replay and prompt_backward."""


@dataclass(frozen=True)
class FixedWork:
    """What every mode trains on.

    Attributes:
        prompt: token ids of the measured steps' prompt, `P`.
        warm_up: token ids of the first step's prompt.
        completions: `G` lists of `R` token ids.
        rewards: one for each completion.
    """

    prompt: list[int]
    warm_up: list[int]
    completions: list[list[int]]
    rewards: list[float]

    @classmethod
    def make(cls, text: list[int], num_prompt: int, group: int, num_response: int) -> "FixedWork":
        """Cut `text` to the lengths asked for (repeated if it is short); the same at every call."""
        rng = random.Random(0)
        repeated = text * (1 + num_prompt // len(text))
        completions = [rng.choices(text, k=num_response) for _ in range(group)]
        return cls(
            prompt=repeated[:num_prompt],
            warm_up=repeated[: min(num_prompt, 256)],
            completions=completions,
            rewards=[rng.random() for _ in range(group)],
        )

    def reward(self, completions: list[Any], **_: Any) -> list[float]:
        """A reward function: the given numbers, row by row."""
        return self.rewards[: len(completions)]


class FixedWorkTrainer(GRPOTrainer):
    """Trains on `work` and adds up seconds by phase. Mixed into either trainer.

    Attributes:
        work: set before training; see `FixedWork`.
        observer: told when the rollout begins and ends.
    """

    work: FixedWork
    observer: "Observer"

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        _, *rest = super()._tokenize_prompts(prompts)
        is_first = self.state.global_step == 0 and self.observer.warms_up
        ids = self.work.warm_up if is_first else self.work.prompt
        return [ids for _ in prompts], *rest

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        with self.observer.rollout():
            generated, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        lengths = {len(ids) for ids in generated}
        expected = len(self.work.completions[0])
        assert lengths == {expected}, f"generated {lengths} tokens instead of {expected}"
        return self.work.completions, None


class StockTrainer(FixedWorkTrainer):
    """`trl.GRPOTrainer`, timed from outside its methods."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observer = Observer()
        backward = self.accelerator.backward

        def timed_backward(*args: Any, **kwargs: Any) -> None:
            with self.observer.phase("backward"):
                backward(*args, **kwargs)

        self.accelerator.backward = timed_backward

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with self.observer.phase("forward" if self.observer.in_loss else "score"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        self.observer.in_loss = True
        try:
            return super().compute_loss(*args, **kwargs)
        finally:
            self.observer.in_loss = False

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.observer.micro_batch_done()
        return loss


class OurTrainer(FixedWorkTrainer, LongStrawGRPOTrainer):
    """`LongStrawGRPOTrainer`; its engine's ledger knows the phases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observer = Observer()


class Observer:
    """Seconds by phase of the step that runs. Subclasses measure something else as well.

    Attributes:
        warms_up: whether the first step runs the short prompt.
        in_loss: whether stock TRL computes log-probs for its loss, with a graph.
    """

    warms_up = True

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.in_loss = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside as phase `name`."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Around the generation of a step."""
        with self.phase("rollout"):
            yield

    def micro_batch_done(self) -> None:
        """After each micro-batch of stock TRL."""


class StepEvents(TrainerCallback):
    """Calls `begin()` and `end()` around each optimizer step, `before_optimizer()` in between.

    `end()` says whether to go on.
    """

    def __init__(self, listener: Any) -> None:
        self.listener = listener

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.listener.begin()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.listener.before_optimizer()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.listener.after_optimizer()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.listener.end():
            control.should_training_stop = True
