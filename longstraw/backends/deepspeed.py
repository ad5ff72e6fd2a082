"""DeepSpeed: many backwards, one reduction, one step, at ZeRO stages 0 to 3.

A thin layer on `DeepSpeedEngine`. The model is run below the engine (decoder and head, chunk by
chunk), so what `engine.forward` does for one forward is done here per pass, and the gradient is
accumulated in one of two ways:

* local: gradients stay on the parameters, in fp32, and are reduced once per step. For adapters.
* partitioned: each backward is reduced into the ranks' partitions at once, so that no rank ever
  holds a full-size gradient. For full fine-tuning under ZeRO-2 and 3.

Scale: every rank's gradient is that of its own loss, divided by the gradient accumulation steps by
whoever made the loss (TRL's does). DeepSpeed takes the mean over all ranks, at every stage, as no
mesh and no model-parallel unit is ever given to it. Nothing else scales: bf16 and fp32 need no loss
scale, fp16 is refused.

Experts that AutoEP divides over ranks (`expert_parallel.py`) put collectives into every pass.
"""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import Pass
from ..errors import ConfigError, PromptStateError
from .base import Backend, Finalized
from .expert_parallel import (
    check_expert_layers,
    clip_gradients,
    expert_layers,
    expert_parallel_size,
    global_norm,
    prepare_autoep,
    record_raw_logits,
    whole_experts,
    whole_state_dict,
)
from .torch import accumulate_in_fp32, fill_with_zeros, grad_dtypes, gradient_norm

_EVERY_PASS = frozenset({Pass.CAPTURE, Pass.SCORE, Pass.BACKWARD})
# Below this share of trainable parameters their full-size fp32 gradients weigh less than the rest.
_FEW_TRAINABLE = 0.1


