"""The step of a DeepSpeed engine whose gradient is already in place."""

from typing import Any

from accelerate.utils import DeepSpeedEngineWrapper

from longstraw import DeepSpeedBackend


class ReplayedEngine(DeepSpeedEngineWrapper):
    """What accelerate calls instead of its own wrapper: no backward, only the step.

    `Trainer` runs a backward on the loss that `compute_loss` returns. There is nothing left of it
    to run: the replays have been driven by the backend.
    """

    def __init__(self, backend: DeepSpeedBackend) -> None:
        super().__init__(backend.engine)
        self.backend = backend

    def backward(self, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Take the optimizer's step if the accumulation ends here."""
        if sync_gradients:
            self.backend.step()


def drive_accelerator(accelerator: Any, backend: DeepSpeedBackend) -> None:
    """Let accelerate step and save through `backend`."""
    accelerator.deepspeed_engine_wrapped = ReplayedEngine(backend)
    if backend.ep_size > 1:  # accelerate's own would write the first rank's experts only
        accelerator.get_state_dict = lambda model, unwrap=True: backend.whole_state_dict()
