"""Attention over a list of pages: every implementation against fp64 truth."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from longstraw_kernels.availability import is_triton_installed
from longstraw_kernels.lse_merge import merge_lse_
from longstraw_kernels.page_attention import (
    BlockParams,
    PageParams,
    block_attention,
    block_attention_backward,
    page_attention,
    page_attention_backward,
)

needs_triton = pytest.mark.skipif(not is_triton_installed(), reason="Triton is not installed")
IMPLEMENTATIONS = ["reference", pytest.param("triton", marks=needs_triton)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """Shapes of one call; `pages` are lengths, `starts` positions if pages do not follow."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    queries: int = 5
    pages: tuple[int, ...] = (7, 16, 19)
    dim: int = 16
    value_dim: int = 16
    q_start: int | None = None
    q_len: int | None = None
    starts: tuple[int, ...] | None = None
    features: dict = field(default_factory=dict)

    @property
    def params(self) -> PageParams:
        q_start = sum(self.pages) if self.q_start is None else self.q_start
        return PageParams(SCALE, q_start, self.q_len or self.queries, **self.features)

    @property
    def page_starts(self) -> list[int]:
        follow = [sum(self.pages[:i]) for i in range(len(self.pages))]
        return follow if self.starts is None else list(self.starts)


CASES = {
    "history": Case(),
    "grouped heads, padded dims": Case(heads=6, kv_heads=2, queries=9, dim=24, value_dim=20),
    "a main part and a rest": Case(heads=3, pages=(5, 33), dim=40, value_dim=32),
    "a batch": Case(batch=2, heads=4, kv_heads=2, pages=(3, 17)),
    "decoding": Case(heads=4, queries=1, pages=(1, 40)),
    "more than a tile of rows": Case(heads=3, queries=21, pages=(35,)),
    "members side by side": Case(heads=2, queries=15, q_len=5, pages=(6, 18)),
    "causal": Case(heads=4, kv_heads=2, queries=20, pages=(9, 20), q_start=9,
                   features={"causal": True}),
    "causal, side by side": Case(queries=22, q_len=11, pages=(4, 18), q_start=11,
                                 features={"causal": True}),
    "window": Case(queries=18, pages=(9, 17, 20), features={"window": 12}),
    "window, causal, softcap": Case(
        heads=4, kv_heads=2, queries=20, pages=(16, 9, 25), q_start=30,
        features={"window": 13, "causal": True, "softcap": 1.5},
    ),
    "window, side by side": Case(queries=18, q_len=6, pages=(9, 17, 20), features={"window": 12}),
    "softcap": Case(pages=(20, 3), features={"softcap": 0.7}),
    "a gap between pages": Case(pages=(8, 8), starts=(0, 64), q_start=72),
    "rows that see nothing": Case(queries=12, pages=(8, 8), starts=(6, 14), q_start=0,
                                  features={"causal": True}),
}  # fmt: skip