class DeepSpeedBackend(Backend):
    """Drives a `DeepSpeedEngine` made by `deepspeed.initialize` (or `accelerator.prepare`).

    Args:
        engine: the engine around the model that passes run on.
        accumulate: "local", "partitioned", or "auto": partitioned where the stage partitions
            gradients and more than a tenth of the parameters are trainable.

    Attributes:
        stage: of ZeRO.
        accumulate: "local" or "partitioned".
        ep_size: ranks that the experts are divided over.
        has_expert_layers: whether AutoEP has taken the place of expert blocks, also for one rank.

    Raises:
        ConfigError: a setting of the engine that would make the gradient wrong.
    """

    def __init__(self, engine: Any, accumulate: str = "auto") -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.stage = int(engine.zero_optimization_stage())
        _check_engine(engine, self.stage)
        check_expert_layers(engine)
        record_raw_logits(engine.module)
        self.ep_size = expert_parallel_size(engine.module)
        self.has_expert_layers = bool(expert_layers(engine.module))
        if self.has_expert_layers and self.stage == 3:
            # DeepSpeed raises; transformers calls it to save what is trained.
            engine._zero3_consolidated_16bit_state_dict = partial(whole_state_dict, engine)
        is_trained = hasattr(self.optimizer, "param_groups")
        self.accumulate = _choose(engine, self.stage, accumulate) if is_trained else "local"
        is_partitioned = self.accumulate == "partitioned"
        if self.stage == 3 or self.ep_size > 1:
            self.turns = _EVERY_PASS
        elif is_partitioned:
            self.turns = frozenset({Pass.BACKWARD})
        # ZeRO-3 opens its books at the top of the graph; buckets must fill alike on all ranks; and
        # a rank's experts wait for the gradients of other ranks' tokens.
        self.needs_anchor = self.stage == 3 or is_partitioned or self.ep_size > 1
        self.keeps_gradients = not is_partitioned and self.stage < 3 and self.ep_size == 1
        self.gathers_weights = self.stage == 3
        self._num_backwards = 0
        self._is_emptied = False
        self._is_in_backward = self._is_broken = False

    # ---------------------------------------------------------------- passes

    def count_writes(self, parameters: Sequence[nn.Parameter]) -> int:
        # Weights are gathered, released and written through `.data`, which torch does not count.
        return int(self.engine.global_steps)

    def begin_update(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._is_broken:
            raise PromptStateError(
                f"a backward under ZeRO-{self.stage} was interrupted earlier, and DeepSpeed's "
                "books of it cannot be closed. Start again from the last checkpoint."
            )
        if self.accumulate == "partitioned":
            return
        accumulate_in_fp32(parameters)
        if hasattr(self.optimizer, "_coalesce_grad_reduction"):
            self.optimizer._coalesce_grad_reduction = True

    def begin_pass(self) -> None:
        """What a forward through the engine does: start at the beginning of the prefetch order."""
        if self.stage == 3:
            self._parameter_offload().get_param_coordinator().reset_step()

    def end_pass(self) -> None:
        """Release what was fetched ahead: a forward's order is the beginning of a backward's."""
        if self.stage == 3:
            self._parameter_offload().get_param_coordinator()._clean_inflight_param_registry()

    def backward(self, roots: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
        self._num_backwards += 1
        self._is_in_backward = True
        if self.accumulate == "local":
            torch.autograd.backward(list(roots), list(cotangents))
            if self.stage == 3:
                # A raw backward ends without the engine's epilogue, which re-partitions weights of
                # modules whose inputs need no gradient (the embedding).
                self._parameter_offload().release_backward_leftovers()
        else:
            # `engine.forward` would count this: else each backward overwrites the one before.
            self.optimizer.clear_backward_seen_flag()
            self.engine.set_gradient_accumulation_boundary(False)
            self.engine.backward(_CotangentSource.apply(cotangents, *roots), scale_wrt_gas=False)
        self._is_in_backward = False

    @property
    def has_gradient(self) -> bool:
        return self._num_backwards > 0

    @contextmanager
    def weights_gathered(self, num_in_step: int = 1) -> Iterator[None]:
        # Ranks that decode together may send each other tokens as in any other pass.
        in_step = num_in_step % self.ep_size == 0
        with nullcontext() if in_step else whole_experts(self.engine.module):
            if self.stage < 3:
                yield
                return
            # A hook on the top module resets the order at every forward, with collectives in it.
            coordinator = self._parameter_offload().get_param_coordinator()
            with patch.object(coordinator, "reset_step", lambda: None):
                yield

    def whole_state_dict(
        self, *, on_every_rank: bool = False, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """The weights of all experts and of the rest, under transformers' names. Collective.

        Args:
            on_every_rank: whether others than the first get more than an empty dict.
            exclude_frozen_parameters: leave out what is not trained: beside an adapter all experts
                of a large model would come together on one rank.
        """
        return whole_state_dict(
            self.engine,
            on_every_rank=on_every_rank,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )

    def _parameter_offload(self) -> Any:
        return getattr(self.optimizer, "parameter_offload", self.optimizer)

    # ---------------------------------------------------------------- finalize and step

    def finalize(self, parameters: Sequence[nn.Parameter]) -> Finalized:
        if self.accumulate == "partitioned":
            self.engine.set_gradient_accumulation_boundary(True)
            self.optimizer.finalize_gradient_accumulation_boundary()
            return Finalized(None)
        if self.stage < 3:
            fill_with_zeros(parameters)
        elif any(parameter.grad is None for parameter in parameters):
            # DeepSpeed would take what it kept of the step before.
            raise PromptStateError(
                "a trained parameter was reached by no backward, which local accumulation under "
                "ZeRO-3 cannot serve. Freeze what is not used, or set accumulate='partitioned' "
                "(longstraw_accumulate in the trainer)."
            )
        self.engine.set_gradient_accumulation_boundary(True)
        self._reduce()
        if self.stage > 0 or self.engine.bfloat16_enabled():
            return Finalized(None)  # the optimizer looks itself, and skips
        norm = global_norm(parameters) if self.ep_size > 1 else gradient_norm(parameters)
        if self.ep_size > 1:
            clip_gradients(parameters, norm, self.engine.gradient_clipping())
        self.engine._global_grad_norm = norm  # a plain torch optimizer, which computes none
        is_finite = bool(torch.isfinite(norm))
        if not is_finite:
            self.discard(parameters)
            self._is_emptied = True  # a plain torch optimizer would write NaN into the weights
        return Finalized(is_finite)

    def _reduce(self) -> None:
        """One reduction of what stayed on the parameters."""
        optimizer = self.optimizer
        if not hasattr(optimizer, "_coalesce_grad_reduction"):
            if type(optimizer).__name__ == "BF16_Optimizer":
                optimizer.backward_epilogue()
            self.engine.allreduce_gradients()
            return
        optimizer._coalesce_grad_reduction = False
        if getattr(optimizer, "use_grad_accum_attribute", False):
            optimizer.fill_grad_accum_attribute()  # else the reduced gradient would be zero
        if self.stage == 3:
            self.engine._flush_coalesced_reduction_zero3(optimizer)
        else:
            self.engine._flush_coalesced_reduction_zero12(optimizer)

    def step(self) -> bool:
        """One optimizer step; returns whether it changed the weights."""
        self._num_backwards = 0
        if self._is_emptied:
            self._is_emptied = False
            self.engine.skipped_steps += 1
            return False
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        return self.engine.was_step_applied()

    def discard(self, parameters: Sequence[nn.Parameter]) -> None:
        optimizer = self.optimizer
        self._num_backwards = 0
        self._is_broken = self._is_in_backward and bool(self.turns)
        if hasattr(optimizer, "_coalesce_grad_reduction"):
            optimizer._coalesce_grad_reduction = False
        for parameter in parameters:
            parameter.grad = None
        if self.stage in (1, 2) and hasattr(optimizer, "averaged_gradients"):
            for books in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
                for key in list(books):
                    books[key] = None
        if self.stage > 0:
            optimizer.zero_grad()
        if hasattr(optimizer, "clear_hp_grads"):
            optimizer.clear_hp_grads()
        if hasattr(optimizer, "_epilogue_ran_this_backward"):
            optimizer._epilogue_ran_this_backward = False
        if hasattr(optimizer, "micro_step_id"):
            optimizer.micro_step_id = 0 if self.stage == 3 else -1

    def describe(self, parameters: Sequence[nn.Parameter]) -> str:
        count = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
        if self.accumulate == "local":
            how = f"accumulate locally in {grad_dtypes(parameters)}, reduced once per step"
        else:
            how = f"are partitioned at each backward, in {self._partition_dtype()}"
        experts = f"; experts are divided over {self.ep_size} ranks" if self.ep_size > 1 else ""
        return f"DeepSpeed ZeRO-{self.stage}: gradients of {count:,} parameters {how}{experts}"

    def _partition_dtype(self) -> str:
        """What partitions add up in. Left to itself DeepSpeed takes the model's."""
        dtype = self.engine.get_data_types()[1]
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype))


class _CotangentSource(torch.autograd.Function):
    """A scalar whose backward emits given cotangents, for an engine that takes a scalar loss.

    Not `sum(root * cotangent)`: that rounds once more, and makes NaN of infinity times zero.
    """

    @staticmethod
    def forward(ctx, cotangents, *roots):  # type: ignore[no-untyped-def]
        ctx.cotangents = cotangents
        return roots[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        return None, *ctx.cotangents


# -------------------------------------------------------------------- before and around an engine


def prepare_deepspeed(*, on_cpu: bool) -> None:
    """Call before anything else imports deepspeed.

    AutoEP is told of what it does not know; see `prepare_autoep`.

    On the CPU no C++ extension is compiled when processes connect (45 s, and a stale lock file
    makes the next start wait for ever); DS_BUILD_SHM_COMM=1 asks for it.
    """
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if on_cpu and os.environ.get("DS_BUILD_SHM_COMM") != "1":
        # import_module: as an attribute of deepspeed.comm the name `torch` is torch itself.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    prepare_autoep()


def bound_collectives(timeout_seconds: float) -> None:
    """Give DeepSpeed a group whose collectives end. Collective; before a model is made.

    It makes its own without a timeout, so a hung rank would hold the others for the default of
    the backend whatever ddp_timeout says. It takes this one if it is there.
    """
    from deepspeed.utils import groups

    if dist.is_initialized() and getattr(groups, "_WORLD_GROUP", None) is None:
        timeout = timedelta(seconds=timeout_seconds)
        groups._WORLD_GROUP = dist.new_group(list(range(dist.get_world_size())), timeout=timeout)


def _check_engine(engine: Any, stage: int) -> None:
    if engine.fp16_enabled():
        raise ConfigError(
            "fp16 is enabled in the DeepSpeed config: its loss scale is for one backward, and an "
            'update has many. Set "fp16": {"enabled": false} and "bf16": {"enabled": true} (or '
            "neither, for fp32)."
        )
    if not engine.managed_gradient_accumulation():
        raise ConfigError(
            '"managed_gradient_accumulation" is false in the DeepSpeed config: the engine says '
            "itself where an accumulation ends. Remove the key."
        )
    needed = ["_coalesce_grad_reduction"] if stage else []
    needed += ["finalize_gradient_accumulation_boundary", "clear_backward_seen_flag"] * (stage > 1)
    # Not of a plain optimizer, BF16_Optimizer (stage 1), or weights without an optimizer.
    is_checked = type(engine.optimizer).__name__.startswith("DeepSpeedZeroOptimizer")
    missing = [name for name in needed if is_checked and not hasattr(engine.optimizer, name)]
    if missing or not hasattr(engine, "_flush_coalesced_reduction_zero12"):
        import deepspeed

        raise ConfigError(
            f"deepspeed {deepspeed.__version__} lacks {missing or 'coalesced reduction'}, by which "
            "many backwards become one step. Install a tested version: pip install "
            "'deepspeed==0.19.8'."
        )


def _choose(engine: Any, stage: int, accumulate: str) -> str:
    if accumulate == "partitioned" and stage < 2:
        raise ConfigError(
            f"accumulate='partitioned' with ZeRO stage {stage}, which keeps whole gradients on "
            "every rank. Use stage 2 or 3, or accumulate='auto'."
        )
    if accumulate != "auto":
        return accumulate
    sizes = {p: getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()}
    trainable = sum(size for p, size in sizes.items() if p.requires_grad)
    if stage >= 2 and trainable > _FEW_TRAINABLE * sum(sizes.values()):
        return "partitioned"
    if stage == 2 and engine.bfloat16_enabled() and engine.zero_cpu_offload():
        return "partitioned"  # its way to the host rounds a locally accumulated gradient to bf16
    return "local"
