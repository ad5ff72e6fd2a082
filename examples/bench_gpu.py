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

from bench_gpu_cases import FULL, TINY, Case, Compute, Scale, list_cases
from longstraw import Engine, EngineConfig, PromptGroup
from longstraw_kernels.availability import is_triton_installed

REPEATS, WARM_UPS = 10, 3
EXIT_CODES = "exit codes: 0 all is well, 1 an error is too large, 2 there is nothing to run on"


@dataclass(frozen=True)
class Timing:
    """Seconds of one case; `floor` is the least that the measured rates allow.

    `error` is in units of what is allowed.
    """

    operation: str
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
    for case in tqdm(list_cases(device, scale), unit="case", disable=None):
        floor = max(case.flops / flop_rate, case.num_bytes / byte_rate)
        timings.append(time_case(case, floor, device))
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


def time_case(case: Case, floor: float, device: torch.device) -> Timing:
    """Both implementations, and the error of one."""
    times = {
        impl: seconds_of(lambda impl=impl: case.run(impl), device)
        for impl in (("triton", "reference") if case.has_reference else ("triton",))
    }
    error = error_of(case.compute, case.inputs)
    return Timing(case.operation, case.name, floor, times["triton"], times.get("reference"), error)


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
