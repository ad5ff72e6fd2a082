"""Which implementation of each operation is used on this machine, and why.

Asks the operations' own choice (`impl="auto"`) with operands of the device; runs none of them.
"""

import importlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from longstraw_kernels import (
    index_topk,
    lse_merge,
    page_attention,
    page_copy,
    selected_attention,
    selective_logprob,
)
from longstraw_kernels.availability import (
    choose,
    is_interpreted,
    is_triton_installed,
    why_not_triton,
)

from . import Finding


class Implementation(NamedTuple):
    """What an operation is computed by, and why not by the fastest."""

    operation: str
    chosen: str
    reason: str


def list_implementations(device: torch.device, dtype: torch.dtype) -> list[Implementation]:
    """The implementations that "auto" chooses for operands of `dtype` on `device`."""
    operand = torch.empty(0, dtype=dtype, device=device)
    reason = why_not_triton(operand)
    if reason is None and not operand.is_cuda:
        reason = 'the interpreter is never chosen by "auto"'
    reason = (reason or "").partition(" (")[0]  # without what would be typed to change it
    why = f"not Triton: {reason}" if reason else "on a GPU"
    found = [Implementation("attention", page_attention.available_impl(device, dtype), why)]
    operations = {
        "merges": lse_merge,
        "index scores": index_topk,
        "selected attention": selected_attention,
        "log-probs": selective_logprob,
        "page copies": page_copy,
    }
    for name, module in operations.items():
        chosen = choose("auto", module.IMPLEMENTATIONS, operand)
        found.append(Implementation(name, chosen, why))
    why_not = _why_not_imported("flash_attn")
    reason = "never on its own, but on request: attention='flash_attn', "
    reason += "longstraw_attention in the trainer"
    found.append(Implementation("flash-attn", why_not or "is installed", reason))
    for name, package, distribution in (
        ("Gated DeltaNet", "fla", "flash-linear-attention"),
        ("its convolution", "causal_conv1d", "causal-conv1d"),
    ):
        why_not = _why_not_imported(package)
        chosen = distribution if why_not is None else "torch, by transformers"
        why = f"{distribution} {why_not or 'is installed'}"
        found.append(Implementation(name, chosen, why))
    return found


def check_implementations() -> Iterator[Finding]:
    """Triton itself, then one line per operation."""
    has_gpu = torch.cuda.is_available()
    yield _check_triton(has_gpu)
    if is_interpreted():
        yield Finding(
            "fail" if has_gpu else "warn",
            "TRITON_INTERPRET=1 is set: Triton kernels run line by line in Python, thousands of "
            "times slower, wherever they are asked for",
            "unset TRITON_INTERPRET; it is for tests on machines without a GPU.",
        )
    device = torch.device("cuda" if has_gpu else "cpu")
    for item in list_implementations(device, torch.bfloat16):
        yield Finding("ok", f"{item.operation}: {item.chosen} ({item.reason})")


def _check_triton(has_gpu: bool) -> Finding:
    if not is_triton_installed():
        return Finding(
            "warn" if has_gpu else "ok",
            "triton is not installed: the reference implementations are used",
            "pip install 'longstraw[triton]'" if has_gpu else "",
        )
    if not has_gpu:
        return Finding(
            "warn",
            "triton has no driver here: the reference implementations are used",
            "Nothing to do on a machine without GPUs; on one with them see the line on torch.",
        )
    import triton

    if is_interpreted():
        return Finding("ok", f"triton {triton.__version__}")
    try:
        target: Any = triton.runtime.driver.active.get_current_target()
    except Exception as error:
        compiler = os.environ.get("CC", "gcc")
        return Finding(
            "fail",
            f"triton {triton.__version__} cannot start on this GPU: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}",
            f"It compiles a small C file first: install a C compiler ({compiler}) and Python's "
            "headers (apt-get install gcc python3-dev), and see that ~/.triton can be written.",
        )
    return Finding("ok", f"triton {triton.__version__} on {target.backend} {target.arch}")


def _why_not_imported(package: str) -> str | None:
    """Why transformers would go without a package; None if it takes it."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        return "is not installed" if error.name == package else f"lacks {error.name}"
    except Exception as error:
        return f"fails when imported ({type(error).__name__})"
    return None
