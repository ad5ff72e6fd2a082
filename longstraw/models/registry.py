"""Which model families are served, and the checks a model must pass before the engine runs it.

A family is listed when its per-parameter gradients are compared with the full-sequence step, in
`tests/engine/test_exact_gradient.py`. Everything else is refused by name: an architecture that
keeps other state than keys and values would lose it silently.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True)
class Family:
    """A served `model_type`.

    Attributes:
        model_type: `config.model_type` of the text decoder.
        feature: what it needs beyond plain causal attention, for reports.
        can_checkpoint: whether gradient checkpointing keeps the cache.
        router_top_k: name of the config field with the experts per token; None without experts.
        has_learned_positions: positions are rows of a table, so there is nothing beyond its end.
    """

    model_type: str
    feature: str = ""
    can_checkpoint: bool = True
    router_top_k: str | None = None
    has_learned_positions: bool = False


_FAMILIES = (
    Family("llama", "also SmolLM2"),
    Family("mistral", "sliding window"),
    Family("qwen2", "attention bias"),
    Family("qwen3", "query/key norm"),
    Family("smollm3", "layers without rotary embedding"),
    Family("gemma2", "softcap, sliding window"),
    Family("gemma3_text", "sliding window"),
    Family("gpt_oss", "sinks, sliding window, experts", router_top_k="num_experts_per_tok"),
    Family("qwen3_moe", "experts", router_top_k="num_experts_per_tok"),
    Family("qwen3_5_text", "Gated DeltaNet; also Qwen3.6"),
    Family("qwen3_5", "the same, of which the vision tower gets no input"),
    Family("qwen3_5_moe_text", "Gated DeltaNet, experts", router_top_k="num_experts_per_tok"),
    Family("qwen3_5_moe", "the same, without vision", router_top_k="num_experts_per_tok"),
    Family("qwen3_next", "Gated DeltaNet, experts", router_top_k="num_experts_per_tok"),
    Family("deepseek_v3", "latent attention, experts; also Kimi K2"),
    Family("deepseek_v32", "latent attention, sparse attention, experts"),
    Family("glm_moe_dsa", "the same, with shared selections; GLM-5, GLM-5.2"),
    Family("gpt2", "learned positions", can_checkpoint=False, has_learned_positions=True),
)
SERVED_FAMILIES = {family.model_type: family for family in _FAMILIES}

_OTHER_SELECTIONS = (
    "axk2",
    "deepseek_v4",
    "dots3_note",
    "glm5_next",
    "hy_v4",
    "minimax_m3",
    "mistral_large4",
    "qwen4_exp",
)
"""How the `model_type` begins of families with an indexer of another design."""

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_model(model: PreTrainedModel) -> Family:
    """The family of a base causal LM, or an error that says why it cannot be served.

    Raises:
        UnsupportedModelError: the family is not served, or a feature of it is not.
        ConfigError: an option of the model makes a replay differ from its capture.
    """
    _check_transformers()
    config = model.config
    family = SERVED_FAMILIES.get(config.model_type)
    if family is None and config.model_type.startswith(_OTHER_SELECTIONS):
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type={config.model_type!r}) selects tokens for its "
            "attention in another way than DeepSeek-V3.2 and GLM-5: what its indexer pools, "
            "compresses or shares would be lost without a sign. Served families: "
            f"{', '.join(sorted(SERVED_FAMILIES))}. Use TRL's own GRPOTrainer for this model."
        )
    if family is None or config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type={config.model_type!r}) is not served: its state "
            "beside keys and values, if it has any, would be lost without a sign. Served families: "
            f"{', '.join(sorted(SERVED_FAMILIES))}. Use TRL's own GRPOTrainer for this model."
        )
    _check_rope(config.get_text_config(decoder=True))
    _check_dropout(model)
    _keep_weights_differentiable(model)
    return family


def check_checkpointing(model: PreTrainedModel, family: Family) -> None:
    """Refuse gradient checkpointing that would drop the cache."""
    if not model.is_activation_checkpointing:
        return
    refuse_checkpointing(family)
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is None:
            continue
        # Unsaid is not False: torch then takes the re-entrant form.
        use_reentrant = getattr(function, "keywords", {}).get("use_reentrant")
        if use_reentrant is not False:
            found = "re-entrant" if use_reentrant else "on without a word on use_reentrant"
            raise ConfigError(
                f"gradient checkpointing is {found}; the re-entrant form runs a layer twice "
                "without its graph's inputs. Set "
                'gradient_checkpointing_kwargs={"use_reentrant": False} (of the trainer\'s config, '
                "and of PEFT's prepare_model_for_kbit_training)."
            )


def refuse_checkpointing(family: Family) -> None:
    """Raise if `family` drops its cache under gradient checkpointing."""
    if not family.can_checkpoint:
        raise ConfigError(
            f"gradient_checkpointing=True: {family.model_type} drops its cache under gradient "
            "checkpointing. Set gradient_checkpointing=False; a smaller chunk_size bounds the "
            "graph as well."
        )


def _check_transformers() -> None:
    # The cache hands its pages to attention through `cache.update(..., kwargs=kwargs)`.
    version = Version(transformers.__version__)
    if not Version("5.24") <= version < Version("5.40"):
        raise UnsupportedModelError(
            f"transformers {version} is installed; its caches and attention layers meet in another "
            "way than the engine needs. Install transformers>=5.24,<5.40."
        )


def _check_rope(config: Any) -> None:
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"rope_type={rope_type!r}: its frequencies depend on the length of each forward, "
                "so chunks of one prompt would be rotated differently. Set a fixed scaling, for "
                'example rope_parameters={"rope_type": "yarn", "factor": ...} or "linear" in the '
                "model's config."
            )


def _rope_types(parameters: Any) -> Iterator[str]:
    """The rope types in a config's `rope_parameters`, which may be nested by layer type."""
    if not isinstance(parameters, dict):
        return
    if isinstance(parameters.get("rope_type"), str):
        yield parameters["rope_type"]
    for value in parameters.values():
        yield from _rope_types(value)


def _keep_weights_differentiable(model: nn.Module) -> None:
    """Stop bitsandbytes from packing 4-bit weights for inference, in place, in eval mode.

    It does so on CPUs with AVX512-BF16; the packed form has no backward.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        state = getattr(module.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ConfigError(
                f"the 4-bit weights of {name} are packed for inference on this CPU, which a "
                "forward in eval mode does, and cannot be differentiated any more. Load the model "
                "anew, and call model.train() before its first forward."
            )


def _check_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ConfigError(
                f"{name} has dropout {module.p}; a replay would draw another mask than the "
                "capture. Set disable_dropout=True in the trainer's config (or dropout 0 in the "
                "model's and the adapter's)."
            )
        attention_dropout = getattr(module, "attention_dropout", 0.0)
        if isinstance(attention_dropout, (int, float)) and attention_dropout > 0:
            raise ConfigError(
                f"{name or 'the model'} has attention_dropout {attention_dropout}; a replay would "
                "draw another mask than the capture, and disable_dropout=True does not reach it. "
                "Load the model with attention_dropout=0.0 "
                '(for example model_init_kwargs={"attention_dropout": 0.0}).'
            )
