"""`selective_logprob` with one pass over each run of logits; the products are the library's.

What plain torch does to logits in six passes, and as many tensors, is one kernel here: it reads
them once, and in the backward writes their gradients over them. No atomics: equal bits each time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..availability import is_interpreted
from ..specialization import Specialization
from .params import TokenGradients, TokenResults, logits_of, runs

BLOCK, NUM_WARPS = 2048, 8
VARYING = ["first", "size"]


@triton.jit(do_not_specialize=VARYING)
def _selective_logprob_fwd_kernel(
    logits_ptr, targets_ptr, state_ptr, first, size, stride, num_rows, inverse_temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's part of a run: `state` is `[4, num_rows]`, highest, total, weighted, picked."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    highest = tl.load(state_ptr + row)
    total = tl.load(state_ptr + num_rows + row)
    weighted = tl.load(state_ptr + 2 * num_rows + row)
    for block in range(0, size, BLOCK):
        columns = block + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + columns, mask=columns < size, other=-float("inf"))
        z = z.to(tl.float32) * inverse_temperature
        new = tl.maximum(highest, tl.max(z, 0))
        pivot = tl.where(new == -float("inf"), 0.0, new)
        decay, p = tl.exp(highest - pivot), tl.exp(z - pivot)
        total = total * decay + tl.sum(p, 0)
        weighted = weighted * decay + tl.sum(tl.where(p > 0, p * z, 0.0), 0)
        highest = new
    tl.store(state_ptr + row, highest)
    tl.store(state_ptr + num_rows + row, total)
    tl.store(state_ptr + 2 * num_rows + row, weighted)
    target = tl.load(targets_ptr + row) - first
    if (target >= 0) & (target < size):
        z = tl.load(logits_ptr + target).to(tl.float32) * inverse_temperature
        tl.store(state_ptr + 3 * num_rows + row, z)


@triton.jit(do_not_specialize=VARYING)
def _selective_logprob_bwd_kernel(
    logits_ptr, dlogits_ptr, targets_ptr, lse_ptr, entropies_ptr, logp_grad_ptr, entropy_grad_ptr,
    first, size, stride, inverse_temperature, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of one row's logits; `dlogits` may be the logits."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits_ptr + row * stride + columns, mask=columns < size, other=-float("inf"))
    log_p = z.to(tl.float32) * inverse_temperature - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    logp_grad = tl.load(logp_grad_ptr + row)
    is_target = columns == tl.load(targets_ptr + row) - first
    dz = logp_grad * (tl.where(is_target, 1.0, 0.0) - p)
    if HAS_ENTROPY:
        terms = tl.where(p > 0, p * (log_p + tl.load(entropies_ptr + row)), 0.0)
        dz -= tl.load(entropy_grad_ptr + row) * terms
    dz = (dz * inverse_temperature).to(dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + row * stride + columns, dz, mask=columns < size)


def forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float
) -> TokenResults:
    """See `selective_logprob`."""
    number = len(targets)
    state = torch.zeros(4, number, dtype=torch.float32, device=hidden.device)
    state[0] = -torch.inf
    targets = targets.contiguous()
    for run in runs(len(weight) if number else 0):
        logits = logits_of(hidden, weight, bias, run)
        with torch.cuda.device_of(hidden):
            _selective_logprob_fwd_kernel[(number,)](
                logits_ptr=logits,
                targets_ptr=targets,
                state_ptr=state,
                num_rows=number,
                **_arguments(logits, run, temperature),
            )
    highest, total, weighted, picked = state
    lse = highest + torch.log(total)
    return TokenResults(picked - lse, lse - weighted / total, lse)


def backward(
    logp_grad: Tensor,
    entropy_grad: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    results: TokenResults,
    needs_weight: bool,
) -> TokenGradients:
    """See `selective_logprob_backward`."""
    dhidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    dweight = torch.zeros_like(weight) if needs_weight else None
    dbias = torch.zeros_like(bias) if needs_weight and bias is not None else None
    logp_grad = logp_grad.float().contiguous()
    pointers = {
        "targets_ptr": targets.contiguous(),
        "lse_ptr": results.lse,
        "entropies_ptr": results.entropies,
        "logp_grad_ptr": logp_grad,
        "entropy_grad_ptr": (
            logp_grad if entropy_grad is None else entropy_grad.float().contiguous()
        ),
        "HAS_ENTROPY": entropy_grad is not None,
    }
    for run in runs(len(weight) if len(targets) else 0):
        dlogits = _gradients_of_run(hidden, weight, bias, run, temperature, pointers)
        dhidden += _product(dlogits, weight[run])
        if dweight is not None:
            dweight[run] = dlogits.T @ hidden
        if dbias is not None:
            dbias[run] = dlogits.sum(0, dtype=torch.float32).to(dbias.dtype)
    return TokenGradients(dhidden, dweight, dbias)


def _gradients_of_run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    run: slice,
    temperature: float,
    pointers: dict[str, Any],
) -> Tensor:
    """dL/dlogits of a run, in the operands' dtype: tensor cores multiply it."""
    logits = logits_of(hidden, weight, bias, run)
    # The interpreter cuts numbers off where a GPU rounds them to half precision.
    dlogits = torch.empty_like(logits, dtype=torch.float32) if is_interpreted() else logits
    with torch.cuda.device_of(hidden):
        _selective_logprob_bwd_kernel[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
            logits_ptr=logits,
            dlogits_ptr=dlogits,
            **pointers,
            **_arguments(logits, run, temperature),
        )
    return dlogits.to(hidden.dtype)


def _arguments(logits: Tensor, run: slice, temperature: float) -> dict[str, Any]:
    return {
        "first": run.start,
        "size": logits.shape[1],
        "stride": logits.shape[1],
        "inverse_temperature": 1.0 / temperature,
        "BLOCK": BLOCK,
        "num_warps": NUM_WARPS,
    }


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a b` in fp32: it is one term of a sum over runs."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda and _HAS_OUT_DTYPE:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


_HAS_OUT_DTYPE = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 8)


def specializations() -> list[Specialization]:
    """Of bf16 logits."""
    forward = {
        "logits_ptr": "*bf16",
        "targets_ptr": "*i64",
        "state_ptr": "*fp32",
        "first": "i32",
        "size": "i32",
        "stride": "i32",
        "num_rows": "i32",
        "inverse_temperature": "fp32",
    }
    names = ("lse_ptr", "entropies_ptr", "logp_grad_ptr", "entropy_grad_ptr")
    backward = {n: t for n, t in forward.items() if n not in ("state_ptr", "num_rows")}
    backward |= {"dlogits_ptr": "*bf16", **dict.fromkeys(names, "*fp32")}
    options = {"num_warps": NUM_WARPS, "num_stages": 3, "divisible": ("stride",)}
    return [
        Specialization(
            "forward, bf16",
            _selective_logprob_fwd_kernel,
            forward,
            {"BLOCK": BLOCK},
            **options,
        ),
        *(
            Specialization(
                f"backward, bf16{', with entropy' if has_entropy else ''}",
                _selective_logprob_bwd_kernel,
                backward,
                {"HAS_ENTROPY": has_entropy, "BLOCK": BLOCK},
                **options,
            )
            for has_entropy in (False, True)
        ),
    ]
