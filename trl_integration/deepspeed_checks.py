"""Which settings of a DeepSpeed config cannot be honoured, and the line to write instead.

Works on the config as a dict, before processes are connected and the model is loaded; knows nothing
of DeepSpeed itself.
"""

import difflib
import json
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from longstraw import ConfigError

if TYPE_CHECKING:
    from .config import LongStrawGRPOConfig

Config = Mapping[str, Any]

KNOWN_KEYS = frozenset(
    """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger
    communication_data_type compile compression_training csv_monitor curriculum_learning
    data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather
    disable_python_gc dump_state eigenvalue elasticity expert_parallel flops_profiler fp16
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor
    graph_harvesting hybrid_engine log_level managed_gradient_accumulation memory_breakdown nebula
    optimizer pipeline prescale_gradients progressive_layer_drop quantize_training scheduler
    seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients
    steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size
    wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer zero_optimization
    """.split()
)
"""What DeepSpeed 0.19.8 reads at the top level; it ignores everything else without a sign."""


class Refused(NamedTuple):
    """A setting that would make the gradient wrong, or with which nothing was run."""

    path: str
    """Dotted, as the keys are nested in the JSON."""
    is_refused: Callable[[Any], bool]
    reason: str
    change: str


def _is_set(value: Any) -> bool:
    return value not in (None, False, "auto", "none", {}, [])


def _is_enabled(section: Any) -> bool:
    """Of a section that is off unless it says otherwise."""
    return isinstance(section, Mapping) and section.get("enabled", False) is True


