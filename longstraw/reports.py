"""What an engine tells its caller: how it runs, and what an update did.

Knows values and counts; knows nothing of how they came about.
"""

from dataclasses import dataclass

from torch import Tensor

from longstraw_kernels.page_attention import available_impl

from .backends import Backend
from .config import EngineConfig
from .drift import PromptDrift
from .models import Decoder
from .refresh import PromptRefresh
from .state import PageStore


@dataclass(frozen=True)
class UpdateReport:
    """What one `accumulate` did.

    Attributes:
        loss: the loss function's value, detached.
        num_replayed, num_skipped: members with and without a gradient of their own.
        prompt_age: optimizer steps since the oldest state in use was captured, see
            `EngineConfig.prompt_refresh`.
        drift: what that changes, where it is measured (`EngineConfig.log_prompt_drift`).
    """

    loss: Tensor
    num_replayed: int
    num_skipped: int
    prompt_age: int = 0
    drift: PromptDrift | None = None


@dataclass(frozen=True)
class FinalizeReport:
    """The gradient of one optimizer step.

    Attributes:
        is_finite: False if it held NaN or infinity: it was taken away and the step will change
            nothing. None where the optimizer decides that itself.
        gap: `relative` and `cosine` of the gradient gap, when it is measured.
    """

    is_finite: bool | None
    gap: dict[str, float] | None


def describe(
    config: EngineConfig,
    decoder: Decoder,
    store: PageStore,
    refresh: PromptRefresh,
    backend: Backend,
) -> str:
    """One line on how an engine of these runs, for logs."""
    device = decoder.device
    attention = config.attention
    if attention == "auto":
        attention = f"auto ({available_impl(device)} where it can)"
    per_token = decoder.state_bytes(1, with_cotangents=config.needs_prompt_backward)
    per_chunk = decoder.snapshot_bytes()
    recurrent = f" and {per_chunk:,} per chunk boundary" if per_chunk else ""
    shared = ""
    if config.sp_size > 1:
        shared = f" over {config.sp_size} ranks ({config.sp_layout})"
    return (
        f"{decoder.family.model_type} on {device}, {config.prompt_gradient} prompt gradient, "
        f"chunks of {config.chunk_size:,} tokens, pages of {config.page_size:,} on "
        f"{store.describe()}, {per_token:,} bytes of state per prompt token{recurrent}"
        f"{shared}, "
        f"attention {attention}, {refresh.describe()}"
        f"{backend.describe(decoder.trainable_parameters())}"
    )
