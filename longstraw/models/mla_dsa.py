"""Multi-head latent attention, and DeepSeek Sparse Attention on top of it.

Keys and values of all heads are linear in one latent per token: k_h = [W_h^K c; r], v_h = W_h^V c,
with the latent c and a rotary key r that heads share. So c and r are what later tokens read, and
attention works on them as they are (its absorbed form):

    q_h . k_h = [W_h^K^T q_h; q_r] . [c; r]           sum_t p_t v_h,t = W_h^V sum_t p_t c_t

Nothing is expanded for the history. W^K and W^V are `kv_b_proj` applied to the identity, so that
its adapters and 4-bit weights take part, and its gradient comes from all tokens; with
`prompt_gradient="stopped"` it is the prompt's latents that are constant, and not what is made of
them.

Under sparse attention an indexer scores all tokens before each query and attention reads the
`index_topk` best; some layers take the selection of the layer before them (IndexShare). What later
tokens read beside latents is the index keys, on layers with an indexer. Scores and selections have
no gradient.

Source:
    DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1; DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, section 2.1; IndexShare, https://arxiv.org/abs/2603.12201.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention import AttentionOptions, paged_attention, required_handle, select_tokens
from ..errors import ConfigError, PromptStateError, UnsupportedModelError
from ..state import ChunkCache, fingerprint

LATENT_ATTENTION_NAME = "longstraw_latent"

_ROTARY_FUNCTION = {
    "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave",
    "DeepseekV32Indexer": "apply_rotary_pos_emb",
}
"""Served indexers: in which they differ."""


@dataclass(frozen=True)
class LatentShape:
    """The sizes of a model's latent attention, from its config.

    Attributes:
        latent_dim, rotary_dim: of a token's state in each layer.
        index_layers: layers with an indexer, ascending.
        index_dim: of an index key.
    """

    latent_dim: int
    rotary_dim: int
    index_layers: tuple[int, ...] = ()
    index_dim: int = 0

    @classmethod
    def from_config(cls, config: Any) -> "LatentShape | None":
        """The shape that a text config describes; None for a model without latent attention."""
        latent_dim = getattr(config, "kv_lora_rank", None)
        if latent_dim is None:
            return None
        index_dim = getattr(config, "index_head_dim", None)
        if index_dim is None:
            return cls(latent_dim, config.qk_rope_head_dim)
        num_layers = config.num_hidden_layers
        kinds = (getattr(config, "indexer_types", None) or ["full"] * num_layers)[:num_layers]
        layers = tuple(i for i, kind in enumerate(kinds) if kind == "full")
        return cls(latent_dim, config.qk_rope_head_dim, layers, index_dim)

    def token_bytes(self, num_layers: int, itemsize: int, cotangent_itemsize: int = 0) -> int:
        """Bytes of one token's state: latents, rotary and index keys.

        L * (r + dr) * (itemsize + cotangent_itemsize) + Li * Di * itemsize
        """
        latents = num_layers * (self.latent_dim + self.rotary_dim)
        index_keys = len(self.index_layers) * self.index_dim
        return latents * (itemsize + cotangent_itemsize) + index_keys * itemsize


@contextmanager
def attending_to_latents(decoder: nn.Module) -> Iterator[None]:
    """Let layers with latent attention leave latents as they are inside, and indexers select among
    pages."""
    with ExitStack() as stack:
        for name, module in decoder.named_modules():
            if hasattr(module, "kv_b_proj") and hasattr(module, "expand_kv"):
                _check_projection(name, module.kv_b_proj)
                _replace(stack, module, "expand_kv", _keep_latents)
            elif type(module).__name__ in _ROTARY_FUNCTION:
                # accelerate's hooks keep the forward that they wrap under this name.
                forward = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
                _replace(stack, module, forward, partial(_select, module, name))
        yield


def _replace(stack: ExitStack, module: nn.Module, name: str, function: Any) -> None:
    before = vars(module).get(name)
    setattr(module, name, function)
    if before is None:
        stack.callback(delattr, module, name)
    else:
        stack.callback(setattr, module, name, before)


def _check_projection(name: str, kv_b_proj: Any) -> None:
    """Raise if the projection is not linear: what it gives for the identity is not its weights."""
    biases = [bias for bias, _ in kv_b_proj.named_parameters() if "bias" in bias]
    if biases:
        raise ConfigError(
            f"{name}.kv_b_proj has a bias ({biases[0]}), and latent attention needs a projection "
            "without one, which it applies to the identity instead of to tokens. Leave lora_bias "
            "out, or kv_b_proj out of target_modules."
        )


def _keep_latents(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """What takes the place of a module's `expand_kv`."""
    return latents, rotary


# ---------------------------------------------------------------- attention