def _is_several(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 1


def _is_false(value: Any) -> bool:
    return value is False


_SPLITS_TOKENS = "every process holds whole prompts, and all of them are data-parallel"
_CHANGES_INPUTS = "it changes which tokens or layers a forward sees, so a replay would differ"
_WRITES_LATER = "it writes on after a save has returned, and checkpoints get their name when whole"
_NOT_RUN = "LongStraw has not been run with it"
_BELOW = "it acts on forwards through DeepSpeed's engine, and the passes over a prompt run below it"
_ZERO = "zero_optimization."

REFUSED = (
    Refused(
        "fp16",
        _is_enabled,
        "its loss scale is for one backward, and an update has many",
        'Write "fp16": {"enabled": false} and "bf16": {"enabled": "auto"}.',
    ),
    Refused(
        "managed_gradient_accumulation",
        _is_false,
        "the engine says itself where an accumulation ends",
        "Remove the key.",
    ),
    Refused(
        "bf16.check_grad_overflow",
        _is_false,
        "a gradient that is not finite would be written into the weights",
        'Write "check_grad_overflow": true, or remove the key.',
    ),
    Refused(
        "bf16.bf16_master_weights_and_grads",
        _is_set,
        "gradients of many replays add up, and bf16 loses what is 256 times smaller than the sum",
        "Remove the key.",
    ),
    Refused(
        "gradient_allreduce_op",
        lambda value: value == "sum",
        "the loss is scaled for a mean over processes",
        'Write "gradient_allreduce_op": "mean", or remove the key.',
    ),
    Refused(
        "communication_data_type",
        lambda value: value in ("fp16", "float16", "half"),
        "sums of gradients overflow in fp16",
        'Write "communication_data_type": "fp32".',
    ),
    Refused("amp", _is_set, "DeepSpeed has removed it", 'Write "bf16": {"enabled": "auto"}.'),
    Refused("torch_autocast", _is_enabled, _BELOW, 'Write "bf16": {"enabled": "auto"} instead.'),
    Refused("hybrid_engine", _is_enabled, _BELOW, "Remove the section."),
    Refused(
        "compile.deepcompile", _is_set, f"{_BELOW}, each chunk on another history", "Remove it."
    ),
    Refused("tensor_parallel.autotp_size", _is_several, _SPLITS_TOKENS, "Remove the section."),
    Refused(
        "sequence_parallel_size",
        _is_several,
        "ranks that share prompts are data-parallel to DeepSpeed",
        "Remove the key, and give the trainer longstraw_sp_size instead.",
    ),
    Refused("pipeline", _is_set, _SPLITS_TOKENS, "Remove the section."),
    Refused(
        "expert_parallel.expert_tensor_parallel_size",
        _is_several,
        "each expert is whole on one rank",
        "Remove the key, and give more ranks to autoep_size.",
    ),
    Refused(
        "expert_parallel.comm_backend",
        lambda value: value != "comm",
        _NOT_RUN,
        'Write "comm_backend": "comm", or remove the key.',
    ),
    Refused("expert_parallel.async_split_plan", _is_set, _NOT_RUN, "Remove the key."),
    Refused("use_data_before_expert_parallelism", _is_set, _NOT_RUN, "Remove the key."),
    Refused("curriculum_learning", _is_set, _CHANGES_INPUTS, "Remove the section."),
    Refused("data_efficiency", _is_enabled, _CHANGES_INPUTS, "Remove the section."),
    Refused("progressive_layer_drop", _is_set, _CHANGES_INPUTS, "Remove the section."),
    Refused(
        "optimizer.type",
        lambda value: str(value).lower() in ("onebitadam", "zerooneadam", "onebitlamb"),
        "it sends compressed gradients, so the update is another one",
        'Remove "optimizer": `optim` and `learning_rate` of the trainer decide.',
    ),
    Refused(
        _ZERO + "zero_quantized_weights",
        _is_set,
        "weights would differ between the capture and the replay by their quantization",
        "Remove the key.",
    ),
    Refused(_ZERO + "zero_quantized_nontrainable_weights", _is_set, _NOT_RUN, "Remove the key."),
    Refused(
        _ZERO + "zero_quantized_gradients",
        _is_set,
        "the gradient would be an approximation",
        "Remove the key.",
    ),
    Refused(
        _ZERO + "zero_hpz_partition_size", _is_several, _NOT_RUN, "Remove the key, or write 1."
    ),
    Refused(_ZERO + "mics_shard_size", _is_set, "DeepSpeed has removed it", "Remove the key."),
    Refused(
        _ZERO + "mics_hierarchical_params_gather",
        _is_set,
        "DeepSpeed has removed it",
        "Remove the key.",
    ),
    Refused(
        _ZERO + "zenflow",
        _is_set,
        "it applies parts of the gradient at a later step",
        "Remove the section.",
    ),
    Refused(
        _ZERO + "offload_optimizer.device",
        lambda value: value == "nvme",
        _NOT_RUN,
        'Write "device": "cpu".',
    ),
    Refused(
        _ZERO + "offload_param.device",
        lambda value: value == "nvme",
        _NOT_RUN,
        'Write "device": "cpu".',
    ),
    Refused("nebula", _is_enabled, _WRITES_LATER, "Remove the section."),
    Refused("datastates_ckpt", _is_set, _WRITES_LATER, "Remove the section."),
    Refused("checkpoint.writer.decoupled", _is_set, _WRITES_LATER, 'Write "decoupled": false.'),
    Refused(_ZERO + "offload_optimizer.super_offload", _is_set, _NOT_RUN, "Remove the key."),
)


def check_deepspeed_config(config: Config, args: "LongStrawGRPOConfig") -> None:
    """Refuse settings with which the update would not be the one that `args` describe.

    Args:
        config: the DeepSpeed config, with or without its "auto" values filled in.
        args: the trainer's settings that go with it.

    Raises:
        ConfigError: names the key, what was found, and the line to write.
    """
    _check_names(config)
    stage = _read(config, _ZERO + "stage")
    if stage not in (0, 1, 2, 3):
        raise ConfigError(
            f"{_found(_ZERO + 'stage', stage)}: transformers and DeepSpeed would assume different "
            'ones. Write "zero_optimization": {"stage": 2} (or 0, 1, 3; ds_configs/README.md says '
            "when)."
        )
    for refused in REFUSED:
        value = _read(config, refused.path)
        if value is not None and refused.is_refused(value):
            raise ConfigError(f"{_found(refused.path, value)}: {refused.reason}. {refused.change}")
    _check_against_args(config, args)
    _check_precision(config, args, stage)
    if stage == 3:
        _check_stage_3(config, args)
    if divides_experts(config):
        _check_experts(config, args, stage)
    if _is_set(config.get("activation_checkpointing")):
        warnings.warn(
            '"activation_checkpointing" in the DeepSpeed config has no effect on models of '
            "transformers. Remove it; gradient_checkpointing=True is the trainer's own.",
            stacklevel=2,
        )


def divides_experts(config: Config) -> bool:
    """Whether the DeepSpeed config divides experts over ranks."""
    return _is_enabled(config.get("expert_parallel"))


def refuse_generation_by_each_rank(config: Config, reason: str) -> None:
    """Raise if each token needs the experts of other ranks.

    Args:
        reason: why TRL generates by itself.
    """
    if divides_experts(config):
        raise ConfigError(
            f"{reason} with expert_parallel: TRL would generate on each rank by itself, and each "
            "token needs the experts of other ranks. Leave it out."
        )


def refuse_turns_of_each_rank(config: Config) -> None:
    """Raise if decoding a turn takes what other ranks have: they have other numbers of turns."""
    stage = _read(config, _ZERO + "stage")
    if stage == 3 or divides_experts(config):
        found = "ZeRO-3" if stage == 3 else "expert_parallel"
        raise ConfigError(
            f"tools or environment_factory under {found}: each turn takes what other ranks have, "
            "and ranks have different numbers of turns. Use ZeRO-2 without "
            "expert_parallel, or generate with vLLM."
        )


def check_divided_experts(config: Config, model: Any, args: "LongStrawGRPOConfig") -> None:
    """Refuse adapters that AutoEP does not carry over, before DeepSpeed stumbles over them.

    Args:
        config: the DeepSpeed config.
        model: as it is given to DeepSpeed, adapters included.
        args: the trainer's settings that go with it.

    Raises:
        ConfigError: names the module, and what to do instead.
    """
    if not divides_experts(config):
        return
    for name, module in model.named_modules():
        if name.endswith(".experts") and hasattr(module, "base_layer"):
            raise ConfigError(
                f"{name} has an adapter, and expert_parallel divides experts without one. Name the "
                'layers of attention in target_modules (["q_proj", "k_proj", "v_proj", "o_proj"]; '
                '"all-linear" takes experts too), or leave expert_parallel out.'
            )
    stage = _read(config, _ZERO + "stage")
    if stage != 3 and args.bf16 and args.beta and not hasattr(model, "peft_config"):
        raise ConfigError(
            f"beta={args.beta} in bf16, with expert_parallel under ZeRO-{stage}, where DeepSpeed "
            "takes no reference model without an optimizer. Use stage 3, beta=0, or adapters, "
            "whose reference is the model without them."
        )
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    if any(p.requires_grad for p in experts):
        return
    if stage in (1, 2):
        raise ConfigError(
            f"no expert is trained, with expert_parallel under ZeRO-{stage}, where DeepSpeed "
            "expects some. Use stage 3 (ds_configs/zero3_experts.json), or 0."
        )
    if stage == 3 and args.save_strategy != "no" and not args.save_only_model:
        raise ConfigError(
            f"save_strategy={str(args.save_strategy)!r}, and no expert is trained, with "
            "expert_parallel under ZeRO-3, where DeepSpeed writes checkpoints of trained experts "
            "only. Set save_only_model=True, which writes the adapter, or use stage 0, whose "
            "checkpoints a run can go on from."
        )


def fill_deepspeed_config(config: dict[str, Any], args: "LongStrawGRPOConfig") -> None:
    """Set what the user left open and DeepSpeed would choose badly here.

    Partitions of bf16 gradients add up in bf16 by default: an update has hundreds of backwards, and
    what is 256 times smaller than the sum would be lost.
    """
    stage = _read(config, _ZERO + "stage")
    is_bf16 = _is_enabled(config.get("bf16")) or (
        _read(config, "bf16.enabled") == "auto" and args.bf16
    )
    if stage in (2, 3) and is_bf16:
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")


def count_every_rank(hf_config: Any, args: "LongStrawGRPOConfig") -> None:
    """Let `train_batch_size` count all ranks, as DeepSpeed does, where it counts sequence groups.

    Args:
        hf_config: of transformers, which has filled it in; None where that is still to come.
    """
    if hf_config is None or args.longstraw_sp_size == 1:
        return
    key = "train_batch_size"
    config = hf_config.config
    expected = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    is_own = [text.startswith(f"- ds {key}=") for text in hf_config.mismatches]
    if any(is_own) and config[key] != expected:
        raise ConfigError(
            f"{_found(key, config[key])}, and {args.world_size} processes make {expected}. Write "
            f'"{key}": "auto": the trainer fills it in.'
        )
    if key in config:
        config[key] = expected
    hf_config.mismatches = [
        text for text, own in zip(hf_config.mismatches, is_own, strict=True) if not own
    ]


def _check_names(config: Config) -> None:
    for key in config.keys() - KNOWN_KEYS:
        close = difflib.get_close_matches(key, KNOWN_KEYS, n=1, cutoff=0.8)
        if close:
            raise ConfigError(
                f'"{key}" in the DeepSpeed config is a key that DeepSpeed does not know and would '
                f'ignore. Did you mean "{close[0]}"?'
            )
        warnings.warn(
            f'"{key}" in the DeepSpeed config is ignored: DeepSpeed knows no such key.',
            stacklevel=3,
        )


def _check_against_args(config: Config, args: "LongStrawGRPOConfig") -> None:
    """Numbers that both sides have: DeepSpeed would silently take its own, or its default."""
    pairs = (
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", None),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", 1),
        ("gradient_clipping", "max_grad_norm", 0.0),
    )
    for key, name, default in pairs:
        ours = getattr(args, name)
        value = config.get(key, default)
        if value in (None, "auto") or value == (ours or 0):
            continue
        assumed = "" if key in config else f"; DeepSpeed would take {default}"
        raise ConfigError(
            f"{_found(key, config.get(key))}, and {name}={ours}{assumed}. "
            f'Write "{key}": "auto": the trainer fills it in.'
        )


