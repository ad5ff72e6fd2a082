"""Experts divided over ranks by DeepSpeed's AutoEP: what it is told, and what is read from it.

AutoEP replaces each expert block inside `deepspeed.initialize`. A rank then holds
`num_experts / ep_size` of them, and every forward and backward of a block sends tokens to the ranks
that hold their experts and back (all-to-all). So expert gradients are sums over the tokens of all
ranks already; DeepSpeed divides them by the data-parallel size as it does the others.

Knows AutoEP's layers; knows nothing of passes.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ConfigError

_WEIGHTS = ("w1", "w2", "w3")
"""Of a layer's local experts: gate `[X/ep, I, E]`, down `[X/ep, E, I]`, up `[X/ep, I, E]`."""

_LIKE = {"glm_moe_dsa": "deepseek_v3", "deepseek_v32": "deepseek_v3"}
"""Families whose expert blocks are those of a family that AutoEP has a preset for."""

_PEFT_PREFIX = r"(?:base_model\.model\.)?"


def prepare_autoep() -> None:
    """Let AutoEP read transformers 5.24, models inside PEFT's wrapper, and the families of `_LIKE`.

    Before `deepspeed.initialize`. Its tables of presets are extended, none is changed in what it
    computes.
    """
    from deepspeed.module_inject.auto_ep_presets import registry

    presets = registry.PRESET_MODELS
    for model_type, like in _LIKE.items():
        if model_type not in presets:
            presets[model_type] = replace(presets[like], hf_model_types=(model_type,))
    for name, preset in presets.items():
        if not preset.moe_layer_pattern.startswith(_PEFT_PREFIX):
            pattern = _PEFT_PREFIX + preset.moe_layer_pattern
            presets[name] = replace(preset, moe_layer_pattern=pattern)
    _let_it_ask_for_recorders()


def _let_it_ask_for_recorders() -> None:
    """DeepSpeed 0.19.8 asks transformers' table of recorders by class name and with a default."""
    from transformers.utils import output_capturing

    table = type(getattr(output_capturing, "_CAN_RECORD_REGISTRY", {}))
    own_get = table.get
    if table is dict or hasattr(own_get, "takes_names"):
        return

    def get(self: Any, key: Any, default: Any = None) -> Any:
        return dict.get(self, key, default) if isinstance(key, str) else own_get(self, key)

    get.takes_names = True  # type: ignore[attr-defined]
    table.get = get  # type: ignore[method-assign]


# -------------------------------------------------------------------- what was divided


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """AutoEP's layers by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "_is_autoep_layer", False)
    }


def expert_parallel_size(model: nn.Module) -> int:
    """Ranks that the experts are divided over; 1 where each holds all of them."""
    return max((layer.ep_size for layer in expert_layers(model).values()), default=1)


def record_raw_logits(model: nn.Module) -> None:
    """Let blocks hand on what transformers 5.24 records of a router: logits before the softmax.

    The preset of qwen3_5_moe hands on probabilities, of which a loss would take the softmax again.
    """
    for layer in expert_layers(model).values():
        layer.router_logits_capture_mode = "raw"


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether ranks hold different ones."""
    return not getattr(parameter, "allreduce", True)


def check_expert_layers(engine: Any) -> None:
    """Raise where the update would not be that of undivided experts.

    Raises:
        ConfigError: with what was found, and what to use instead.
    """
    model = engine.module
    asked = getattr(getattr(engine, "_config", None), "expert_parallel_config", None)
    if not getattr(asked, "enabled", False):
        return
    for config in getattr(model, "peft_config", {}).values():
        saved = set(getattr(config, "modules_to_save", None) or ())
        if {name.rpartition(".")[2] for name in saved} & {"experts", "gate", "mlp"}:
            raise ConfigError(
                f"modules_to_save={sorted(saved)} with expert_parallel: AutoEP takes the experts "
                "out of PEFT's wrapper, and the copy that is to be trained is lost. Leave them "
                "out, or train the model in full."
            )
    if not expert_layers(model):
        raise ConfigError(
            f"expert_parallel, and AutoEP finds no experts that it can divide in a "
            f"{type(model).__name__}. It divides those of "
            f"{', '.join(sorted(_LIKE))}, deepseek_v3, qwen3_5_moe_text and qwen3_moe. Leave "
            "expert_parallel out; ZeRO-3 divides every weight (ds_configs/zero3.json)."
        )
    trained = [p for p in model.parameters() if p.requires_grad and is_expert(p)]
    stage, is_bf16 = int(engine.zero_optimization_stage()), engine.bfloat16_enabled()
    if trained and stage == 0 and is_bf16:
        raise ConfigError(
            "expert_parallel with ZeRO stage 0 and bf16: DeepSpeed's optimizer there clips each "
            "rank by the norm of the experts that it holds, and ranks part ways. Use stage 1, 2 "
            "or 3, or train in fp32."
        )


