"""What the engine asks of whatever drives backwards and holds gradients."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from ..distributed import Pass


@dataclass(frozen=True)
class Finalized:
    """The gradient that the optimizer is about to see.

    Attributes:
        is_finite: False if it holds NaN or infinity, and the step will therefore change nothing;
            None where that is only known after the step.
    """

    is_finite: bool | None


class Backend(ABC):
    """Drives `backward` many times and finalizes once.

    Attributes:
        turns: passes that contain collectives, which all ranks must make together.
        needs_anchor: whether every backward must reach every parameter, with zeros if need be.
        keeps_gradients: whether `.grad` holds what was accumulated, for others to read.
        ep_size: neighbouring ranks that the experts are divided over.
        gathers_weights: whether a module's forward brings its weights together from all ranks.
    """

    turns: frozenset[Pass] = frozenset()
    needs_anchor: bool = False
    keeps_gradients: bool = True
    ep_size: int = 1
    gathers_weights: bool = False

    def begin_update(self, parameters: Sequence[nn.Parameter]) -> None:  # noqa: B027  (optional)
        """Called before the first backward of each micro-batch."""

    def begin_pass(self) -> None:  # noqa: B027  (optional)
        """Called at the start of each pass that contains collectives, on every rank."""

    def end_pass(self) -> None:  # noqa: B027  (optional)
        """Called at the end of each such pass, on every rank."""

    def count_writes(self, parameters: Sequence[nn.Parameter]) -> int:
        """A number that changes when the optimizer writes to parameters: it tells stale state.

        Args:
            parameters: the trained ones. PEFT swaps frozen expert weights during a forward, which
                torch counts as writes.
        """
        return sum(parameter._version for parameter in parameters)

    @abstractmethod
    def backward(self, roots: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
        """Backpropagate `cotangents` from `roots` into parameters and pages."""

    @abstractmethod
    def finalize(self, parameters: Sequence[nn.Parameter]) -> Finalized:
        """Turn what was accumulated into the mean over ranks, where the optimizer reads it.

        Collective: every rank calls it, once per optimizer step.
        """

    @abstractmethod
    def discard(self, parameters: Sequence[nn.Parameter]) -> None:
        """Forget what was accumulated since the last optimizer step."""

    @property
    def has_gradient(self) -> bool:
        """Whether a backward ran since the last optimizer step."""
        return True

    @contextmanager
    def weights_gathered(self, num_in_step: int = 1) -> Iterator[None]:
        """Inside, the caller has brought all weights together: passes need no rank but those that
        make them in step.

        Args:
            num_in_step: neighbouring ranks that make the same passes at the same time.
        """
        yield

    @abstractmethod
    def describe(self, parameters: Sequence[nn.Parameter]) -> str:
        """A few words for logs."""
