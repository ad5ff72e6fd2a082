"""The sizes of a model, read from its `config.json` alone.

Knows the served families and their fields; knows nothing of torch, transformers, ranks or prompts.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, UnsupportedModelError

ATTENTION, LATENT, RECURRENT = "attention", "latent", "recurrent"


@dataclass(frozen=True)
class Family:
    """What a `model_type` has beyond plain causal attention and a gated MLP.

    Attributes:
        qk_norm: queries and keys are normalized per head.
        bias: which projections of attention have a bias when the config does not say.
        sandwich: two more norms per layer, behind attention and MLP (Gemma).
        gated_query: `q_proj` makes a gate beside the queries.
        sinks: a learned logit per head; experts and router have biases too (gpt-oss).
        has_experts: whether layers may have routed experts in place of a dense MLP.
        shared_expert: "gated" (Qwen), "plain" (DeepSeek) or None.
        packed: recurrent layers have packed projections (Qwen3-Next).
        defaults: of fields that a saved config may leave out.
    """

    qk_norm: bool = False
    bias: str = ""
    sandwich: bool = False
    gated_query: bool = False
    sinks: bool = False
    has_experts: bool = False
    shared_expert: str | None = None
    packed: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096}
_QWEN_EXPERTS = {"has_experts": True, "shared_expert": "gated"}
_LATENT_EXPERTS = {"has_experts": True, "shared_expert": "plain"}
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Under which a config may have the number of routed experts."""
FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(bias="qkv"),
    "qwen3": Family(qk_norm=True),
    "smollm3": Family(defaults={"tie_word_embeddings": True}),
    "gemma2": Family(sandwich=True, defaults=_GEMMA),
    "gemma3_text": Family(sandwich=True, qk_norm=True, defaults=_GEMMA),
    "gpt_oss": Family(sinks=True, bias="qkvo", has_experts=True),
    "qwen3_moe": Family(qk_norm=True, has_experts=True),
    "qwen3_5_text": Family(qk_norm=True, gated_query=True),
    "qwen3_5_moe_text": Family(qk_norm=True, gated_query=True, **_QWEN_EXPERTS),
    "qwen3_next": Family(qk_norm=True, gated_query=True, packed=True, **_QWEN_EXPERTS),
    "deepseek_v3": Family(**_LATENT_EXPERTS),
    "deepseek_v32": Family(**_LATENT_EXPERTS),
    "glm_moe_dsa": Family(**_LATENT_EXPERTS),
}
"""Those of `longstraw.models.SERVED_FAMILIES` that run under gradient checkpointing."""


@dataclass(frozen=True)
class LayerShape:
    """One layer.

    Attributes:
        kind: `ATTENTION`, `LATENT` or `RECURRENT`.
        mlp_width: of its dense MLP; 0 where it has experts.
        window: most keys that a query sees; None for all.
        has_indexer: whether index keys are a part of its state.
    """

    kind: str
    mlp_width: int
    window: int | None = None
    has_indexer: bool = False


