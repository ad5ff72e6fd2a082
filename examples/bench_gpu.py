"""Check and time the kernels on one GPU, each against its floor, then a whole update.

    make bench-gpu                       # under 8 minutes on one H100 or H200
    python examples/bench_gpu.py --tiny  # the same program on tiny shapes, on any machine

Rates are measured first, on this GPU: a large matrix product gives FLOP/s, a large copy bytes/s.
An operation's floor is the time that its products take at the one or its tensors at the other,
whichever is longer. `error` is against fp64 on a small shape, in units of what is allowed: twice
the error of the plain torch definition in the same dtype, and one rounding of the largest value.
Above 1 is a failure.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if "--tiny" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from longstraw import Engine, EngineConfig, PromptGroup
from longstraw_kernels.availability import is_triton_installed
from longstraw_kernels.index_topk import index_scores
from longstraw_kernels.page_attention import (
    PageParams,
    page_attention,
    page_attention_backward,
)
from longstraw_kernels.selected_attention import (
    selected_attention,
    selected_attention_backward,
)

REPEATS, WARM_UPS = 10, 3
EXIT_CODES = "exit codes: 0 all is well, 1 an error is too large, 2 there is nothing to run on"


Compute = Callable[[Sequence[Tensor], str], Sequence[Tensor]]
"""From inputs and an `impl`, what is compared."""


@dataclass(frozen=True)
class Operation:
    """One operation at one size.

    Attributes:
        name: with its size.
        flops, num_bytes: of the least work that computes it.
        run: computes it with an `impl`; timed.
        compute, inputs: the same at a small size, for the check.
        has_reference: whether the plain definition is timed too; over a long history it takes long.
    """

    name: str
    flops: float
    num_bytes: float
    run: Callable[[str], object]
    compute: Compute
    inputs: Sequence[Tensor]
    has_reference: bool = True


@dataclass(frozen=True)
class Timing:
    """Seconds of one operation; `floor` is the least that the measured rates allow.

    `error` is in units of what is allowed.
    """

    name: str
    floor: float
    triton: float
    reference: float | None
    error: float


@dataclass(frozen=True)
class Step:
    """One update of a random model, `impl` being its attention."""

    impl: str
    prompt_tokens: int
    seconds: float
    peak_bytes: int


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
)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the tables, and write them as JSON."""
    options = parse(arguments)
    if not is_triton_installed():
        print("Triton is not installed: pip install 'longstraw[triton]'", file=sys.stderr)
        return 2
    if not options.tiny and not torch.cuda.is_available():
        print("No GPU is here. On tiny shapes it runs anywhere: --tiny", file=sys.stderr)
        return 2
    scale = TINY if options.tiny else FULL
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flop_rate, byte_rate = measure_rates(device, scale)
    print(f"{describe(device)}: {flop_rate / 1e12:.3g} TFLOP/s bf16, {byte_rate / 1e9:.3g} GB/s")
    timings = []
    for operation in tqdm(list_operations(device, scale), unit="operation", disable=None):
        floor = max(operation.flops / flop_rate, operation.num_bytes / byte_rate)
        timings.append(time_operation(operation, floor, device))
    print(operation_table(timings))
    steps = list(measure_steps(device, scale))
    print(step_table(steps))
    report = {
        "device": describe(device),
        "flop_rate": flop_rate,
        "byte_rate": byte_rate,
        "operations": [asdict(t) for t in timings],
        "steps": [asdict(s) for s in steps],
    }
    options.output_dir.mkdir(parents=True, exist_ok=True)
    path = options.output_dir / "bench_gpu.json"
    path.write_text(json.dumps(report, indent=2))
    print(f"written: {path}")
    return int(any(not timing.error <= 1 for timing in timings))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=f"{first}\n{rest}",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; without a GPU, in Python")
    parser.add_argument("--output_dir", type=Path, default=Path("out"))
    return parser.parse_args(arguments)


# -------------------------------------------------------------------- clocks


def describe(device: torch.device) -> str:
    """The device in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Median of some runs, by the device's own clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    for _ in range(WARM_UPS):
        work()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure_rates(device: torch.device, scale: Scale) -> tuple[float, float]:
    """FLOP/s of a bf16 product, and bytes/s of a copy, read and written."""
    n = scale.rate_size
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    flops = 2 * n**3 / seconds_of(lambda: a @ b, device)
    source = torch.empty(64 * n * n // 8, device=device)
    target = torch.empty_like(source)
    return flops, 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)


# -------------------------------------------------------------------- operations


def time_operation(operation: Operation, floor: float, device: torch.device) -> Timing:
    """Both implementations, and the error of one."""
    times = {
        impl: seconds_of(lambda impl=impl: operation.run(impl), device)
        for impl in (("triton", "reference") if operation.has_reference else ("triton",))
    }
    error = error_of(operation.compute, operation.inputs)
    return Timing(operation.name, floor, times["triton"], times.get("reference"), error)


def error_of(compute: Compute, inputs: Sequence[Tensor]) -> float:
    """Error of Triton's results in units of what is allowed, that of the worst one."""
    truth = compute([x.double() if x.is_floating_point() else x for x in inputs], "reference")
    plain, found = compute(inputs, "reference"), compute(inputs, "triton")
    rounding = torch.finfo(inputs[0].dtype).eps
    worst = 0.0
    for exact, theirs, ours in zip(truth, plain, found, strict=True):
        allowed = (theirs.double() - exact).abs().max() + rounding * exact.abs().max()
        error = float((ours.double() - exact).abs().max() / (2 * allowed))
        worst = error if error != error or error > worst else worst  # NaN is the worst
    return worst


