"""What `bench_gpu.py` checks and times: every operation of the kernels, at sizes of real layers.

Knows how each is called and the least work that computes it; knows nothing of clocks or tables.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from longstraw_kernels.index_topk import index_scores
from longstraw_kernels.lse_merge import merge_lse_
from longstraw_kernels.page_attention import (
    PageParams,
    page_attention,
    page_attention_backward,
)
from longstraw_kernels.page_copy import gather_pages, scatter_add_pages
from longstraw_kernels.selected_attention import (
    selected_attention,
    selected_attention_backward,
)
from longstraw_kernels.selective_logprob import (
    VOCABULARY_RUN,
    selective_logprob,
    selective_logprob_backward,
)

Compute = Callable[[Sequence[Tensor], str], Sequence[Tensor]]
"""From inputs and an `impl`, what is compared."""


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        operation: its folder in `kernels/`.
        name: in words, with its size.
        flops, num_bytes: of the least work that computes it.
        run: computes it with an `impl`; timed.
        compute, inputs: the same at a small size, for the check.
        has_reference: whether the plain definition is timed too; over a long history it takes long.
    """

    operation: str
    name: str
    flops: float
    num_bytes: float
    run: Callable[[str], object]
    compute: Compute
    inputs: Sequence[Tensor]
    has_reference: bool = True


@dataclass(frozen=True)
class Scale:
    """Sizes of what is timed."""

    tokens: int
    queries: int
    page_size: int
    step_prompts: tuple[int, ...]
    hidden: int
    layers: int
    vocab: int
    responses: tuple[int, int]  # how many, of how many tokens
    rate_size: int
    heads: tuple[tuple[int, int, int], ...]  # query heads, key heads, dim
    index: tuple[int, int]  # heads and dim of an indexer
    latent: tuple[int, int, int]  # heads, width of a row, and of its value
    head: tuple[int, int]  # width and vocabulary of a language model's head


FULL = Scale(
    tokens=131_072,
    queries=4096,
    page_size=1024,
    step_prompts=(16_384, 131_072),
    hidden=2048,
    layers=16,
    vocab=32_768,
    responses=(8, 512),
    rate_size=8192,
    heads=((32, 8, 128), (16, 2, 256)),
    index=(32, 128),
    latent=(64, 576, 512),
    head=(4096, 151_936),
)
TINY = Scale(
    tokens=64,
    queries=24,
    page_size=16,
    step_prompts=(40,),
    hidden=64,
    layers=2,
    vocab=128,
    responses=(2, 5),
    rate_size=64,
    heads=((4, 2, 32),),
    index=(3, 16),
    latent=(3, 40, 32),
    head=(16, 300),
)


def random(device: torch.device, *shape: int) -> Tensor:
    """Normal numbers in bf16."""
    return torch.randn(*shape, device=device).bfloat16()


def list_cases(device: torch.device, scale: Scale) -> Iterator[Case]:
    """At the sizes of real layers."""
    for heads, kv_heads, dim in scale.heads:
        for queries in (scale.queries, 1):
            yield from attention(device, scale, heads, kv_heads, dim, queries)
    yield scores_of_index(device, scale)
    yield from attention_to_selected(device, scale)
    heads, _, dim = scale.heads[0]
    for dtype in (torch.float32, torch.bfloat16):  # as attention gives a part, and as it travels
        yield merge(device, scale.queries, heads, dim, dtype)
    yield merge(device, scale.queries, scale.latent[0], scale.latent[2], torch.float32)
    yield from copies_of_pages(device, scale)
    yield from scores_of_tokens(device, scale)


def attention(
    device: torch.device, scale: Scale, heads: int, kv_heads: int, dim: int, queries: int
) -> Iterator[Case]:
    """Of a chunk, or of one query, over a long history; of a chunk the backward too."""
    num_pages = scale.tokens // scale.page_size
    params = PageParams(dim**-0.5, scale.tokens, queries)
    starts = [scale.page_size * i for i in range(num_pages)]
    shape = (1, kv_heads, scale.page_size, dim)
    q = random(device, 1, heads, queries, dim)
    keys, values = ([random(device, *shape) for _ in starts] for _ in range(2))
    into = [
        tuple(torch.zeros(shape, device=device) for _ in range(2)) for _ in starts if queries > 1
    ]
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:-1], device=device)

    def forward(impl: str) -> object:
        return page_attention(q, keys, values, starts, params, impl=impl)

    def backward(impl: str) -> object:
        return page_attention_backward(
            q, q, keys, values, starts, out, lse, params, into=into, impl=impl
        )

    pairs, page_bytes = heads * queries * scale.tokens * dim, sum(x.nbytes for x in keys + values)
    compute, small = attention_by_parts(dim), (1, kv_heads, 2 * 48, dim)
    inputs = [random(device, 1, heads, 40, dim), random(device, *small), random(device, *small)]
    size = f"{heads}/{kv_heads} heads of {dim}, {queries:,} queries, {scale.tokens:,} keys"
    num_bytes = page_bytes + 6 * q.numel()
    yield Case(
        "page_attention", f"attention, {size}", 4 * pairs, num_bytes, forward, compute, inputs
    )
    if queries > 1:
        # Five products. Keys and values are read; their gradients, in fp32, read and written.
        num_bytes, name = 5 * page_bytes + 10 * q.numel(), f"its backward, {size}"
        yield Case("page_attention", name, 10 * pairs, num_bytes, backward, compute, inputs)


