"""Block attention and its merge: every implementation against fp64 truth."""

import itertools

import pytest
import torch
from torch import Tensor

from longstraw_kernels.lse_merge import add_sink, merge_lse_
from longstraw_kernels.page_attention import (
    BlockParams,
    block_attention,
    block_attention_backward,
)

# (batch, query heads, key heads, queries, history keys, head dim): grouped heads, one head, odd
# sizes, one query, one key.
SHAPES = [(1, 6, 2, 9, 14, 16), (2, 4, 4, 5, 3, 8), (1, 3, 1, 1, 7, 16), (1, 2, 2, 4, 1, 4)]
FEATURES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "window": {"window": 4},
    "window+softcap": {"window": 6, "softcap": 3.0},
}


def tensors(shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, queries, history, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def random(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    keys = history + queries
    q, k = random(batch, heads, queries, dim), random(batch, kv_heads, keys, dim)
    return q, k, random(batch, kv_heads, keys, dim), random(batch, heads, queries, dim)


def definition(q, k, v, scale, history, window=None, softcap=None):
    """One softmax over all keys, by autograd: the torch lines that everything else replaces."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = (history + torch.arange(q.shape[2]))[:, None] - torch.arange(k.shape[2])
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v


def by_blocks(q, k, v, grad_out, scale, history, impl, **features):
    """The same by two blocks of history and the own keys, merged; and the blocks' gradients."""
    middle = history // 2
    cuts = [(0, middle), (middle, history), (history, k.shape[2])]
    blocks = [
        (slice(a, b), BlockParams(scale, history, q.shape[2], a, causal=a == history, **features))
        for a, b in cuts
        if b > a
    ]
    merged = None
    for keys, params in blocks:
        part = block_attention(q, k[:, :, keys], v[:, :, keys], params, impl=impl)
        if merged is None:
            merged = part[0].to(part[1].dtype), part[1]
        else:
            merge_lse_(*merged, *part)
    out, lse = merged[0].to(q.dtype), merged[1]
    grads = [
        block_attention_backward(
            grad_out, q, k[:, :, keys], v[:, :, keys], out, lse, params, impl=impl
        )
        for keys, params in blocks
    ]
    dq = sum(g[0].to(lse.dtype) for g in grads)
    return out, dq, torch.cat([g[1] for g in grads], 2), torch.cat([g[2] for g in grads], 2)


@pytest.mark.parametrize(
    ("impl", "feature"),
    [(impl, feature) for impl in ("reference", "auto") for feature in FEATURES]
    + [("torch_flash", "plain")],  # it refuses the others; see below
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_merge_to_one_softmax_forward_and_backward(shape, impl: str, feature: str) -> None:
    """fp64: a difference is a mistake. A window hides some blocks' keys from all queries, so rows
    without any visible key pass through the merge."""
    features = FEATURES[feature]
    q, k, v, grad_out = tensors(shape, torch.float64)
    history = shape[4]
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    expected = definition(q, k, v, 0.3, history, **features)
    expected.backward(grad_out)
    with torch.no_grad():
        found = by_blocks(q, k, v, grad_out, 0.3, history, impl, **features)
    for ours, reference in zip(found, (expected, q.grad, k.grad, v.grad), strict=True):
        assert torch.allclose(ours, reference, rtol=0, atol=1e-13)


@pytest.mark.parametrize("impl", ["torch_flash", "auto"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp32_error_is_that_of_the_reference(shape, impl: str) -> None:
    """An implementation may not be less accurate than the definition in the same precision:
    error <= 2 * (error of the fp32 definition + one rounding of the largest value)."""
    history = shape[4]
    q, k, v, grad_out = tensors(shape, torch.float64)
    truth = by_blocks(q, k, v, grad_out, 0.3, history, "reference")
    single = [x.float() for x in (q, k, v, grad_out)]
    reference = by_blocks(*single, 0.3, history, "reference")
    found = by_blocks(*single, 0.3, history, impl)
    for exact, plain, ours in zip(truth, reference, found, strict=True):
        rounding = torch.finfo(torch.float32).eps * exact.abs().max()
        budget = 2 * ((plain - exact).abs().max() + rounding)
        assert (ours - exact).abs().max() <= budget


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_error_is_that_of_one_softmax_in_bf16(shape, impl: str) -> None:
    """Blocks in half precision, put together in fp32, lose no more than torch's own attention over
    all keys at once: error <= 2 * (its error + one rounding of the largest value)."""
    q, k, v, grad_out = (x.bfloat16() for x in tensors(shape, torch.float64))
    history = shape[4]
    truth = by_blocks(*(x.double() for x in (q, k, v, grad_out)), 0.3, history, "reference")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = torch.arange(k.shape[2]) <= history + torch.arange(q.shape[2])[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    out.backward(grad_out)
    found = by_blocks(q, k, v, grad_out, 0.3, history, impl)
    for exact, plain, ours in zip(truth, (out, *(x.grad for x in leaves)), found, strict=True):
        rounding = torch.finfo(torch.bfloat16).eps * exact.abs().max()
        budget = 2 * ((plain - exact).abs().max() + rounding)
        assert (ours - exact).abs().max() <= budget


@pytest.mark.parametrize("impl", ["reference", "torch_flash"])
def test_rows_of_several_sequences_can_stand_side_by_side(impl: str) -> None:
    """Members laid side by side in T see a shared page as each would alone."""
    q, k, v, _ = tensors((3, 4, 2, 5, 6, 8), torch.float64)
    page_k, page_v = k[:1, :, :6], v[:1, :, :6]
    params = BlockParams(0.3, 6, 5, 0)
    folded = q.transpose(0, 1).reshape(1, 4, 15, 8)
    out, _ = block_attention(folded, page_k, page_v, params, impl=impl)
    for member in range(3):
        alone, _ = block_attention(q[member : member + 1], page_k, page_v, params, impl=impl)
        rows = out[:, :, 5 * member : 5 * (member + 1)]
        assert torch.allclose(rows, alone, rtol=0, atol=1e-14)


def test_a_row_without_keys_is_zero_and_merges_away() -> None:
    """Both parts empty, one empty, and the other: no NaN, and the non-empty part unchanged."""
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    nothing, empty = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for a, b in itertools.permutations([(out, lse), (nothing, empty)]):
        merged_out, merged_lse = (x.clone() for x in a)
        merge_lse_(merged_out, merged_lse, *b)
        assert torch.equal(merged_out, out) and torch.equal(merged_lse, lse)
    both_out, both_lse = nothing.clone(), empty.clone()
    merge_lse_(both_out, both_lse, nothing, empty)
    assert torch.equal(both_out, nothing) and torch.equal(both_lse, empty)


def test_a_sink_takes_probability_and_gives_nothing() -> None:
    """Equal to a softmax with one more logit whose value is zero."""
    scores, values = torch.randn(1, 2, 3, 5).double(), torch.randn(1, 2, 5, 4).double()
    sink = torch.randn(2).double()
    with_column = torch.cat([scores, sink.view(1, 2, 1, 1).expand(1, 2, 3, 1)], -1)
    expected = torch.softmax(with_column, -1)[..., :-1] @ values
    out, _ = add_sink(torch.softmax(scores, -1) @ values, scores.logsumexp(-1), sink)
    assert torch.allclose(out, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("features", "reason"),
    [({"softcap": 2.0}, "softcap"), ({"window": 2}, "window"), ({"causal": True}, "positions")],
    ids=lambda x: str(x),
)
def test_a_requested_implementation_runs_or_raises(features, reason: str) -> None:
    """It never silently becomes another."""
    q, k, v, _ = tensors((1, 2, 2, 4, 5, 8), torch.float64)
    params = BlockParams(0.3, 5, 4, 0, **features)
    with pytest.raises(ValueError, match=reason):
        block_attention(q, k, v, params, impl="torch_flash")
    block_attention(q, k, v, params, impl="auto")


def test_an_unknown_implementation_names_the_known_ones() -> None:
    q, k, v, _ = tensors((1, 2, 2, 4, 5, 8), torch.float64)
    with pytest.raises(ValueError, match="torch_flash"):
        block_attention(q, k, v, BlockParams(0.3, 5, 4, 0), impl="flash")