def random(device: torch.device, *shape: int) -> Tensor:
    """Normal numbers in bf16."""
    return torch.randn(*shape, device=device).bfloat16()


def list_operations(device: torch.device, scale: Scale) -> Iterator[Operation]:
    """At the sizes of real layers."""
    for heads, kv_heads, dim in scale.heads:
        for queries in (scale.queries, 1):
            yield from attention(device, scale, heads, kv_heads, dim, queries)
    yield scores_of_index(device, scale)
    yield from attention_to_selected(device, scale)


def attention(
    device: torch.device, scale: Scale, heads: int, kv_heads: int, dim: int, queries: int
) -> Iterator[Operation]:
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
    yield Operation(
        f"attention, {size}", 4 * pairs, page_bytes + 6 * q.numel(), forward, compute, inputs
    )
    if queries > 1:
        # Five products. Keys and values are read; their gradients, in fp32, read and written.
        num_bytes = 5 * page_bytes + 10 * q.numel()
        yield Operation(f"its backward, {size}", 10 * pairs, num_bytes, backward, compute, inputs)


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


def scores_of_index(device: torch.device, scale: Scale) -> Operation:
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
    return Operation(
        f"index scores, {heads} heads of {dim}, {queries:,} queries, {keys:,} keys",
        2 * queries * keys * heads * dim,
        num_bytes,
        lambda impl: index_scores(q, k, weights, dim**-0.5, impl=impl),
        compute,
        inputs(20, 40),
    )


def attention_to_selected(device: torch.device, scale: Scale) -> Iterator[Operation]:
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
    yield Operation(
        f"selected attention, {size}",
        2 * pairs * (dim + value_dim),
        num_bytes,
        lambda impl: selected_attention(q, rows, index, dim**-0.5, value_dim, impl=impl),
        compute,
        small,
    )
    yield Operation(
        f"its backward, {size}",
        pairs * (6 * dim + 4 * value_dim),
        2 * num_bytes + 4 * queries * selected * dim,
        lambda impl: selected_attention_backward(
            out, q, rows, index, out, lse, dim**-0.5, impl=impl
        ),
        compute,
        small,
    )


# -------------------------------------------------------------------- a whole update


def measure_steps(device: torch.device, scale: Scale) -> Iterator[Step]:
    """Gradients of one prompt and its responses, exact through the prompt."""
    config = LlamaConfig(
        hidden_size=scale.hidden,
        intermediate_size=3 * scale.hidden,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.hidden // min(128, scale.hidden // 4),
        num_key_value_heads=scale.hidden // min(128, scale.hidden // 4) // 4,
        vocab_size=scale.vocab,
        max_position_embeddings=2 * max(scale.step_prompts),
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    for tokens in scale.step_prompts:
        # Plain attention takes minutes over the longer prompts.
        for impl in ("triton", "reference") if tokens == scale.step_prompts[0] else ("triton",):
            yield measure_step(model, impl, tokens, scale)


def measure_step(model: LlamaForCausalLM, impl: str, tokens: int, scale: Scale) -> Step:
    """After one update on a short prompt, which compiles the kernels."""
    device = next(model.parameters()).device
    config = EngineConfig(
        chunk_size=scale.queries, page_size=scale.page_size, replay_batch=2, attention=impl
    )
    engine, seconds = Engine(model, config), 0.0
    for length in (min(tokens, 2 * scale.queries), tokens):
        number, size = scale.responses
        prompt, *responses = (
            torch.randint(scale.vocab, (n,), device=device) for n in (length, *[size] * number)
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        engine.accumulate(
            [PromptGroup(prompt, responses)],
            lambda scores: sum(score.logps.float().mean() for score in scores),
        )
        engine.finalize()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        model.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Step(impl, tokens, seconds, peak)


# -------------------------------------------------------------------- tables


def operation_table(timings: Sequence[Timing]) -> str:
    """A line per operation."""
    width = max(len(t.name) for t in timings)
    lines = [f"{'operation':<{width}}  floor ms  triton ms  of floor  plain ms  error"]
    for t in timings:
        plain = "" if t.reference is None else f"{1e3 * t.reference:.2f}"
        share = 100 * t.floor / t.triton
        lines.append(
            f"{t.name:<{width}}  {1e3 * t.floor:>8.3f}  {1e3 * t.triton:>9.3f}  {share:>6.1f} %  "
            f"{plain:>8}  {t.error:>5.2f}" + ("" if t.error <= 1 else "  too large")
        )
    return "\n".join(lines)


def step_table(steps: Sequence[Step]) -> str:
    """A line per update."""
    lines = ["update: attention  prompt tokens  seconds  peak GiB"]
    for s in steps:
        lines.append(
            f"        {s.impl:<9}  {s.prompt_tokens:>13,}  {s.seconds:>7.2f}  "
            f"{s.peak_bytes / 2**30:>8.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
