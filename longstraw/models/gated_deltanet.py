"""Gated DeltaNet: layers that keep a matrix per head in place of keys and values.

    S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) S_(t-1)^T k_t))^T        o_t = S_t^T q_t

q, k and v come out of a short causal convolution. So what later tokens read is S, in fp32, and the
last inputs of the convolution: constant in the number of tokens.

The models' own forward writes this state in place, runs single tokens through a kernel without a
backward, and cannot divide heads over ranks. `mix` is the same layer with the state handed in and
out; projections, convolution, recurrence and norm are the model's.

Source:
    Yang, Kautz, Hatamizadeh 2024, https://arxiv.org/abs/2412.06464.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, PromptStateError
from ..state import ChunkRecurrence, DecodeRecurrence
from .run_as import run_as

MAX_INDEX = 2**31
"""Elements that flash-linear-attention's kernels can index."""


@dataclass(frozen=True)
class DeltaNetShape:
    """The sizes of a model's Gated DeltaNet layers, from its config.

    Attributes:
        layers: which layers of the decoder they are.
        num_key_heads, num_value_heads: Hk and Hv; Hk divides Hv.
        key_dim, value_dim: of a head.
        kernel_size: of the convolution.
    """

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    @classmethod
    def from_config(cls, config: Any) -> "DeltaNetShape | None":
        """The shape that a text config describes; None for a model without such layers."""
        kinds = getattr(config, "layer_types", None) or ()
        layers = frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention")
        if not layers:
            return None
        return cls(
            layers,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        )

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def snapshot_numel(self, sp_size: int = 1) -> tuple[int, int]:
        """Numbers in one layer's recurrent state, and in its convolution inputs, on one rank."""
        recurrent = self.num_value_heads * self.key_dim * self.value_dim
        return recurrent // sp_size, self.num_channels * (self.kernel_size - 1) // sp_size

    def check_ranks(self, sp_size: int) -> None:
        """Raise `ConfigError` if heads cannot be divided over `sp_size` ranks."""
        if self.num_key_heads % sp_size == 0:
            return
        heads = self.num_key_heads
        raise ConfigError(
            f"sp_size={sp_size} (longstraw_sp_size in the trainer): the model's Gated DeltaNet "
            f"layers have {heads} key heads and {self.num_value_heads} value heads, which ranks "
            "that share a prompt divide among them. Set it to one of "
            f"{', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}."
        )

    def check_chunk(self, chunk_size: int, num_rows: int, sp_size: int) -> None:
        """Raise `ConfigError` if a pass has more elements than the kernels can index."""
        widest = max(self.num_value_heads * d for d in (self.key_dim, self.value_dim)) // sp_size
        if num_rows * chunk_size * widest < MAX_INDEX:
            return
        raise ConfigError(
            f"chunk_size={chunk_size:,} (longstraw_chunk_size in the trainer) with replay_batch "
            f"{num_rows:,}: kernels of Gated "
            f"DeltaNet index {num_rows:,} * {chunk_size:,} * {widest:,} elements with 31 bits. "
            f"Lower it to {(MAX_INDEX - 1) // (num_rows * widest):,} or less, or lower "
            "replay_batch."
        )


@contextmanager
def mixing_with_our_state(decoder: nn.Module) -> Iterator[None]:
    """Let the Gated DeltaNet layers of `decoder` run as `mix` inside."""
    with ExitStack() as stack:
        for module in decoder.modules():
            if _is_gated_deltanet(module):
                # accelerate's hooks keep the forward that they wrap under this name.
                name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
                before = vars(module).get(name)
                setattr(module, name, partial(_forward, module))
                if before is None:
                    stack.callback(delattr, module, name)
                else:
                    stack.callback(setattr, module, name, before)
        yield


def _is_gated_deltanet(module: nn.Module) -> bool:
    return type(module).__name__.endswith("GatedDeltaNet")


