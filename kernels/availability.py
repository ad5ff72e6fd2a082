"""Whether Triton can run on some tensors here, and if not, why.

What "auto" chooses depends on the device and the dtype alone; a requested implementation runs or
raises.
"""

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors: a tool for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def is_triton_installed() -> bool:
    """Whether `import triton` finds something; nothing is imported."""
    return importlib.util.find_spec("triton") is not None


def why_not_triton(*tensors: Tensor) -> str | None:
    """The reason why no Triton kernel can read these tensors, or None if one can."""
    if not is_triton_installed():
        return "Triton is not installed (pip install 'longstraw[triton]')"
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype not in TRITON_DTYPES:
            return f"its kernels add up in fp32, and a tensor is {tensor.dtype}"
        if not tensor.is_cuda and not (is_interpreted() and tensor.device.type == "cpu"):
            return (
                f"it runs on GPUs and a tensor is on {tensor.device} (TRITON_INTERPRET=1, set "
                "before Python starts, runs it slowly on the CPU)"
            )
    return None


def choose(impl: str, implementations: tuple[str, ...], *tensors: Tensor) -> str:
    """ "triton" or "reference", for an operation that has these two.

    Args:
        impl: "auto" takes Triton on a GPU (up to fp32), and the definition elsewhere.
        implementations: names that the operation accepts.
        tensors: what it reads.

    Raises:
        ValueError: an unknown name, or a requested implementation that cannot run.
    """
    if impl not in implementations:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(implementations)}.")
    if impl == "reference":
        return impl
    reason = why_not_triton(*tensors)
    if impl == "auto":  # never takes the interpreter
        is_on_gpu = all(tensor.is_cuda for tensor in tensors)
        return "triton" if reason is None and is_on_gpu else "reference"
    if reason is not None:
        raise ValueError(
            f"impl='triton' cannot run here: {reason}. Use impl='auto' (takes it where it can) or "
            "impl='reference'."
        )
    return impl


def impl_beside(attention: str) -> str:
    """The `impl` of the operations beside attention, where attention is computed by `attention`.

    "reference" and "triton" are asked of everything; other names are attention's alone.
    """
    return attention if attention in ("reference", "triton") else "auto"