def latent_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; returns `[B, T, H, Dv]`.

    Args:
        query: `[B, H, T, Dn + dr]`.
        key, value: latents `[B, 1, T', r]` and rotary keys `[B, 1, T', dr]`.
        indices: what the layer's indexer, or one before it, has returned.
    """
    handle = required_handle(module, kwargs, dropout)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rotary_dim = value.shape[-1]
    to_keys, to_values = _projections(module, key, query.shape[-1] - rotary_dim, handle.memo)
    plain, rotary = query.split([query.shape[-1] - rotary_dim, rotary_dim], dim=-1)
    absorbed = torch.cat([torch.einsum("bhtd,rhd->bhtr", plain, to_keys), rotary], dim=-1)
    options = AttentionOptions(scale, is_latent=True)
    out = paged_attention(absorbed, key, value, None, handle, options, indices)
    return torch.einsum("bhtr,rhd->bthd", out, to_values), None


def _projections(
    module: Any, latents: Tensor, key_dim: int, memo: dict[str, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """W^K `[r, H, Dn]` and W^V `[r, H, Dv]` of a layer; once for all tokens of a generation."""
    both = memo.get("kv_b_proj") if memo is not None else None
    if both is None:
        identity = torch.eye(latents.shape[-1], dtype=latents.dtype, device=latents.device)
        both = module.kv_b_proj(identity).unflatten(-1, (module.num_heads, -1))
        if memo is not None:
            memo["kv_b_proj"] = both
    return both[..., :key_dim], both[..., key_dim:]


def _some_mask(batch_size: int, device: Any = None, **_: Any) -> Tensor:
    """A mask for indexers that slice one; nobody reads it."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


ALL_ATTENTION_FUNCTIONS.register(LATENT_ATTENTION_NAME, latent_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(LATENT_ATTENTION_NAME, _some_mask)


# ---------------------------------------------------------------- indexers


def check_indexers(decoder: nn.Module) -> None:
    """Raise `UnsupportedModelError` if `decoder` has an indexer that is not served."""
    for module in decoder.modules():
        name = type(module).__name__
        if name.endswith("Indexer") and name not in _ROTARY_FUNCTION:
            raise UnsupportedModelError(
                f"{name} selects tokens in a way that is not served; served are "
                f"{', '.join(sorted(_ROTARY_FUNCTION))}. Use TRL's own GRPOTrainer for this model."
            )


def indexer_parameters(model: nn.Module) -> set[int]:
    """The ids of all parameters of indexers, adapters on them included."""
    indexers = [m for m in model.modules() if type(m).__name__ in _ROTARY_FUNCTION]
    return {id(parameter) for module in indexers for parameter in module.parameters()}


@torch.no_grad()
def _select(
    module: Any,
    name: str,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    **_: Any,
) -> Tensor:
    """What takes the place of an indexer's forward; returns what `select_tokens` does."""
    layer: Any = None if cache is None else cache.layers[module.layer_idx]
    if not hasattr(layer, "update_index"):
        raise PromptStateError(
            f"{type(module).__name__} ran without LongStraw's cache, so it cannot see the prompt. "
            "The layer dropped the cache (re-entrant gradient checkpointing does): use "
            'gradient_checkpointing_kwargs={"use_reentrant": False}, or '
            "gradient_checkpointing=False."
        )
    q, keys, weights = _index_projections(module, hidden_states, q_resid, position_embeddings)
    rotary_dim = module.qk_rope_head_dim
    rotated, rest, handle = layer.update_index(
        *keys.unsqueeze(1).split([rotary_dim, keys.shape[-1] - rotary_dim], dim=-1)
    )
    if handle.kept is not None and (kept := handle.kept.take()) is not None:
        return kept[0]
    own_keys = torch.cat([rotated, rest], dim=-1).squeeze(1)
    scale, k = module.softmax_scale, module.index_topk
    selection = select_tokens(q, weights, own_keys, handle, scale, k)
    if handle.kept is not None:
        handle.kept.put(selection)
    if isinstance(cache, ChunkCache):
        positions = handle.q_start + torch.arange(selection.shape[1], device=q.device)
        cache.choices.note(name, fingerprint(selection, positions))
    return selection


def _index_projections(
    module: Any, hidden: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Index queries `[B, T, H, D]`, keys `[B, T, D]` and weights of heads `[B, T, H]`."""
    source: Any = sys.modules[type(module).__module__]
    rotate = getattr(source, _ROTARY_FUNCTION[type(module).__name__])
    dim = module.qk_rope_head_dim
    q = module.wq_b(q_resid).unflatten(-1, (module.n_heads, module.head_dim))
    k = module.k_norm(module.wk(hidden)).unsqueeze(2)
    q_rot, k_rot = rotate(q[..., :dim], k[..., :dim], *position_embeddings, unsqueeze_dim=2)
    q = torch.cat([q_rot, q[..., dim:]], dim=-1)
    k = torch.cat([k_rot, k[..., dim:]], dim=-1).squeeze(2)
    weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype)).float()
    return q, k, weights * module.n_heads**-0.5