def tensors(case: Case, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    """q, keys, values and the output's gradient, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(7)

    def random(*size: int) -> Tensor:
        made = torch.randn(*size, generator=generator, dtype=torch.float64)
        return made.to(dtype).to(DEVICE)

    q = random(case.batch, case.heads, case.queries, case.dim)
    keys = [random(case.batch, case.kv_heads, n, case.dim) for n in case.pages]
    values = [random(case.batch, case.kv_heads, n, case.value_dim) for n in case.pages]
    return q, keys, values, random(case.batch, case.heads, case.queries, case.value_dim)


def definition(case: Case):
    """One softmax over all keys in fp64, differentiated by autograd."""

    def from_rounded(q, keys, values, grad_out):
        leaves = [x.double().requires_grad_() for x in (q, *keys, *values)]
        k, v = (torch.cat(leaves[i : i + len(keys)], 2) for i in (1, 1 + len(keys)))
        groups = case.heads // case.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        params = case.params
        scores = leaves[0] @ k.transpose(-1, -2) * SCALE
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        at = [s + torch.arange(n) for s, n in zip(case.page_starts, case.pages, strict=True)]
        queries = params.q_start + torch.arange(case.queries) % params.q_len
        distance = (queries[:, None] - torch.cat(at)).to(DEVICE)
        hidden = (distance < 0) & params.causal
        if params.window is not None:
            hidden = hidden | (distance >= params.window)
        scores = scores.masked_fill(hidden, -torch.inf)
        blind = hidden.all(-1, keepdim=True)
        p = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
        out = p @ v
        out.backward(grad_out.double())
        lse = scores.logsumexp(-1)
        return named(out.detach(), lse.detach(), *(x.grad for x in leaves))

    return from_rounded


def named(out: Tensor, lse: Tensor, dq: Tensor, *grads: Tensor) -> dict[str, Tensor]:
    half = len(grads) // 2
    names = [f"d{x}{i}" for x in "kv" for i in range(half)]
    return {"out": out, "lse": lse, "dq": dq, **dict(zip(names, grads, strict=True))}


def computed(case: Case, impl: str, q, keys, values, grad_out) -> dict[str, Tensor]:
    """By `page_attention` and its backward, which adds to what stands in `into`."""
    pages = keys, values, case.page_starts
    out, lse = page_attention(q, *pages, case.params, impl=impl)
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    pairs = list(zip(keys, values, strict=True))
    into = [tuple(torch.ones(x.shape, dtype=sums, device=x.device) for x in kv) for kv in pairs]
    dq = page_attention_backward(
        grad_out, q, *pages, out.to(q.dtype), lse, case.params, into=into, impl=impl
    )
    added = [pair[i] - 1.0 for i in (0, 1) for pair in into]
    return named(out, lse, dq, *added)


def check(found: dict, plain: dict, truth: dict, dtype: torch.dtype) -> None:
    """error <= 2 * (error of the definition in the same dtype + one rounding of the largest)."""
    for name, exact in truth.items():
        assert torch.equal(found[name].isinf(), exact.isinf()), name
        exact, ours, theirs = (
            x.double().masked_fill(truth[name].isinf(), 0.0)
            for x in (exact, found[name], plain[name])
        )
        # The gradients were added to ones.
        largest = exact.abs().max() + (1.0 if name[:2] in ("dk", "dv") else 0.0)
        budget = 2 * ((theirs - exact).abs().max() + torch.finfo(dtype).eps * largest)
        assert (ours - exact).abs().max() <= budget, name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_definition_is_one_softmax_over_all_pages(case: Case) -> None:
    """fp64: a difference is a mistake."""
    given = tensors(case, torch.float64)
    truth, found = definition(case)(*given), computed(case, "reference", *given)
    for name, exact in truth.items():
        assert torch.allclose(found[name], exact, rtol=0, atol=1e-13), name


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_error_is_that_of_the_definition_in_the_same_dtype(case: Case, dtype) -> None:
    given = tensors(case, dtype)
    truth, plain = definition(case)(*given), computed(case, "reference", *given)
    check(computed(case, "triton", *given), plain, truth, dtype)


@needs_triton
@pytest.mark.parametrize("features", [{}, {"softcap": 1.5}, {"causal": True}], ids=str)
def test_a_block_is_a_list_of_one_page(features: dict) -> None:
    case = Case(heads=4, kv_heads=2, queries=8, pages=(18,), q_start=10, features=features)
    q, (k,), (v,), grad_out = given = tensors(case, torch.float32)
    params = case.params.at(0)
    out, lse = block_attention(q, k, v, params, impl="triton")
    grads = block_attention_backward(grad_out, q, k, v, out, lse, params, impl="triton")
    truth, plain = definition(case)(*given), computed(case, "reference", *given)
    check(named(out, lse, *grads), plain, truth, torch.float32)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_parts_of_the_pages_merge_to_all(impl: str) -> None:
    """The backward of some pages needs the merged result and none of the other pages."""
    case = CASES["window, causal, softcap"]
    given = q, keys, values, grad_out = tensors(case, torch.float32)
    starts, params = case.page_starts, case.params
    parts = [slice(0, 1), slice(1, 3)]
    merged, *others = (
        page_attention(q, keys[part], values[part], starts[part], params, impl=impl)
        for part in parts
    )
    for other in others:
        merge_lse_(*merged, *other)
    into = [tuple(torch.zeros_like(x) for x in pair) for pair in zip(keys, values, strict=True)]
    dq = sum(
        page_attention_backward(
            grad_out, q, keys[part], values[part], starts[part], *merged, params,
            into=into[part], impl=impl,
        )
        for part in parts
    )  # fmt: skip
    added = [pair[i] for i in (0, 1) for pair in into]
    truth, plain = definition(case)(*given), computed(case, "reference", *given)
    check(named(*merged, dq, *added), plain, truth, torch.float32)


@needs_triton
def test_pages_are_read_where_they_lie() -> None:
    """Views of a store: heads behind tokens, columns of a wider table, a last stride that is not
    1."""
    case = Case(batch=2, heads=4, kv_heads=2, pages=(9, 17))
    q, keys, values, grad_out = tensors(case, torch.float32)

    def scattered(x: Tensor) -> Tensor:
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, device=x.device)
        wide = wide.transpose(1, 2).contiguous().transpose(1, 2)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]

    plain = computed(case, "triton", q, keys, values, grad_out)
    lying = [scattered(keys[0]), keys[1].transpose(-1, -2).contiguous().transpose(-1, -2)]
    found = computed(
        case, "triton", q.transpose(1, 2).contiguous().transpose(1, 2), lying,
        [scattered(v) for v in values], grad_out.transpose(-1, -2).contiguous().transpose(-1, -2),
    )  # fmt: skip
    for name, x in plain.items():
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_sums_go_only_where_they_are_wanted(impl: str) -> None:
    """A page without sums costs none, and the sums of others are written through their strides."""
    case = Case(kv_heads=2, pages=(7, 16, 9))
    q, keys, values, grad_out = given = tensors(case, torch.float32)
    out, lse = page_attention(q, keys, values, case.page_starts, case.params, impl=impl)
    room = torch.full((2, 7, 2, 16), 5.0, device=DEVICE)  # [batch of dK and dV, tokens, heads, D]
    wanted = (room[:1].transpose(1, 2), room[1:].transpose(1, 2))
    page_attention_backward(
        grad_out, q, keys, values, case.page_starts, out, lse, case.params,
        into=[wanted, None, None], impl=impl,
    )  # fmt: skip
    truth = definition(case)(*given)
    for buffer, name in zip(wanted, ("dk0", "dv0"), strict=True):
        assert torch.allclose((buffer - 5.0).double(), truth[name], rtol=0, atol=1e-5), name


@needs_triton
def test_every_output_is_written_and_equal_inputs_give_equal_bits(monkeypatch) -> None:
    case = CASES["rows that see nothing"]
    given = tensors(case, torch.float32)
    first = computed(case, "triton", *given)
    plain_new_empty = Tensor.new_empty

    def poisoned(self, *args, **options):
        made = plain_new_empty(self, *args, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    again = computed(case, "triton", *given)
    for name, x in first.items():
        assert torch.equal(again[name], x) and not x.isnan().any(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(keys=[]), "at least one page"),
        (lambda a: a.update(starts=[0]), "1 starts"),
        (lambda a: a.update(q=a["q"][:, :1].expand(-1, 3, -1, -1)), "got 3 and 2"),
        (lambda a: a["keys"].__setitem__(1, a["keys"][1][:, :, 1:]), "Page 1 has keys"),
        (lambda a: a["values"].__setitem__(0, a["values"][0].double()), "Page 0 has values"),
    ],
    ids=["no page", "starts", "heads", "length", "dtype"],
)
def test_pages_that_do_not_fit_are_named(change, message: str) -> None:
    case = Case(kv_heads=2)
    q, keys, values, _ = tensors(case, torch.float32)
    arguments = {"q": q, "keys": keys, "values": values, "starts": case.page_starts}
    change(arguments)
    with pytest.raises(ValueError, match=message):
        page_attention(**arguments, params=case.params)


def test_sums_that_do_not_fit_are_named() -> None:
    case = Case(pages=(7,))
    q, (k,), (v,), grad_out = tensors(case, torch.float32)
    out, lse = page_attention(q, [k], [v], [0], case.params)
    for into, message in (
        ([], "one entry per page"),
        ([(torch.zeros_like(k).half(), torch.zeros_like(v))], "dK of page 0"),
        ([(torch.zeros_like(k), torch.zeros_like(v)[..., 1:])], "dV of page 0"),
        ([(torch.zeros_like(k), torch.zeros(1, 1, 16, 7).mT)], "last stride 1"),
    ):
        with pytest.raises(ValueError, match=message):
            page_attention_backward(
                grad_out, q, [k], [v], [0], out, lse, case.params, into=into
            )  # fmt: skip


@needs_triton
def test_triton_refuses_fp64_and_names_what_to_do() -> None:
    q, keys, values, _ = tensors(Case(), torch.float64)
    with pytest.raises(ValueError, match=r"add up in fp32.*impl='reference'"):
        page_attention(q, keys, values, Case().page_starts, Case().params, impl="triton")
    with pytest.raises(ValueError, match="choose one of auto, reference, triton"):
        page_attention(q, keys, values, Case().page_starts, Case().params, impl="flash")
    block = BlockParams(SCALE, 42, 5, 0)
    with pytest.raises(ValueError, match="add up in fp32"):
        block_attention(q, keys[0], values[0], block, impl="triton")