@dataclass(frozen=True)
class ModelShape:
    """A causal LM.

    Attributes:
        model_type: its family's name.
        family: what that has.
        config: of the text decoder, as read.
        layers: one per layer.
    """

    model_type: str
    family: Family
    config: Mapping[str, Any]
    layers: tuple[LayerShape, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read a config; of a multimodal one the text decoder.

        Raises:
            UnsupportedModelError: no served family, or one that cannot be planned.
            ConfigError: a size is missing.
        """
        text = config.get("text_config") or config
        name = str(text.get("model_type", config.get("model_type")))
        name = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}.get(name, name)
        if name not in FAMILIES:
            near = difflib.get_close_matches(name, FAMILIES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UnsupportedModelError(
                f"model_type={name!r} is not a family that can be planned.{hint} Needed is one of "
                f"{', '.join(sorted(FAMILIES))}. Give the config.json of such a model."
            )
        family = FAMILIES[name]
        full = {**family.defaults, **{k: v for k, v in text.items() if v is not None}}
        num_layers = _size(full, "num_hidden_layers")
        layers = tuple(_layer(full, family, index) for index in range(num_layers))
        return cls(name, family, full, layers)

    def __getitem__(self, name: str) -> int:
        """A size that the config has to have."""
        return _size(self.config, name)

    def get(self, name: str, default: int) -> int:
        """A size that the config may leave out."""
        return int(self.config.get(name, default))

    @property
    def hidden_size(self) -> int:
        return self["hidden_size"]

    @property
    def num_heads(self) -> int:
        return self["num_attention_heads"]

    @property
    def num_kv_heads(self) -> int:
        return self.get("num_key_value_heads", self.num_heads)

    @property
    def head_dim(self) -> int:
        """D; of gpt-oss and others a field of its own."""
        return self.get("head_dim", self.hidden_size // self.num_heads)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer that has them."""
        found = [name for name in _EXPERT_FIELDS if name in self.config]
        return self[(found or _EXPERT_FIELDS)[0]] if self.family.has_experts else 0

    @property
    def expert_width(self) -> int:
        """Of a routed expert's MLP."""
        return self["intermediate_size" if self.family.sinks else "moe_intermediate_size"]

    @property
    def num_latent_dims(self) -> int:
        """Numbers of a token's state in a layer with latent attention: r + dr."""
        return self["kv_lora_rank"] + self["qk_rope_head_dim"]

    @property
    def num_channels(self) -> int:
        """Channels of a recurrent layer's convolution."""
        keys = self["linear_num_key_heads"] * self["linear_key_head_dim"]
        return 2 * keys + self["linear_num_value_heads"] * self["linear_value_head_dim"]

    @property
    def recurrent_numel(self) -> int:
        """Numbers of a recurrent layer's matrices, one per value head."""
        dims = self["linear_key_head_dim"] * self["linear_value_head_dim"]
        return self["linear_num_value_heads"] * dims

    @property
    def conv_numel(self) -> int:
        """Numbers of the inputs that a recurrent layer's convolution keeps."""
        return self.num_channels * (self["linear_conv_kernel_dim"] - 1)

    def count(self, kind: str) -> int:
        """Layers of a kind."""
        return sum(layer.kind == kind for layer in self.layers)

    @property
    def num_indexers(self) -> int:
        return sum(layer.has_indexer for layer in self.layers)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.config.get("tie_word_embeddings", False))


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"the config has {name}={value!r}: a whole number of at least 1 is needed to count "
            "its tensors. Add the field to config.json, as the model's own code has it."
        )
    return value


def _layer(config: Mapping[str, Any], family: Family, index: int) -> LayerShape:
    kind = _kind(config, index)
    is_windowed = kind == ATTENTION and _has_window(config, index)
    window = config.get("sliding_window") if is_windowed else None
    width = 0 if _has_experts(config, family, index) else _size(config, "intermediate_size")
    return LayerShape(kind, width, window, kind == LATENT and _has_indexer(config, index))


def _kind(config: Mapping[str, Any], index: int) -> str:
    if "kv_lora_rank" in config:
        return LATENT
    if "linear_num_value_heads" not in config:
        return ATTENTION
    kinds = config.get("layer_types")
    if kinds is not None:
        return RECURRENT if kinds[index] == "linear_attention" else ATTENTION
    is_full = (index + 1) % config.get("full_attention_interval", 4) == 0
    return ATTENTION if is_full else RECURRENT


def _has_window(config: Mapping[str, Any], index: int) -> bool:
    kinds = config.get("layer_types")
    if kinds is not None:
        return kinds[index] == "sliding_attention"
    name = config.get("model_type")
    if name == "gemma3_text":
        return (index + 1) % config.get("sliding_window_pattern", 6) != 0
    if name in ("gemma2", "gpt_oss"):
        return index % 2 == 0
    return name == "mistral" and config.get("sliding_window") is not None


def _has_experts(config: Mapping[str, Any], family: Family, index: int) -> bool:
    if not family.has_experts:
        return False
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        return kinds[index] == "sparse"
    if "first_k_dense_replace" in config:
        return index >= config["first_k_dense_replace"]
    if index in config.get("mlp_only_layers", ()):
        return False
    return (index + 1) % config.get("decoder_sparse_step", 1) == 0


def _has_indexer(config: Mapping[str, Any], index: int) -> bool:
    """As transformers reads the schedule of shared selections."""
    if "index_head_dim" not in config:
        return False
    kinds = config.get("indexer_types")
    if kinds is not None:
        return kinds[index] == "full"
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return pattern[index] in ("F", "full")
    freq, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    return max(index - offset + 1, 0) % max(freq, 1) == 0