def attention_by_parts(dim: int) -> Compute:
    """Forward and backward over two pages, of which the second holds the queries' own keys."""

    def compute(inputs: Sequence[Tensor], impl: str) -> Sequence[Tensor]:
        q, k, v = inputs
        sums = torch.float64 if q.dtype == torch.float64 else torch.float32
        pages = k.chunk(2, dim=2), v.chunk(2, dim=2), [0, k.shape[2] // 2]
        params = PageParams(dim**-0.5, k.shape[2] // 2, q.shape[2], causal=True)
        out, lse = page_attention(q, *pages, params, impl=impl)
        grads = [
            tuple(torch.zeros(x.shape, dtype=sums, device=x.device) for x in pair)
            for pair in zip(*pages[:2], strict=True)
        ]
        dq = page_attention_backward(
            q, q, *pages, out.to(q.dtype), lse, params, into=grads, impl=impl
        )
        return [out, lse, dq, *(x for pair in grads for x in pair)]

    return compute


def scores_of_index(device: torch.device, scale: Scale) -> Case:
    """Of a chunk against a block of index keys, as GLM-5 has them."""
    queries, keys, (heads, dim) = scale.queries, min(2048, scale.tokens), scale.index

    def inputs(queries: int, keys: int) -> list[Tensor]:
        shapes = (1, queries, heads, dim), (1, keys, dim), (1, queries, heads)
        return [random(device, *shape) for shape in shapes]

    def compute(inputs: Sequence[Tensor], impl: str) -> Sequence[Tensor]:
        # The definition computes in fp32, whatever it is given.
        return [index_scores(*(x.float() for x in inputs), dim**-0.5, impl=impl)]

    q, k, weights = inputs(queries, keys)
    num_bytes = q.nbytes + k.nbytes + weights.nbytes + 4 * queries * keys
    return Case(
        "index_topk",
        f"index scores, {heads} heads of {dim}, {queries:,} queries, {keys:,} keys",
        2 * queries * keys * heads * dim,
        num_bytes,
        lambda impl: index_scores(q, k, weights, dim**-0.5, impl=impl),
        compute,
        inputs(20, 40),
    )


def attention_to_selected(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Over latents of MLA, forward and backward."""
    (heads, dim, value_dim), selected = scale.latent, min(2048, scale.tokens // 2)
    queries = scale.queries // 4

    def inputs(queries: int, tokens: int, selected: int) -> list[Tensor]:
        index = torch.rand(queries, tokens, device=device).topk(selected, dim=-1).indices
        return [random(device, queries, heads, dim), random(device, tokens, dim), index]

    def compute(inputs: Sequence[Tensor], impl: str) -> Sequence[Tensor]:
        q, rows, index = inputs
        found = selected_attention(q, rows, index, dim**-0.5, value_dim, impl=impl)
        grad = out = found[0].to(q.dtype)
        backward = selected_attention_backward
        return [*found, *backward(grad, q, rows, index, out, found[1], dim**-0.5, impl=impl)]

    small = inputs(5, 40, 16)
    q, rows, index = inputs(queries, scale.tokens, selected)
    out, lse = torch.zeros_like(q[..., :value_dim]), torch.zeros(q.shape[:2], device=device)
    pairs = queries * heads * selected
    num_bytes = queries * selected * rows[0].nbytes + 3 * q.nbytes
    size = f"{heads} heads of {dim}, {queries:,} queries, {selected:,} of {scale.tokens:,} rows"
    yield Case(
        "selected_attention",
        f"selected attention, {size}",
        2 * pairs * (dim + value_dim),
        num_bytes,
        lambda impl: selected_attention(q, rows, index, dim**-0.5, value_dim, impl=impl),
        compute,
        small,
    )
    yield Case(
        "selected_attention",
        f"its backward, {size}",
        pairs * (6 * dim + 4 * value_dim),
        2 * num_bytes + 4 * queries * selected * dim,
        lambda impl: selected_attention_backward(
            out, q, rows, index, out, lse, dim**-0.5, impl=impl
        ),
        compute,
        small,
    )


def merge(
    device: torch.device, queries: int, heads: int, dim: int, part_dtype: torch.dtype
) -> Case:
    """Of attention to one block of keys into that to others, for a chunk."""

    def operands(queries: int) -> list[Tensor]:
        out, part = (torch.randn(1, heads, queries, dim, device=device) for _ in range(2))
        lse, part_lse = (5 * torch.randn(1, heads, queries, device=device) for _ in range(2))
        return [out, lse, part.to(part_dtype), part_lse]

    def compute(inputs: Sequence[Tensor], impl: str) -> Sequence[Tensor]:
        out, lse, part, part_lse = (x.clone() for x in inputs)
        merge_lse_(out, lse, part, part_lse, impl=impl)
        return [out, lse]

    out, lse, part, part_lse = operands(queries)
    size = f"{heads} heads of {dim}, {queries:,} queries, part in {str(part_dtype)[6:]}"
    return Case(
        "lse_merge",
        f"merge, {size}",
        3 * out.numel(),
        2 * out.nbytes + part.nbytes + 2 * lse.nbytes + part_lse.nbytes,
        lambda impl: merge_lse_(out, lse, part, part_lse, impl=impl),
        compute,
        operands(9),
    )


def copies_of_pages(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Latents and rotary keys of MLA into one table, and the table's gradients onto their sums."""
    _, width, latent = scale.latent
    widths = [latent, width - latent]

    few, many = [40, 1, 17], [scale.page_size] * (scale.tokens // scale.page_size)

    def pages_of(sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(n, d, device=device).to(dtype) for d in widths for n in sizes]

    def parts_of(
        table: Tensor, pages: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, list[int], Sequence[Tensor]]]:
        """Of latents, then of rotary keys: columns of the table, first rows there, and pages."""
        half = len(pages) // 2
        for part, own in zip(table.split(widths, 1), (pages[:half], pages[half:]), strict=True):
            yield part, list(accumulate(map(len, own[:-1]), initial=0)), own

    def gather(pages: Sequence[Tensor], table: Tensor, impl: str) -> None:
        for part, places, own in parts_of(table, pages):
            gather_pages(own, places, part, impl=impl)

    def scatter_add(table: Tensor, pages: Sequence[Tensor], impl: str) -> None:
        for part, places, own in parts_of(table, pages):
            scatter_add_pages(part, places, own, impl=impl)

    def gathered(inputs: Sequence[Tensor], impl: str) -> Sequence[Tensor]:
        table = inputs[0].new_full((sum(few), width), torch.nan)
        gather(inputs, table, impl)
        return [table]

    def scattered(inputs: Sequence[Tensor], impl: str) -> Sequence[Tensor]:
        table, *pages = (x.clone() for x in inputs)
        scatter_add(table, pages, impl)
        return pages

    pages, sums = pages_of(many, torch.bfloat16), pages_of(many, torch.float32)
    table = random(device, sum(many), width)
    grads = table.float()
    size = f"{len(many):,} pages of {scale.page_size:,} rows of {latent} and {width - latent}"
    yield Case(
        "page_copy",
        f"gather, {size}",
        0,
        2 * table.nbytes,
        lambda impl: gather(pages, table, impl),
        gathered,
        pages_of(few, torch.bfloat16),
    )
    yield Case(
        "page_copy",
        f"scatter-add, {size}",
        grads.numel(),
        3 * grads.nbytes,
        lambda impl: scatter_add(grads, sums, impl),
        scattered,
        [torch.randn(sum(few), width, device=device), *pages_of(few, torch.float32)],
    )


def scores_of_tokens(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Log-probs of all responses' tokens by a head, and their gradients, the head's among them."""
    (number, length), (width, vocabulary) = scale.responses, scale.head

    def operands(tokens: int, width: int, vocabulary: int) -> list[Tensor]:
        # Logits of about 1, as a model's: of large ones most probabilities would be 0.
        hidden, weight = random(device, tokens, width), random(device, vocabulary, width)
        targets = torch.randint(vocabulary, (tokens,), device=device)
        return [hidden, weight * width**-0.5, targets]

    def compute(inputs: Sequence[Tensor], impl: str) -> Sequence[Tensor]:
        hidden, weight, targets, logp_grad, entropy_grad = inputs
        found = selective_logprob(hidden, weight, targets, impl=impl)
        values = [found.logps, found.entropies, found.lse]
        for grad in (None, entropy_grad):  # a loss without and with an entropy
            made = selective_logprob_backward(
                logp_grad, grad, hidden, weight, targets, found, impl=impl
            )
            values += [made.hidden, made.weight]
        return values

    tokens = number * length
    hidden, weight, targets = operands(tokens, width, vocabulary)
    grad, results = torch.ones(tokens, device=device), selective_logprob(hidden, weight, targets)
    # Two runs of the vocabulary, the second a part of one.
    small = [*operands(20, 48, VOCABULARY_RUN + 100), *torch.randn(2, 20, device=device)]
    size = f"{tokens:,} tokens of width {width:,}, vocabulary {vocabulary:,}"
    product = 2 * tokens * width * vocabulary
    yield Case(
        "selective_logprob",
        f"log-probs, {size}",
        product,
        hidden.nbytes + weight.nbytes + targets.nbytes + 12 * tokens,
        lambda impl: selective_logprob(hidden, weight, targets, impl=impl),
        compute,
        small,
    )
    # Three products: logits are computed again. Gradients of hidden states are in fp32.
    yield Case(
        "selective_logprob",
        f"its backward, {size}",
        3 * product,
        hidden.nbytes + 4 * hidden.numel() + 2 * weight.nbytes,
        lambda impl: selective_logprob_backward(
            grad, None, hidden, weight, targets, results, impl=impl
        ),
        compute,
        small,
    )