def _forward(
    module: Any,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """What takes the place of a module's forward."""
    layer = None if cache is None else cache.layers[module.layer_idx]
    if not isinstance(layer, (ChunkRecurrence, DecodeRecurrence)):
        raise PromptStateError(
            f"{type(module).__name__} ran without LongStraw's cache, so it cannot see the prompt. "
            "The layer dropped the cache (re-entrant gradient checkpointing does): use "
            'gradient_checkpointing_kwargs={"use_reentrant": False}, or '
            "gradient_checkpointing=False."
        )
    assert attention_mask is None, "padding stands on the right, behind all real tokens"
    assert not layer.decodes or hidden_states.shape[1] == 1, "decoding takes one token at a time"
    return mix(module, hidden_states, layer)


def mix(module: Any, hidden: Tensor, layer: ChunkRecurrence | DecodeRecurrence) -> Tensor:
    """One Gated DeltaNet layer on this rank's tokens of a chunk.

    Args:
        module: transformers' layer.
        hidden: `[B, w, E]`.
        layer: gives the state before the chunk and takes the one behind it.

    Returns:
        `[B, w, E]`.
    """
    travel = layer.travel
    heads = _Heads(module, travel.rank, travel.size)
    qkv, z, b, a = _project(module, hidden)
    parts = [*qkv, b, a]
    q, k, v, b, a = travel.to_heads([x.unflatten(-1, (travel.size, -1)) for x in parts])
    before = layer.read_state(hidden.shape[0], hidden.device)
    mixed, conv = _convolve(module, torch.cat([q, k, v], dim=-1), before and before[1], heads)
    out, recurrent = _recur(module, mixed, b, a, before and before[0], heads, layer.decodes)
    layer.take_state(recurrent, conv)
    out = travel.from_heads(out)
    normed = module.norm(out.reshape(-1, out.shape[-1]), z.reshape(-1, out.shape[-1]))
    return module.out_proj(normed.view(*hidden.shape[:2], -1))


def _project(
    module: Any, hidden: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], *tuple[Tensor, ...]]:
    """(q, k, v) before the convolution, z, b and a; `[B, w, heads * dim]` each, heads in order."""
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next packs them, by key head
        packed = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        q, k, v, z, b, a = module.fix_query_key_value_ordering(*packed)
        return (q.flatten(2), k.flatten(2), v.flatten(2)), z.flatten(2), b, a
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    q, k, v = module.in_proj_qkv(hidden).split(sizes, dim=-1)
    return (q, k, v), module.in_proj_z(hidden), module.in_proj_b(hidden), module.in_proj_a(hidden)


class _Heads:
    """The part of a module's per-head weights that belongs to one rank's heads."""

    def __init__(self, module: Any, rank: int, size: int) -> None:
        self.size = size
        num_heads = module.num_v_heads // size
        self.value_heads = slice(rank * num_heads, (rank + 1) * num_heads)
        self._runs: list[range] = []
        start = 0
        for width in (module.key_dim, module.key_dim, module.value_dim):
            first = start + rank * (width // size)
            self._runs.append(range(first, first + width // size))
            start += width

    def channels(self, weight: Tensor) -> Tensor:
        """Rows of a tensor `[channels, ..]` that these heads' q, k and v pass through."""
        if self.size == 1:
            return weight
        return torch.cat([weight[run.start : run.stop] for run in self._runs])


def _convolve(module: Any, x: Tensor, tail: Tensor | None, heads: _Heads) -> tuple[Tensor, Tensor]:
    """The causal convolution of `x` `[B, C, channels]`, and the inputs that the next chunk needs.

    Inputs before the chunk stand in front of it, so that no kernel ever sees less than its width.
    """
    x = x.transpose(1, 2)
    num_before = module.conv_kernel_size - 1
    if tail is None:
        tail = x.new_zeros(*x.shape[:2], num_before)
    inputs = torch.cat([tail.to(x.dtype), x], dim=-1)
    filters: nn.Conv1d = module.conv1d

    def convolve(inputs: Tensor) -> Tensor:
        return _function(module, "causal_conv1d_fn")(
            inputs,
            heads.channels(filters.weight).squeeze(1),
            None if filters.bias is None else heads.channels(filters.bias),
            activation=module.activation,
        )

    out = run_as(filters, convolve, inputs)
    # A copy: a view would keep the whole chunk's inputs, in every layer, until the chunk is done.
    return out[..., num_before:].transpose(1, 2), inputs[..., -num_before:].clone()


def _recur(
    module: Any,
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    before: Tensor | None,
    heads: _Heads,
    decodes: bool,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over a chunk: outputs `[B, C, heads, Dv]`, and the state behind it."""
    sizes = [w // heads.size for w in (module.key_dim, module.key_dim, module.value_dim)]
    q, k, v = mixed.split(sizes, dim=-1)
    # float: in half precision exp(A) may overflow.
    rate = module.A_log[heads.value_heads].float().exp()
    g = -rate * nn.functional.softplus(a.float() + module.dt_bias[heads.value_heads])
    # The kernel for single tokens has no backward.
    rule = "torch_recurrent_gated_delta_rule" if decodes else "torch_chunk_gated_delta_rule"
    return _function(module, rule)(
        q.unflatten(-1, (-1, module.head_k_dim)),
        k.unflatten(-1, (-1, module.head_k_dim)),
        v.unflatten(-1, (-1, module.head_v_dim)),
        g=g,
        beta=b.sigmoid(),
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def _function(module: Any, name: str) -> Callable[..., Any]:
    """A function that the model would call: flash-linear-attention's or causal-conv1d's where they
    are installed, else its own in plain torch."""
    return getattr(sys.modules[type(module).__module__], name)
