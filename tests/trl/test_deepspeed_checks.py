"""A DeepSpeed setting that would change the update is refused with the line to write instead.

The function looks at dicts, so nothing is connected and no model is made here.
"""

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from longstraw import ConfigError, prepare_deepspeed
from trl_integration.deepspeed_checks import (
    KNOWN_KEYS,
    check_deepspeed_config,
    fill_deepspeed_config,
)

GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}
ZERO = "zero_optimization."


def changed(**changes: Any) -> dict[str, Any]:
    """`GOOD` with values at dotted paths (`__` for a dot); None takes the key out."""
    config = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *parents, key = path.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section.pop(key, None)
        if value is not None:
            section[key] = value
    return config


def arguments(**changes: Any) -> Any:
    """The trainer's settings that the check reads, with TRL's defaults."""
    defaults = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 1.0,
        "bf16": True,
        "beta": 0.0,
        "cast_lm_head_to_fp32": False,
        "ds3_gather_for_generation": True,
        "use_vllm": False,
    }
    return SimpleNamespace(**{**defaults, **changes})


STAGE_3 = {
    "zero_optimization__stage": 3,
    "zero_optimization__stage3_gather_16bit_weights_on_model_save": True,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        STAGE_3,
        {"zero_optimization__stage": 0},
        {"fp16": {"enabled": False}, "bf16__check_grad_overflow": True},
        {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "bf16__enabled": True},
        {"zero_optimization__overlap_comm": True, "zero_optimization__round_robin_gradients": True},
        {"zero_optimization__offload_optimizer": {"device": "none"}},
        {"zero_optimization__zero_hpz_partition_size": 1, "tensor_parallel": {"autotp_size": 1}},
        {"gradient_allreduce_op": "mean", "communication_data_type": "fp32"},
        {"bf16": None, "wandb": {"enabled": True}, "steps_per_print": 10},
    ],
    ids=str,
)
def test_what_does_not_touch_the_update_passes_in_silence(changes: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_deepspeed_config(changed(**changes), arguments())


REFUSED = {
    '"fp16" .*"fp16": {"enabled": false}': {"fp16": {"enabled": True}},
    '"managed_gradient_accumulation" is false': {"managed_gradient_accumulation": False},
    '"check_grad_overflow" of "bf16" is false.*true': {"bf16__check_grad_overflow": False},
    '"bf16_master_weights_and_grads".*256': {"bf16__bf16_master_weights_and_grads": True},
    '"gradient_allreduce_op": "mean"': {"gradient_allreduce_op": "sum"},
    '"communication_data_type": "fp32"': {"communication_data_type": "fp16"},
    '"amp"': {"amp": {"enabled": True}},
    '"torch_autocast"': {"torch_autocast": {"enabled": True}},
    '"hybrid_engine"': {"hybrid_engine": {"enabled": True}},
    '"deepcompile" of "compile"': {"compile__deepcompile": True},
    '"autotp_size" of "tensor_parallel" is 2': {"tensor_parallel__autotp_size": 2},
    '"sequence_parallel_size" is 4': {"sequence_parallel_size": 4},
    '"pipeline"': {"pipeline": {"stages": 2}},
    '"curriculum_learning"': {"curriculum_learning": {"enabled": True}},
    '"data_efficiency"': {"data_efficiency": {"enabled": True}},
    '"progressive_layer_drop"': {"progressive_layer_drop": {"enabled": True}},
    '"type" of "optimizer" is "OneBitAdam"': {"optimizer__type": "OneBitAdam"},
    '"zero_quantized_weights"': {"zero_optimization__zero_quantized_weights": True},
    '"zero_quantized_gradients"': {"zero_optimization__zero_quantized_gradients": True},
    '"zero_quantized_nontrainable_weights"': {
        "zero_optimization__zero_quantized_nontrainable_weights": True
    },
    '"zero_hpz_partition_size" .*is 8': {"zero_optimization__zero_hpz_partition_size": 8},
    '"mics_shard_size"': {"zero_optimization__mics_shard_size": 8},
    '"mics_hierarchical_params_gather"': {
        "zero_optimization__mics_hierarchical_params_gather": True
    },
    '"nebula"': {"nebula": {"enabled": True}},
    '"datastates_ckpt"': {"datastates_ckpt": {"host_cache_size": 1}},
    '"decoupled" of "writer"': {"checkpoint__writer": {"decoupled": True}},
    '"zenflow" of "zero_optimization"': {"zero_optimization__zenflow": {"topk_ratio": 0.1}},
    '"offload_optimizer" of "zero_optimization" is "nvme".*"device": "cpu"': {
        "zero_optimization__offload_optimizer__device": "nvme"
    },
    '"offload_param" of "zero_optimization" is "nvme".*"device": "cpu"': {
        "zero_optimization__offload_param__device": "nvme"
    },
    '"super_offload"': {"zero_optimization__offload_optimizer__super_offload": True},
    '"stage" of "zero_optimization" is missing.*"stage": 2': {"zero_optimization__stage": None},
    'Did you mean "gradient_clipping"': {"gradient_cliping": 1.0},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_change_the_update_is_refused_by_its_name(words: str) -> None:
    """The message has the key as it stands in the JSON, and the way out."""
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        check_deepspeed_config(changed(**REFUSED[words]), arguments())


AGAINST_ARGS = {
    '"gradient_accumulation_steps" is 1 .*gradient_accumulation_steps=4.*"auto"': (
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": 4},
    ),
    '"gradient_accumulation_steps" is missing .*would take 1': (
        {"gradient_accumulation_steps": None},
        {"gradient_accumulation_steps": 4},
    ),
    '"gradient_clipping" is 0.5 .*max_grad_norm=1.0': ({"gradient_clipping": 0.5}, {}),
    '"gradient_clipping" is missing .*would take 0.0': ({"gradient_clipping": None}, {}),
    '"train_micro_batch_size_per_gpu" is 4 .*per_device_train_batch_size=8': (
        {"train_micro_batch_size_per_gpu": 4},
        {},
    ),
    '"enabled" of "bf16" is true .*bf16=False.*mixed_precision': (
        {"bf16__enabled": True},
        {"bf16": False},
    ),
    '"enabled" of "bf16" is false .*bf16=True': ({"bf16__enabled": False}, {}),
    "cast_lm_head_to_fp32=True with bf16": ({}, {"cast_lm_head_to_fp32": True}),
    '"grad_accum_dtype" of "data_types" is "fp32" .*stage 0': (
        {"zero_optimization__stage": 0, "data_types__grad_accum_dtype": "fp32"},
        {},
    ),
    "ds3_gather_for_generation=False .*vLLM": (STAGE_3, {"ds3_gather_for_generation": False}),
}


@pytest.mark.parametrize("words", AGAINST_ARGS)
def test_what_the_trainer_says_otherwise_is_refused(words: str) -> None:
    """Of most of these DeepSpeed would take its own value, or its default, and say nothing."""
    changes, args = AGAINST_ARGS[words]
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        check_deepspeed_config(changed(**changes), arguments(**args))


def test_equal_numbers_and_no_clipping_pass() -> None:
    """A number that both sides have alike is no conflict; None and 0 both mean no clipping."""
    config = changed(gradient_accumulation_steps=4, gradient_clipping=None)
    for norm in (None, 0.0):
        check_deepspeed_config(config, arguments(gradient_accumulation_steps=4, max_grad_norm=norm))


def test_vllm_needs_no_gathered_weights() -> None:
    args = arguments(ds3_gather_for_generation=False, use_vllm=True)
    check_deepspeed_config(changed(**STAGE_3), args)


def test_an_fp32_head_is_no_conflict_without_bf16() -> None:
    check_deepspeed_config(GOOD, arguments(cast_lm_head_to_fp32=True, bf16=False))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "no effect.*gradient_checkpointing=True",
        ),
        ({"zero_optimization__stage": 3}, "stage3_gather_16bit_weights.*zero_to_fp32.py"),
        ({"my_own_notes": "for a colleague"}, '"my_own_notes".*ignored'),
    ],
)
def test_what_has_no_effect_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=words):
        check_deepspeed_config(changed(**changes), arguments())


