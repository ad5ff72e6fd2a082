"""Attention over pages in half precision: what its graph keeps, and what adds up in fp32."""

import torch
from torch import Tensor

from longstraw.attention import AttentionOptions, paged_attention
from longstraw.state import LayerHandle, PageStore

B, H, K, T, S, D = 2, 4, 2, 6, 8, 16
OPTIONS = AttentionOptions(softmax_scale=0.25)


def own_tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = [(B, heads, T, D) for heads in (H, K, K)]
    return tuple(torch.randn(s).bfloat16().to(dtype).requires_grad_() for s in sizes)  # type: ignore[return-value]


def handle(dtype: torch.dtype, num_history: int = 3 * S) -> LayerHandle:
    """A history of pages of `S` tokens that takes cotangents."""
    torch.manual_seed(1)
    store = PageStore(torch.device("cpu"), S)
    key, value = (torch.randn(1, K, num_history, D).bfloat16().to(dtype) for _ in range(2))
    pages = store.write(key, value, 0, needs_cotangent=True)
    return LayerHandle(pages, store, q_start=num_history, own_start=num_history)


def test_the_graph_keeps_no_wider_copy() -> None:
    """Saved for the backward: query, key, value and the returned output, in bf16, and one fp32
    number per query and head. An output kept in fp32 would be the largest of them."""
    query, key, value = own_tensors(torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = paged_attention(query, key, value, None, handle(torch.bfloat16), OPTIONS)
    expected = query.nbytes + key.nbytes + value.nbytes + out.nbytes + B * H * T * 4
    assert sum(x.nbytes for x in saved) == expected


def test_what_many_readers_leave_adds_up_in_fp32() -> None:
    """The 64th reader counts like the first. A sum in bf16 has 8 bits: from the 256th equal summand
    on it stays as it is, and long before each is rounded to a part of itself."""
    layer = handle(torch.bfloat16)
    first: list[Tensor] = []
    for _ in range(64):
        query, key, value = own_tensors(torch.bfloat16)
        paged_attention(query, key, value, None, layer, OPTIONS).sum().backward()
        first = first or [page.cotangents()[1].clone() for page in layer.history]
    for page, once in zip(layer.history, first, strict=True):
        assert page.cotangents()[1].dtype == torch.float32
        assert torch.allclose(page.cotangents()[1], 64 * once, rtol=1e-5, atol=0)


def test_mixed_inputs_meet_in_the_widest_dtype() -> None:
    """Autocast leaves queries and keys in fp32 and values in bf16: as precise as all in fp32."""
    results = []
    for value_dtype in (torch.float32, torch.bfloat16):
        query, key, value = own_tensors(torch.float32)
        value = value.detach().to(value_dtype).requires_grad_()
        out = paged_attention(query, key, value, None, handle(torch.float32), OPTIONS)
        out.sum().backward()
        results.append((out, query.grad, key.grad))
        assert value.grad is not None and value.grad.dtype == value_dtype
    for wide, mixed in zip(*results, strict=True):
        assert wide is not None and mixed is not None and torch.equal(wide, mixed)
