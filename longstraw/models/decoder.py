"""One causal LM as a decoder that runs chunks and a head that turns hidden states into logits.

Knows transformers and PEFT; knows nothing of groups, losses or where pages live.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longstraw_kernels.availability import choose
from longstraw_kernels.selective_logprob import IMPLEMENTATIONS as SCORE_IMPLEMENTATIONS

from ..attention import ATTENTION_NAME, attend_with
from ..errors import DataError
from ..state import Choices, ChunkCache, StateIsComplete, cotangent_dtype_for
from .choosers import noting_experts
from .gated_deltanet import DeltaNetShape, mixing_with_our_state
from .mla_dsa import (
    LATENT_ATTENTION_NAME,
    LatentShape,
    attending_to_latents,
    check_indexers,
    indexer_parameters,
)
from .registry import Family, check_checkpointing, check_model, refuse_checkpointing
from .run_as import run_as

_BEYOND_POSITIONS = (
    ", extend the positions (model_init_kwargs={'rope_parameters': {'rope_type': 'yarn', ...}, "
    "'max_position_embeddings': ...}), or run beyond them knowingly with allow_extrapolation=True "
    "(longstraw_allow_extrapolation=True in the trainer)."
)


@dataclass(frozen=True)
class PolicyVersion:
    """Which weights a state was captured with. Two are equal when nothing was written between.

    Attributes:
        step: updates announced by `Engine.weights_changed`.
        writes: writes to the trainable parameters, as the backend counts them.
        adapters: the active PEFT adapters, None when they are switched off.
    """

    step: int
    writes: int
    adapters: tuple[str, ...] | None


@dataclass(frozen=True)
class ChunkOutput:
    """What a chunk's forward gives beside the state in its cache.

    Attributes:
        hidden: `[B, C, E]`, after the final norm; empty, `[B, C, 0]`, where the forward ended with
            the last layer's state.
        router_logits: per expert layer `[B*C, num_experts]`; empty unless asked for.
    """

    hidden: Tensor
    router_logits: tuple[Tensor, ...] = ()


class Decoder:
    """A causal LM, possibly wrapped by PEFT, with paged attention switched on where it runs.

    Attributes:
        model: what was given.
        base: the causal LM below PEFT's wrapper.
        family: what `check_model` found.
        recurrence: the sizes of its recurrent layers; None for attention alone.
        latent: the sizes of its latent attention; None for keys and values of heads.
        autocast: makes the context for forwards (mixed precision).
        fp32_head: whether logits are computed in fp32, outside `autocast`.
        cotangent_dtype: of the cotangents that `state_bytes` counts, see `EngineConfig`.
        device: where the model will run, if it is not there yet.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        allow_extrapolation: bool = False,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        fp32_head: bool = False,
        cotangent_dtype: str = "float32",
        device: torch.device | None = None,
    ) -> None:
        self.model = model
        self.base: PreTrainedModel = (
            model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[assignment,operator]
        )
        self.family: Family = check_model(self.base)
        self.recurrence = DeltaNetShape.from_config(self.config)
        self.latent = LatentShape.from_config(self.config)
        check_indexers(self.base)
        self.autocast = autocast
        self.fp32_head = fp32_head
        self.cotangent_dtype = cotangent_dtype
        self.decoder: nn.Module = self.base.get_decoder()
        self.allow_extrapolation = allow_extrapolation
        self._device = device
        self._project: Callable[[Tensor], Tensor] | None = None
        self._is_attached = False
        self._choices: Choices | None = None

    @property
    def config(self) -> Any:
        return self.base.config.get_text_config(decoder=True)

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def recurrent_layers(self) -> frozenset[int]:
        """Layers whose state is a snapshot, and not keys and values of each token."""
        return self.recurrence.layers if self.recurrence is not None else frozenset()

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Layers with an indexer, whose index keys are kept beside their state."""
        return self.latent.index_layers if self.latent is not None else ()

    @property
    def index_places(self) -> dict[int, int]:
        """The number under which a segment's state keeps the index keys of a layer: those behind
        the numbers of layers."""
        return {layer: self.num_layers + i for i, layer in enumerate(self.index_layers)}

    @property
    def device(self) -> torch.device:
        return self._device or next(self.base.parameters()).device

    @property
    def is_checkpointed(self) -> bool:
        """Whether layers run again in their backward (gradient checkpointing, while training)."""
        return any(
            layer.gradient_checkpointing and layer.training
            for layer in self.decoder.modules()
            if isinstance(layer, GradientCheckpointingLayer)
        )

    @property
    def num_experts_per_token(self) -> int | None:
        """Experts each token is routed to; None for a dense model."""
        field = self.family.router_top_k
        return None if field is None else getattr(self.config, field)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Those that can have a gradient: what selects tokens has none, and no zeros either, which
        weight decay would move."""
        selecting = indexer_parameters(self.model)
        return [p for p in self.model.parameters() if p.requires_grad and id(p) not in selecting]

    def policy_version(self, step: int, writes: int) -> PolicyVersion:
        """The version that a capture made now would have; see `PolicyVersion`."""
        return PolicyVersion(step, writes, self._active_adapters())

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attend through pages, and keep the cache under gradient checkpointing, inside."""
        if self._is_attached:
            yield
            return
        check_checkpointing(self.base, self.family)
        layers = [m for m in self.decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
        with ExitStack() as stack:
            self._is_attached = True
            stack.callback(setattr, self, "_is_attached", False)
            name = ATTENTION_NAME if self.latent is None else LATENT_ATTENTION_NAME
            stack.enter_context(attend_with(self.decoder, name))
            stack.enter_context(mixing_with_our_state(self.decoder))
            stack.enter_context(attending_to_latents(self.decoder))
            stack.enter_context(noting_experts(self.decoder, lambda: self._choices))
            for layer in layers:
                # Our caches only read, so a recomputed layer sees the same states.
                layer._can_checkpoint_with_cache = True
                stack.callback(delattr, layer, "_can_checkpoint_with_cache")
            yield

    def forget_last_prompt(self) -> None:
        """Drop what a multimodal class remembers of where the prompt before this one stood.

        Its `generate` adds that to the positions of whatever continues a cache, row by row. And
        what a chunk's forward chose: a generation is none.
        """
        self._choices = None
        for module in self.base.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None  # type: ignore[assignment]

    def refuse_checkpointing(self) -> None:
        """Raise `ConfigError` if the family loses its cache under gradient checkpointing."""
        refuse_checkpointing(self.family)

    def run_chunk(
        self, token_ids: Tensor, positions: Tensor, cache: ChunkCache, *, with_router: bool = False
    ) -> ChunkOutput:
        """Run `[B, C]` tokens that stand at `positions` `[C]`."""
        options = {"output_router_logits": True} if with_router else {}
        self._choices = cache.choices  # until the next one: layers may be recomputed in a backward
        try:
            with self.autocast():
                output = self.decoder(
                    input_ids=token_ids,
                    position_ids=positions.expand(token_ids.shape),
                    cache=cache,
                    use_cache=False,  # keep ours; do not make one
                    **options,
                )
        except StateIsComplete:
            return ChunkOutput(torch.empty(*token_ids.shape, 0, device=token_ids.device))
        router_logits = tuple(output.router_logits) if with_router else ()
        return ChunkOutput(output.last_hidden_state, router_logits)

    @property
    def head(self) -> nn.Module:
        """The module that projects to logits; with a trained copy of PEFT's, the one in use."""
        head: Any = self.base.get_output_embeddings()
        assert head is not None, "a causal LM without a head"
        copies = getattr(head, "modules_to_save", None)
        if copies is None:
            return head
        is_off = head.disable_adapters or not head.active_adapters
        return head.original_module if is_off else copies[head.active_adapters[0]]

    def at_head(self, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """`function(hidden)`, run as the head's own forward.

        Hooks on the head that bring its weights (ZeRO-3's) then work once for all slices of rows
        that `function` projects with `logits`.
        """
        head = self.head
        self._project = head.forward
        return run_as(head, function, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[N, E]` -> `[N, V]` in fp32 (fp64 for fp64), with the model's final softcap.

        For use in `at_head`, and in the backward of what ran there.
        """
        head = self._project
        assert head is not None, "logits outside of at_head"
        # Autocast would round the logits of an fp32 head again.
        off = torch.autocast(hidden.device.type, enabled=False)
        with off if self.fp32_head else self.autocast():
            logits = head(hidden.float() if self.fp32_head else hidden).to(hidden.device)
        if logits.dtype != torch.float64:
            logits = logits.float()
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def plain_head(self, hidden: Tensor, impl: str) -> nn.Linear | None:
        """The head, if `logits` is a product with its weight alone and Triton's kernels take it.

        None for a head with adapters, a softcap, a copy on another device or under autocast, and
        where `impl` (see `impl_beside`) computes by the definition. For use as `logits` is.
        """
        head = getattr(self._project, "__self__", None)
        is_plain = getattr(self._project, "__func__", None) is nn.Linear.forward
        if not is_plain or getattr(self.config, "final_logit_softcapping", None) is not None:
            return None
        assert isinstance(head, nn.Linear)
        with self.autocast():
            casts = torch.is_autocast_enabled(hidden.device.type) and not self.fp32_head
        dtype = torch.float32 if self.fp32_head else hidden.dtype
        if casts or head.weight.dtype != dtype or head.weight.device != hidden.device:
            return None
        chosen = choose(impl, SCORE_IMPLEMENTATIONS, head.weight)
        return head if chosen == "triton" else None

    def state_bytes(self, num_tokens: int, with_cotangents: bool) -> int:
        """Bytes of the state that `num_tokens` add up to: keys and values of La attention layers.

        La * 2 * K * D * itemsize     (+ La * 2 * K * D * 4 for fp32 cotangents, * 2 for bf16)

        For latent attention see `LatentShape.token_bytes`.
        """
        config = self.config
        if self.latent is not None:
            cotangents = cotangent_dtype_for(self.base.dtype, self.cotangent_dtype).itemsize
            sizes = self.base.dtype.itemsize, cotangents if with_cotangents else 0
            return self.latent.token_bytes(self.num_layers, *sizes) * num_tokens
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = self.base.dtype
        itemsize = dtype.itemsize
        if with_cotangents:
            itemsize += cotangent_dtype_for(dtype, self.cotangent_dtype).itemsize
        num_layers = self.num_layers - len(self.recurrent_layers)
        return num_layers * 2 * heads * dim * itemsize * num_tokens

    def snapshot_bytes(self, sp_size: int = 1, *, of_cotangents: bool = False) -> int:
        """Bytes of one snapshot of all recurrent layers, on each of `sp_size` ranks.

        Lr * (Hv * Dk * Dv * 4 + channels * (kernel - 1) * itemsize) / sp

        Args:
            of_cotangents: those of its cotangents instead, which are in fp32 altogether.
        """
        if self.recurrence is None:
            return 0
        dtype = self.base.dtype
        sums = cotangent_dtype_for(dtype, "float32")
        recurrent, conv = self.recurrence.snapshot_numel(sp_size)
        per_layer = recurrent * sums.itemsize
        per_layer += conv * (sums if of_cotangents else dtype).itemsize
        return len(self.recurrence.layers) * per_layer

    def check_positions(self, num_positions: int) -> None:
        """Raise if the model was not made for this many positions."""
        limit = getattr(self.config, "max_position_embeddings", None)
        learned = self.family.has_learned_positions
        if limit is None or num_positions <= limit or (self.allow_extrapolation and not learned):
            return
        way_out = "." if learned else _BEYOND_POSITIONS
        raise DataError(
            f"prompt and response need {num_positions:,} positions; the model has "
            f"max_position_embeddings={limit:,}. Nothing was truncated. "
            f"Shorten the prompt{way_out}"
        )

    def _active_adapters(self) -> tuple[str, ...] | None:
        for module in self.base.modules():
            active: Any = getattr(module, "active_adapters", None)
            if isinstance(active, list) and hasattr(module, "disable_adapters"):
                return None if module.disable_adapters else tuple(active)
        return ()
