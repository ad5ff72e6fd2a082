"""What is done around a training on the ranks: mistakes planted, memory watched.

A probe is a context manager around `trainer.train()`; what it yields is part of the record.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from transformers import TrainerCallback
from trl import GRPOTrainer

from longstraw import DeepSpeedBackend, Engine
from longstraw.attention import paged
from longstraw.backends import Finalized

Findings = dict[str, Any]
Probe = Callable[[GRPOTrainer], AbstractContextManager[Findings]]

# -------------------------------------------------------------------- mistakes


@contextmanager
def uncounted_backwards(trainer: GRPOTrainer) -> Iterator[Findings]:
    """Backwards that DeepSpeed is not told of one by one."""
    backward = DeepSpeedBackend.backward

    def uncounted(self: DeepSpeedBackend, *args: Any) -> None:
        with patch.object(type(self.optimizer), "clear_backward_seen_flag", lambda _: None):
            backward(self, *args)

    with patch.object(DeepSpeedBackend, "backward", uncounted):
        yield {}


@contextmanager
def boundary_at_each_backward(trainer: GRPOTrainer) -> Iterator[Findings]:
    """Every backward is taken for the last of its step, which is DeepSpeed's default."""
    backward = DeepSpeedBackend.backward

    def at_the_boundary(self: DeepSpeedBackend, *args: Any) -> None:
        set_boundary = self.engine.set_gradient_accumulation_boundary
        with patch.object(
            self.engine, "set_gradient_accumulation_boundary", lambda _: set_boundary(True)
        ):
            backward(self, *args)

    def nothing(self: DeepSpeedBackend, parameters: Any) -> Finalized:
        return Finalized(None)  # the boundary of the last backward has done it

    with (
        patch.object(DeepSpeedBackend, "backward", at_the_boundary),
        patch.object(DeepSpeedBackend, "finalize", nothing),
    ):
        yield {}


@contextmanager
def no_anchor(trainer: GRPOTrainer) -> Iterator[Findings]:
    """Backwards that begin at a chunk's keys and values, in the middle of the graph."""
    init = DeepSpeedBackend.__init__

    def without_anchor(self: DeepSpeedBackend, *args: Any) -> None:
        init(self, *args)
        self.needs_anchor = False

    with patch.object(DeepSpeedBackend, "__init__", without_anchor):
        yield {}


@contextmanager
def cotangents_not_scaled(trainer: GRPOTrainer) -> Iterator[Findings]:
    """Ranks that share a prompt count as ranks with other ones in the mean over all ranks."""
    differentiate = Engine._differentiate

    def unscaled(self: Engine, *args: Any) -> Any:
        loss, cotangents = differentiate(self, *args)
        size = self.axes.sp_size
        return loss, [
            replace(group, logps=group.logps / size, entropies=group.entropies / size)
            for group in cotangents
        ]

    with patch.object(Engine, "_differentiate", unscaled):
        yield {}


@contextmanager
def keys_of_own_queries_only(trainer: GRPOTrainer) -> Iterator[Findings]:
    """Keys and values get no gradient from the queries that other ranks have sent."""
    block_backward = paged._Blocks.block_backward

    def own_only(self: Any, saved: Any, key: Any, value: Any, params: Any) -> Any:
        travel = self.handle.travel
        first = params.q_start - self.handle.q_start
        own = set(travel.ownership.columns(travel.group.rank))
        is_own = torch.tensor([first + row in own for row in range(params.q_len)])
        rows = is_own.repeat(saved.q.shape[-2] // params.q_len)  # members, laid side by side
        own_saved = replace(saved, grad_out=saved.grad_out * rows.unsqueeze(-1))
        dq, _, _ = block_backward(self, saved, key, value, params)
        _, dk, dv = block_backward(self, own_saved, key, value, params)
        return dq, dk, dv

    with patch.object(paged._Blocks, "block_backward", own_only):
        yield {}


# -------------------------------------------------------------------- memory


@contextmanager
def memory(trainer: GRPOTrainer) -> Iterator[Findings]:
    """Bytes of weights and gradients on this rank, during backwards and after each update.

    Attributes found:
        num_parameters: elements of the model, and how many of them are trained.
        standing_gradients: most elements of `.grad` at any time during a backward.
        standing_weights: most elements of partitioned parameters that were whole on this rank,
            at any module's forward or any gradient's arrival.
        kept_gradients: bytes of `.grad` when an update's backwards are done.
        partitions, whole: after each update, elements held as this rank's part, and those of
            parameters that are whole on it.
    """
    found: Findings = {"standing_gradients": 0, "standing_weights": 0, "kept_gradients": []}
    found |= {"partitions": [], "whole": []}
    parameters = list(trainer.accelerator.unwrap_model(trainer.model).parameters())
    init, finalize = DeepSpeedBackend.__init__, DeepSpeedBackend.finalize

    def size(parameter: nn.Parameter) -> int:
        return getattr(parameter, "ds_numel", parameter.numel())

    def look(_: Any = None) -> None:
        standing = sum(p.grad.numel() for p in parameters if p.grad is not None)
        found["standing_gradients"] = max(found["standing_gradients"], standing)
        look_at_weights()

    def look_at_weights(*_: Any) -> None:
        whole = sum(p.numel() for p in parameters if hasattr(p, "ds_tensor"))  # 0 if in pieces
        found["standing_weights"] = max(found["standing_weights"], whole)

    def watched_init(self: DeepSpeedBackend, *args: Any) -> None:
        init(self, *args)
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(look)
        for module in self.engine.module.modules():
            module.register_forward_pre_hook(look_at_weights)  # behind DeepSpeed's own
        found["num_parameters"] = sum(map(size, parameters))
        found["num_trained"] = sum(size(p) for p in parameters if p.requires_grad)

    def watched_finalize(self: DeepSpeedBackend, trained: Any) -> Any:
        gradients = [p.grad for p in parameters if p.grad is not None]
        found["kept_gradients"].append(sum(g.numel() * g.element_size() for g in gradients))
        return finalize(self, trained)

    class AfterUpdate(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            held = [p for p in parameters if hasattr(p, "ds_tensor")]
            found["partitions"].append(sum(p.ds_tensor.numel() for p in held))
            whole = [p for p in held if p.ds_status is not ZeroParamStatus.NOT_AVAILABLE]
            found["whole"].append(sum(p.ds_numel for p in whole if not p.ds_persist))
            found["dtype"] = str(held[0].ds_tensor.dtype) if held else None

    trainer.add_callback(AfterUpdate())
    with (
        patch.object(DeepSpeedBackend, "__init__", watched_init),
        patch.object(DeepSpeedBackend, "finalize", watched_finalize),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield found


PROBES: dict[str, Probe] = {
    probe.__name__: probe
    for probe in (
        uncounted_backwards,
        boundary_at_each_backward,
        no_anchor,
        cotangents_not_scaled,
        keys_of_own_queries_only,
        memory,
    )
}