def _check_precision(config: Config, args: "LongStrawGRPOConfig", stage: int) -> None:
    found = _read(config, "bf16.enabled")
    if found is None:
        found = _read(config, "bfloat16.enabled")
    is_bf16 = bool(args.bf16) if found in (None, "auto") else bool(found)
    if is_bf16 != bool(args.bf16):
        raise ConfigError(
            f"{_found('bf16.enabled', found)}, and bf16={args.bf16}. Write "
            '"bf16": {"enabled": "auto"}, and leave mixed_precision out of accelerate\'s '
            "configuration: bf16 of the trainer decides."
        )
    if is_bf16 and args.cast_lm_head_to_fp32:
        raise ConfigError(
            "cast_lm_head_to_fp32=True with bf16 under DeepSpeed, which casts the head back to "
            "bf16 with all other weights. Leave it out, or train with bf16=False."
        )
    accumulates_in = _read(config, "data_types.grad_accum_dtype")
    if stage == 0 and is_bf16 and accumulates_in in ("fp32", "float32", "float"):
        raise ConfigError(
            f"{_found('data_types.grad_accum_dtype', accumulates_in)} with ZeRO stage 0 and bf16, "
            "which DeepSpeed cannot do. Remove the key: at this stage gradients accumulate in fp32 "
            "without it."
        )


