"""`SequenceParallelGRPOTrainer`: TRL's trainer where several ranks share their prompts.

The ranks of a sequence group hold the same rows and make the same passes; the engine divides the
tokens of each pass. What is done once per group (rollouts, reward functions) its leader does, and
the others receive. With groups of one this is TRL's trainer.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from accelerate.utils import set_seed
from torch import Tensor

from longstraw import ConfigError, RankAxes, rank_axes

from .group_accelerator import GroupAccelerator
from .group_rollout import GroupRollout, PackedIds, RolloutResults
from .prompt_data import PromptDataGRPOTrainer
from .prompt_reader import Row
from .seams import gathering_over_groups


class SequenceParallelGRPOTrainer(PromptDataGRPOTrainer):
    """`trl.GRPOTrainer` to which a sequence group is one process.

    Attributes:
        axes: this rank's place in its group and among the groups.
    """

    axes: RankAxes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.axes.sp_size > 1:
            # Instead of TRL's seed of each rank: a group draws alike, groups as TRL's processes do.
            set_seed(self.args.seed + self.axes.dp_rank)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        options: Any = self.args
        self.axes = rank_axes(options.longstraw_sp_size, self.args.ddp_timeout)
        if self.axes.sp_size > 1:
            GroupAccelerator.adopt(self.accelerator, self.axes)
        self._rollout = GroupRollout(
            self.axes.sequence,
            {
                "turn": lambda contexts: self.generate_turn(contexts.lists()),
                "meeting": self._attend,
            },
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.axes.sp_size

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        options: Any = self.args
        with options.counting_groups():  # speeds are per batch of all groups
            return super().evaluate(*args, **kwargs)

    # ---------------------------------------------------------------- rollout

    def generate_turn(self, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        """One continuation of each context. Collective in the sequence group."""
        raise NotImplementedError

    def _announced_turn(self, contexts: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
        return self._rollout.announced("turn", lambda: PackedIds.of(contexts))

    def _announced_meeting(self, work: str) -> AbstractContextManager[None]:
        return self._rollout.announced("meeting", lambda: work, tells_errors=True)

    def _attend(self, work: str) -> None:
        with self.engine.lockstep.together(work):
            pass

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        self.engine.watch.at("the rollout")
        results = self._rollout.run(lambda: RolloutResults(*self._generate_here(prompts)))
        return tuple(vars(results).values())

    def _generate_here(self, prompts: list[Any]) -> tuple[Any, ...]:
        return super()._generate(prompts)

    def _generate_and_score_completions(self, inputs: list[Row]) -> dict[str, Any]:
        with gathering_over_groups(self.accelerator):
            batch = super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"  # type: ignore[union-attr]
        # The leader has those of the rollout and of reward functions, and all decide by them.
        counted = self._metrics[mode], self.state.num_input_tokens_seen
        counted = self.axes.sequence.share(counted)
        self._metrics[mode], self.state.num_input_tokens_seen = counted
        return batch

    # ---------------------------------------------------------------- rewards

    def _once_per_group(self, reward_func: Any) -> Any:
        """What this rank calls for `reward_func`; its rewards are then the leader's."""
        return reward_func if self.axes.sequence.is_leader else _scored_by_the_leader

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        self.axes.sequence.broadcast_(rewards)
        # Rollout and reward functions may have drawn, and the shuffle of groups comes next.
        self.axes.sequence.share_random_state(self.accelerator.device)
        return rewards


def _scored_by_the_leader(completions: Sequence[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def refuse_own_generation(sp_size: int, reason: str) -> None:
    """Raise if ranks share prompts, for each would generate other responses to them.

    Args:
        reason: why TRL generates by itself.
    """
    if sp_size > 1:
        raise ConfigError(
            f"{reason} with longstraw_sp_size={sp_size}: TRL would generate on each rank by "
            "itself, and the ranks of a group share their responses. Leave it out, so that they "
            "are decoded from captured prompts by the whole group, or give a rollout_func, which "
            "runs once per group."
        )


def refuse_environments(sp_size: int, has_environment: bool) -> None:
    """Raise if ranks share prompts and each would have environments of its own."""
    if sp_size > 1 and has_environment:
        raise ConfigError(
            f"environment_factory with longstraw_sp_size={sp_size}: environments would be made and "
            "reset on every rank of a group. Use tools, or a rollout_func that calls "
            "trainer.generate_turn; both run once per group."
        )