@pytest.mark.parametrize(
    ("changes", "bf16", "filled"),
    [
        ({}, True, "fp32"),
        (STAGE_3, True, "fp32"),
        ({"bf16__enabled": True}, True, "fp32"),
        ({"data_types__grad_accum_dtype": "bf16"}, True, "bf16"),  # said by name
        ({}, False, None),
        ({"zero_optimization__stage": 1}, True, None),  # another optimizer class, for nothing
    ],
)
def test_partitions_of_bf16_gradients_add_up_in_fp32_unless_said_otherwise(
    changes: dict[str, Any], bf16: bool, filled: str | None
) -> None:
    config = changed(**changes)
    fill_deepspeed_config(config, arguments(bf16=bf16))
    assert config.get("data_types", {}).get("grad_accum_dtype") == filled


class _Recording(dict[str, Any]):
    """A config that remembers which keys were looked for."""

    looked_for: set[str] = set()  # noqa: RUF012  (of all copies together)

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_for.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.looked_for.add(str(key))
        return super().__contains__(key)

    def __copy__(self) -> "_Recording":
        return _Recording(self)

    def keys(self) -> Any:
        return self  # `in` and iteration are all that is asked of it


def test_the_known_keys_are_those_that_deepspeed_reads() -> None:
    """A failure means that DeepSpeed was upgraded: put what it reads now into `KNOWN_KEYS`."""
    prepare_deepspeed(on_cpu=True)
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(_Recording(train_micro_batch_size_per_gpu=1))
    # Read by `initialize`, before there is a config object.
    assert _Recording.looked_for | {"sequence_parallel_size"} == KNOWN_KEYS
