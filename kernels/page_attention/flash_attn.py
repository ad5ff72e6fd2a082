"""The flash-attn package's fused kernels, on GPUs.

Called below its autograd, as `torch_flash` is: a backward that takes the merged `out` and `lse` is
exact for a block on its own. By request only: unlike Triton's kernels it takes one block at a time
and gives results in half precision.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from .params import BlockParams

MAX_DIM = 256


def why_not(q: Tensor, k: Tensor, v: Tensor, params: BlockParams) -> str | None:
    """The reason why these kernels cannot compute the block, or None if they can."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install 'longstraw[flash]')"
    if not q.is_cuda:
        return f"it runs on GPUs only and the tensors are on {q.device}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in half precision and the tensors are {q.dtype}"
    return why_not_shape(q, k, v, params)


def why_not_shape(q: Tensor, k: Tensor, v: Tensor, params: BlockParams) -> str | None:
    """As `why_not`, of sizes and masks alone."""
    if k.shape[-1] != v.shape[-1]:
        return f"values of another width than keys ({v.shape[-1]} and {k.shape[-1]})"
    if q.shape[-1] > MAX_DIM or q.shape[-1] % 8:
        return f"a head dim of {q.shape[-1]}; it needs a multiple of 8 up to {MAX_DIM}"
    is_masked = params.causal or params.is_windowed
    if is_masked and not _is_aligned(q, k, params):
        return "a mask whose last query does not stand at the last key"
    if params.is_windowed and not params.causal:
        return "a window over keys that all come before the queries"
    return None


def _is_aligned(q: Tensor, k: Tensor, params: BlockParams) -> bool:
    # Its masks are aligned bottom-right: the last query stands at the last key, and with as many
    # keys as queries each row sees a key. One that sees none would have an lse of +inf.
    end = params.q_start + params.q_len == params.k_start + k.shape[-2]
    return end and q.shape[-2] == params.q_len <= k.shape[-2]


def forward(q: Tensor, k: Tensor, v: Tensor, params: BlockParams) -> tuple[Tensor, Tensor]:
    """See `block_attention`."""
    out, lse, *_ = _interface()._flash_attn_forward(
        *(_by_token(x) for x in (q, k, v)),
        dropout_p=0.0,
        alibi_slopes=None,
        return_softmax=False,
        **_arguments(params),
    )
    return _by_head(out), lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    params: BlockParams,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `block_attention_backward`."""
    grad_out, q, k, v, out = (_by_token(x).contiguous() for x in (grad_out, q, k, v, out))
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _interface()._flash_attn_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        *gradients,
        dropout_p=0.0,
        alibi_slopes=None,
        deterministic=True,
        **_arguments(params),
    )
    dq, dk, dv = (_by_head(x) for x in gradients)
    return dq, dk, dv


def _arguments(params: BlockParams) -> dict[str, Any]:
    left = params.window - 1 if params.window is not None and params.is_windowed else -1
    return {
        "softmax_scale": params.softmax_scale,
        "causal": params.causal,
        "window_size_left": left,
        "window_size_right": 0 if params.causal else -1,
        "softcap": params.softcap or 0.0,
    }


def _interface() -> Any:
    import flash_attn.flash_attn_interface as interface

    return interface


def _by_token(x: Tensor) -> Tensor:
    """`[B, H, T, D]` -> `[B, T, H, D]`."""
    return x.transpose(1, 2)


def _by_head(x: Tensor) -> Tensor:
    """The inverse of `_by_token`."""
    return x.transpose(1, 2)
