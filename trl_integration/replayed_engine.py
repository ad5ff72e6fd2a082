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
    if not backend.has_expert_layers:
        return
    own_state_dict, engine = accelerator.get_state_dict, backend.engine
    has_adapters = bool(getattr(engine.module, "peft_config", None))

    def get_state_dict(model: Any, unwrap: bool = True) -> Any:
        # accelerate's own would write the first rank's experts, under AutoEP's names.
        if model is not engine and model is not engine.module:
            return own_state_dict(model, unwrap)
        return backend.whole_state_dict(exclude_frozen_parameters=has_adapters)

    accelerator.get_state_dict = get_state_dict
