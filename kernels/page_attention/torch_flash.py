"""Block attention by torch's fused CPU kernel.

`aten::_scaled_dot_product_flash_attention_for_cpu` returns the log-sum-exp and its backward accepts
a global one, so a block is exact on its own. It is called below autograd on purpose: through
autograd the gradient that reaches `lse` is dropped without a word.
"""

import torch
from torch import Tensor

from .params import BlockParams

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def why_not(q: Tensor, k: Tensor, v: Tensor, params: BlockParams) -> str | None:
    """The reason why this kernel cannot compute the block, or None if it can."""
    if q.device.type != "cpu":
        return f"it runs on the CPU only and the tensors are on {q.device}"
    if params.softcap is not None:
        return "it has no score softcap"
    if q.shape[-1] != v.shape[-1]:
        return f"it needs equal key and value dims, got {q.shape[-1]} and {v.shape[-1]}"
    if params.is_windowed:
        return "the sliding window hides keys of this block"
    if params.causal and not _is_square_causal(q, k, params):
        return "its causal mask needs queries and keys at the same positions"
    return None


def _is_square_causal(q: Tensor, k: Tensor, params: BlockParams) -> bool:
    # The kernel's causal mask is aligned top-left: row i sees keys 0..i.
    return q.shape[-2] == k.shape[-2] == params.q_len and params.q_start == params.k_start


def forward(q: Tensor, k: Tensor, v: Tensor, params: BlockParams) -> tuple[Tensor, Tensor]:
    """See `block_attention`."""
    return _forward(q, k, v, 0.0, params.causal, scale=params.softmax_scale)


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
    return _backward(grad_out, q, k, v, out, lse, 0.0, params.causal, scale=params.softmax_scale)