def _check_stage_3(config: Config, args: "LongStrawGRPOConfig") -> None:
    if not args.ds3_gather_for_generation and not args.use_vllm:
        raise ConfigError(
            "ds3_gather_for_generation=False under ZeRO-3: responses are decoded from captured "
            "prompts with whole weights. Leave it true, or generate with vLLM (use_vllm=True) if "
            "the whole weights do not fit a device."
        )
    key = "stage3_gather_16bit_weights_on_model_save"
    if _read(config, _ZERO + key) in (None, False):
        warnings.warn(
            f'"{key}" is not true in the DeepSpeed config: what save_model writes holds no weights '
            f'that can be loaded. Write "zero_optimization": {{"{key}": true}}, or convert a '
            "checkpoint with the zero_to_fp32.py that lies in it.",
            stacklevel=3,
        )


_EXPERT_KEYS = (
    "enabled",
    "autoep_size",
    "preset_model",
    "use_grouped_mm",
    "disable_triton_grouped_mm",
    "expert_tensor_parallel_size",
    "async_split_plan",
    "comm_backend",
)
"""Keys of "expert_parallel" that may be set; the last three are checked with the other settings."""


def _check_experts(config: Config, args: "LongStrawGRPOConfig", stage: int) -> None:
    """AutoEP replaces experts after the trainer would have made its optimizer; and it would take
    other routing than the checkpoint's without a word."""
    section = config["expert_parallel"]
    for key in section:
        if key not in _EXPERT_KEYS:
            near = difflib.get_close_matches(key, _EXPERT_KEYS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{_found('expert_parallel.' + key, section[key])}: how tokens are routed is the "
                f"model's, and other keys than {', '.join(_EXPERT_KEYS)} are not served.{hint}"
            )
    size = section.get("autoep_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(
            f"{_found('expert_parallel.autoep_size', size)}: write over how many processes the "
            "experts are divided, a number that divides both."
        )
    if stage in (1, 2) and not _is_set(config.get("optimizer")):
        raise ConfigError(
            f"{_found('optimizer', None)}, with expert_parallel under ZeRO-{stage}: the optimizer "
            "has to be made after the experts are divided, by DeepSpeed. Write "
            '"optimizer": {"type": "AdamW", "params": {"torch_adam": true, "lr": "auto", '
            '"betas": "auto", "eps": "auto", "weight_decay": "auto"}}, or use stage 3 '
            "(ds_configs/zero3_experts.json)."
        )
    if stage == 2 and _read(config, _ZERO + "contiguous_gradients") is False:
        raise ConfigError(
            f"{_found(_ZERO + 'contiguous_gradients', False)}, with expert_parallel under ZeRO-2, "
            'where DeepSpeed needs it. Write "contiguous_gradients": true, or use stage 1 or 3.'
        )
    if args.use_vllm:
        raise ConfigError(
            "use_vllm=True with expert_parallel: weights are sent to vLLM under names of AutoEP's, "
            "and only those of one rank's experts. Leave use_vllm out."
        )


def _read(config: Config, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _found(path: str, value: Any) -> str:
    """The key as it is nested in the JSON, and what stands there."""
    *parents, key = path.split(".")
    inside = f' of "{parents[0]}"' if parents else ""
    for parent in parents[1:]:
        inside = f' of "{parent}"{inside}'
    what = "is missing" if value is None else f"is {json.dumps(value, default=str)}"
    return f'"{key}"{inside} {what} in the DeepSpeed config'
