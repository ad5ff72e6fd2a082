"""The DeepSpeed config of a plan, with the keys of `ds_configs/`."""

from typing import Any

from .options import PlanOptions

AUTO = "auto"
"""Filled in by the trainer, from its own arguments and the model."""


def deepspeed_config(options: PlanOptions, batch_size: int | str = AUTO) -> dict[str, Any]:
    """As `deepspeed_config_file` of an accelerate YAML, or `--deepspeed` of a trainer, takes it.

    Args:
        batch_size: rows per process and step, where no trainer says.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": AUTO if batch_size == AUTO else 1,
        "gradient_clipping": AUTO if batch_size == AUTO else 1.0,
        "bf16": {"enabled": AUTO if batch_size == AUTO else options.itemsize == 2},
        "communication_data_type": "fp32",
    }
    if options.zero_stage >= 2:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    zero: dict[str, Any] = {"stage": options.zero_stage}
    if options.zero_stage >= 1:
        zero["reduce_bucket_size"] = AUTO
    if options.zero_stage in (1, 2):
        zero["contiguous_gradients"] = False
    if options.zero_stage == 3:
        zero["stage3_prefetch_bucket_size"] = AUTO
        zero["stage3_param_persistence_threshold"] = AUTO
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    config["zero_optimization"] = zero
    if options.ep_size > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": options.ep_size}
    return config
