"""What is trained on NF4 weights under DeepSpeed: `LAUNCHES[launch][job]`."""

from dataclasses import replace

import torch

from tests.deepspeed.groups import UNEQUAL
from tests.deepspeed.jobs import OFFLOAD, ONE_AT_A_TIME, STAGES, Job, groups_setting, lora
from tests.deepspeed.sequence_jobs import PAIR
from tests.qlora import in_fp32, load_nf4, widen_adapters
from tests.trl.parity import Setting

LAUNCH, MORE = "NF4", "more NF4"
TRUTH = (LAUNCH, "ZeRO-0, NF4")
"""The job whose one-process run is that of all in fp32."""

# As "auto" has it for adapters that are small beside their model, unlike these.
_LOCAL = {**ONE_AT_A_TIME, "longstraw_accumulate": "local"}
_FP32 = replace(
    groups_setting(UNEQUAL[:4]),
    trainer=lora,
    wrap_model=lambda model: load_nf4(model.name_or_path),
    prepare=widen_adapters,  # TRL has rounded them to bf16
    longstraw=_LOCAL,
)
_BF16 = replace(
    _FP32.but(bf16=True),
    wrap_model=lambda model: load_nf4(model.name_or_path, torch.bfloat16),
    prepare=lambda trainer: None,
)
_CHECKPOINTING = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
_PARTITIONED = replace(_FP32, longstraw={**_LOCAL, "longstraw_accumulate": "partitioned"})


def fp32_of(setting: Setting) -> Setting:
    """The same start as in bf16, and everything computed in fp32."""
    return replace(
        setting.but(bf16=False),
        wrap_model=lambda model: in_fp32(load_nf4(model.name_or_path, torch.bfloat16)),
        prepare=widen_adapters,
    )


FP32 = {
    **{f"ZeRO-{stage}, NF4": Job(_FP32, stage) for stage in STAGES[:3]},
    "ZeRO-3, NF4": Job(_FP32, 3, same_as=TRUTH, probe="memory"),
    # Packed weights, adapters and norms among them: three dtypes and sizes.
    "ZeRO-3, NF4, small parameters kept whole": Job(
        _FP32, 3, {"stage3_param_persistence_threshold": 1000}, same_as=TRUTH
    ),
    "ZeRO-3, NF4, partitioned": Job(_PARTITIONED, 3, same_as=TRUTH),
    "ZeRO-3, NF4, checkpointing": Job(_FP32.but(**_CHECKPOINTING), 3, same_as=TRUTH),
    "ZeRO-3, NF4, parameters in host memory": Job(
        _FP32, 3, {"offload_param": OFFLOAD}, same_as=TRUTH
    ),
    "ZeRO-3, NF4, ranks that share prompts": PAIR.job(Job(_FP32, 3), TRUTH),
    "ZeRO-3, NF4, reference without adapters": Job(_FP32.but(beta=0.2), 3),
}
BF16 = {f"ZeRO-{stage}, NF4, bf16": Job(_BF16, stage) for stage in (2, 3)}
FEW = ("ZeRO-0, NF4", "ZeRO-3, NF4", "ZeRO-3, NF4, ranks that share prompts")
"""What `make test` runs."""

LAUNCHES: dict[str, dict[str, Job]] = {
    LAUNCH: {name: FP32[name] for name in FEW},
    MORE: {
        **{name: job for name, job in FP32.items() if name not in FEW},
        **BF16,
        **{f"stock, {name}": replace(job, is_ours=False) for name, job in BF16.items()},
    },
}
