"""What an engine refuses of whatever drives its backwards."""

from .backends import Backend
from .config import EngineConfig
from .distributed import Pass
from .errors import ConfigError
from .models import Decoder


def check_backend(config: EngineConfig, decoder: Decoder, backend: Backend) -> None:
    """Raise if an option, or the model, asks for what `backend` does not have.

    Raises:
        ConfigError: with the option, the reason and what to use instead.
    """
    if config.log_gradient_gap and not backend.keeps_gradients:
        raise ConfigError(
            "log_gradient_gap=True (longstraw_log_gradient_gap in the trainer) compares whole "
            "gradients, and here no rank holds them. Measure with ZeRO stage 0 or 1, or with "
            "LoRA under stage 2, and without expert_parallel."
        )
    if config.router_statistics and decoder.num_experts_per_token is None:
        raise ConfigError(
            "router_statistics=True (output_router_logits=True in the model's config) keeps sums "
            "for a load-balancing loss, and transformers has none for "
            f"{decoder.family.model_type}. Set output_router_logits=False."
        )
    if backend.gathers_weights and any(decoder.head.children()):
        raise ConfigError(
            f"the head is a {type(decoder.head).__name__} of several modules, whose "
            "weights ZeRO-3 would bring together for each slice of rows, and ranks have "
            "different numbers of slices. Leave the head out of target_modules, or use ZeRO-2."
        )
    if backend.gathers_weights and config.refresh_steps is None:
        raise ConfigError(
            "prompt_refresh='never' (longstraw_prompt_refresh in the trainer) runs prompts without "
            "adapters, and ZeRO-3 brings an adapter's weights together in every forward of every "
            "rank, also of those that have no prompt to run. Use ZeRO-2, or refresh prompts every "
            "step or every few steps."
        )
    if Pass.CAPTURE in backend.turns and config.refresh_steps is None:
        raise ConfigError(
            "prompt_refresh='never' (longstraw_prompt_refresh in the trainer) is not served with "
            "expert_parallel. Leave expert_parallel out, or refresh prompts every step or every "
            "few steps."
        )
