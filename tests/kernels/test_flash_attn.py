"""How flash-attn is called: against a stand-in with its signature, layouts, masks and alignment.

The package itself needs a GPU to be built; `test_flash_attn_on_the_gpu` is for where it is.
"""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from longstraw_kernels.page_attention import (
    BlockParams,
    block_attention,
    block_attention_backward,
    flash_attn,
)

SCALE = 0.3


def _probabilities(q, k, lse, softmax_scale, causal, left, right, softcap):
    """Scores and softmax in `[B, H, T, S]` of `[B, T, H, D]`, masks aligned bottom-right."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    num_queries, num_keys = scores.shape[-2:]
    row = torch.arange(num_queries)[:, None] + num_keys - num_queries
    column = torch.arange(num_keys)
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    if causal or right >= 0:
        hidden |= column > row + max(right, 0)
    if left >= 0:
        hidden |= column < row - left
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return torch.exp(scores - lse.unsqueeze(-1)), scores, lse


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, return_softmax,
):  # fmt: skip
    assert dropout_p == 0 and alibi_slopes is None and not return_softmax
    mask = causal, window_size_left, window_size_right, softcap
    p, _, lse = _probabilities(q, k, None, softmax_scale, *mask)
    out = torch.einsum("bhts,bshd->bthd", p, v.repeat_interleave(q.shape[2] // v.shape[2], dim=2))
    return out, lse, torch.empty(0), torch.empty(2)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
    window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert deterministic and all(x.is_contiguous() for x in (dout, q, k, v, out, softmax_lse))
    mask = causal, window_size_left, window_size_right, softcap
    p, scores, _ = _probabilities(q, k, softmax_lse, softmax_scale, *mask)
    groups = q.shape[2] // k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    delta = (dout * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    ds = p * (torch.einsum("bthd,bshd->bhts", dout, wide_v) - delta) * softmax_scale
    if softcap:
        ds = ds * (1 - (scores.masked_fill(scores == -torch.inf, 0.0) / softcap) ** 2)
    dq.copy_(torch.einsum("bhts,bshd->bthd", ds, wide_k))
    for target, whole in (
        (dk, torch.einsum("bhts,bthd->bshd", ds, q)),
        (dv, torch.einsum("bhts,bthd->bshd", p, dout)),
    ):
        target.copy_(whole.unflatten(2, (k.shape[2], groups)).sum(3))
    return delta


@pytest.fixture
def stand_in(monkeypatch) -> None:
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward = _flash_attn_forward
    interface._flash_attn_backward = _flash_attn_backward
    package.flash_attn_interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    monkeypatch.setattr(flash_attn, "why_not", flash_attn.why_not_shape)


def tensors(num_queries: int, num_keys: int, dtype=torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, num_queries, 16), (2, 2, num_keys, 16), (2, 2, num_keys, 16)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return *(x.to(dtype) for x in made), torch.randn(shapes[0], generator=generator).to(dtype)


CASES = {
    "history": (BlockParams(SCALE, 20, 5, 0), 5, 9),
    "own keys": (BlockParams(SCALE, 20, 6, 20, causal=True), 6, 6),
    "decoding": (BlockParams(SCALE, 28, 3, 20, causal=True), 3, 11),
    "own keys in a window": (BlockParams(SCALE, 20, 8, 20, causal=True, window=3), 8, 8),
    "softcap": (BlockParams(SCALE, 20, 6, 20, causal=True, softcap=1.5), 6, 6),
}


@pytest.mark.parametrize(("params", "queries", "keys"), CASES.values(), ids=CASES.keys())
def test_blocks_are_those_of_the_definition(stand_in, params, queries: int, keys: int) -> None:
    """fp64: a difference is a mistake in how it is called."""
    q, k, v, grad_out = tensors(queries, keys)
    found = block_attention(q, k, v, params, impl="flash_attn")
    expected = block_attention(q, k, v, params, impl="reference")
    for ours, plain in zip(found, expected, strict=True):
        assert torch.allclose(ours, plain, rtol=0, atol=1e-13)
    # As merged with keys elsewhere, which the backward must believe.
    out, lse = 0.7 * expected[0], expected[1] + 0.2
    grads = [
        block_attention_backward(grad_out, q, k, v, out, lse, params, impl=impl)
        for impl in ("flash_attn", "reference")
    ]
    for ours, plain in zip(*grads, strict=True):
        assert torch.allclose(ours, plain, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("params", "queries", "keys", "reason"),
    [
        (BlockParams(SCALE, 20, 5, 18, causal=True), 5, 9, "last query"),
        (BlockParams(SCALE, 20, 8, 24, causal=True), 8, 4, "last query"),
        (BlockParams(SCALE, 20, 3, 20, causal=True), 6, 3, "last query"),
        (BlockParams(SCALE, 20, 5, 0, window=8), 5, 9, "last query"),
        (BlockParams(SCALE, 20, 5, 16, window=8), 5, 9, "window"),
    ],
    ids=["early", "more queries than keys", "side by side", "history", "no mask"],
)
def test_what_its_masks_cannot_do_is_refused(stand_in, params, queries, keys, reason) -> None:
    q, k, v, _ = tensors(queries, keys)
    with pytest.raises(ValueError, match=f"flash_attn.*{reason}.*impl='reference'"):
        block_attention(q, k, v, params, impl="flash_attn")


def test_sizes_it_does_not_have_are_refused(stand_in) -> None:
    q, k, v, _ = tensors(5, 9)
    params = BlockParams(SCALE, 20, 5, 0)
    with pytest.raises(ValueError, match="head dim of 15"):
        block_attention(q[..., 1:], k[..., 1:], v[..., 1:], params, impl="flash_attn")
    with pytest.raises(ValueError, match="another width"):
        block_attention(q, k, v[..., :8], params, impl="flash_attn")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_or_the_package_it_says_so() -> None:
    q, k, v, _ = tensors(5, 9, torch.bfloat16)
    with pytest.raises(ValueError, match="not installed|GPUs only"):
        block_attention(q, k, v, BlockParams(SCALE, 20, 5, 0), impl="flash_attn")


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="no flash-attn")
@pytest.mark.parametrize(("params", "queries", "keys"), CASES.values(), ids=CASES.keys())
def test_flash_attn_on_the_gpu(params, queries: int, keys: int) -> None:
    """error <= 2 * (error of the definition in bf16 + one rounding of the largest value)."""
    given = [x.cuda() for x in tensors(queries, keys, torch.bfloat16)]
    results = {}
    for impl, dtype in (("flash_attn", None), ("reference", None), ("reference", torch.float64)):
        q, k, v, grad_out = (x.to(dtype or x.dtype) for x in given)
        out, lse = block_attention(q, k, v, params, impl=impl)
        grads = block_attention_backward(
            grad_out, q, k, v, out.to(q.dtype), lse, params, impl=impl
        )  # fmt: skip
        results[impl, dtype] = [out, lse, *grads]
    ours, plain = results["flash_attn", None], results["reference", None]
    for a, b, exact in zip(ours, plain, results["reference", torch.float64], strict=True):
        rounding = torch.finfo(torch.bfloat16).eps * exact.abs().max()
        assert (a - exact).abs().max() <= 2 * ((b - exact).abs().max() + rounding)