def global_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The L2 norm of all gradients, each expert's counted once. Collective; alike on all ranks."""
    gradients = [(p, p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    squares: dict[Any, Tensor] = {}
    for parameter, gradient in gradients:
        group = _ep_group(parameter) if is_expert(parameter) else None
        square = gradient.detach().float().square().sum()
        squares[group] = squares[group] + square if group in squares else square
    for group, square in squares.items():
        if group is not None:
            dist.all_reduce(square, group=group)
    return torch.stack(list(squares.values())).sum().sqrt()


def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, largest: float) -> None:
    """Scale all gradients so that their global norm is at most `largest`.

    DeepSpeed at stage 0 clips by the mean over ranks of the norms of what each holds. That mean is
    never above the global norm, so it finds nothing left to clip.
    """
    if not largest or not math.isfinite(float(norm)) or float(norm) <= largest:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= largest / (norm + 1e-6)


def _ep_group(expert: Any) -> Any:
    from deepspeed.utils import groups

    return groups._get_expert_parallel_group(expert.group_name)


# -------------------------------------------------------------------- bringing experts together


@contextmanager
def whole_experts(model: nn.Module) -> Iterator[None]:
    """Inside, every rank holds all experts, and forwards contain no collectives. Collective.

    For decoding, where ranks make different numbers of passes. Under ZeRO-3 the caller has brought
    the ranks' shares of weights together. Not for backwards.
    """
    with ExitStack() as undo:
        for layer in expert_layers(model).values():
            if layer.ep_size == 1:
                continue
            # Not a deep copy: hooks that gather weights stay with the original.
            whole = copy.copy(layer.experts)
            whole._parameters = {
                name: nn.Parameter(_gather(layer, name), requires_grad=False) for name in _WEIGHTS
            }
            for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
                setattr(whole, hooks, type(getattr(whole, hooks))())
            whole.num_experts = layer.num_experts
            undo.callback(setattr, layer, "experts", layer.experts)
            undo.callback(setattr, layer, "ep_size", layer.ep_size)
            layer.experts, layer.ep_size = whole, 1
        yield


@torch.no_grad()
def _gather(layer: Any, name: str) -> Tensor:
    """The weight of all experts, in their order."""
    own = getattr(layer.experts, name).detach().contiguous()
    assert own.shape[0] == layer.num_local_experts, "ZeRO-3 holds the weight in pieces"
    if layer.ep_size == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(layer.ep_size)]
    dist.all_gather(parts, own, group=layer.ep_group)
    return torch.cat(parts)


@torch.no_grad()
def whole_state_dict(
    engine: Any, *, on_every_rank: bool = False, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor]:
    """The model's weights under transformers' names, all experts, on the CPU. Collective.

    One parameter at a time is whole on the device.

    Args:
        on_every_rank: whether others than the first get more than an empty dict.
        exclude_frozen_parameters: leave out what is not trained, as DeepSpeed's own option does.
    """
    model, names = engine.module, _Names(engine)
    is_kept = on_every_rank or dist.get_rank() == 0
    state: dict[str, Tensor] = {}

    def is_wanted(tensor: Tensor) -> bool:
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return not (exclude_frozen_parameters and is_frozen)

    for name, tensor in model.state_dict(keep_vars=True).items():
        own_name = names.of(name)
        if own_name is None or not is_wanted(tensor):
            continue
        with _gathered(tensor):
            if is_kept:
                state[own_name] = tensor.detach().cpu().clone()
    for prefix, layer in expert_layers(model).items():
        if not is_wanted(layer.experts.w1):
            continue
        parts = {}
        for name in _WEIGHTS:
            with _gathered(getattr(layer.experts, name)):
                whole = _gather(layer, name)
                parts[name] = whole.cpu() if is_kept else whole[:0]
        preset = names.presets[prefix]
        experts = f"{prefix}.{preset.experts_pattern}"
        if is_kept:
            state[f"{experts}.{preset.expert_w1}"] = torch.cat([parts["w1"], parts["w3"]], dim=1)
            state[f"{experts}.{preset.expert_w2}"] = parts["w2"].clone()
    return state


def _gathered(tensor: Tensor) -> Any:
    if not hasattr(tensor, "ds_id"):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters([tensor])


class _Names:
    """What AutoEP calls the parts of a block, and transformers."""

    def __init__(self, engine: Any) -> None:
        from deepspeed.module_inject.auto_ep_presets import registry

        config = engine._config.expert_parallel_config
        self.presets = {
            prefix: registry.apply_config_overrides(config, registry.get_preset(layer.model_family))
            for prefix, layer in expert_layers(engine.module).items()
        }
        self._aliases = {
            prefix: preset.router_pattern
            for prefix, preset in self.presets.items()
            if hasattr(engine.module.get_submodule(prefix), preset.router_pattern)
        }

    def of(self, name: str) -> str | None:
        """The parameter's or buffer's name in transformers; None for experts, and second names."""
        for prefix, preset in self.presets.items():
            if not name.startswith(f"{prefix}."):
                continue
            rest = name.removeprefix(f"{prefix}.")
            part, _, inner = rest.partition(".")
            if part == "experts" or part == self._aliases.get(prefix):
                return None
            shared = preset.shared_experts_pattern
            own = {
                "router": preset.router_pattern,
                "shared_experts": shared,
                "shared_experts_gate": preset.shared_experts_gate_pattern,
            }.get(part, part)
            return f"{prefix}.{own}.{inner.removeprefix('gate.') if part == 'router' else inner}"
        return name
