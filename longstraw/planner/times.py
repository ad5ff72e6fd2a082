"""About how long each phase takes, from rates that the user states: an estimate, not a promise.

    products      8 FLOPs per parameter and token where a layer is run, run again and taken
                  backwards (frozen weights have no gradient: 6), 2 where it is only run
    attention     4 H D FLOPs per pair of a query and a key that it sees, 2.5 times that backwards
    decoding      weights and the prompt's state are read for each token of a response

Knows shapes and rates; knows nothing of memory.
"""

from dataclasses import dataclass

from .model_shape import ATTENTION, LATENT, ModelShape
from .options import PlanOptions
from .parameters import count_parameters
from .sizes import GIB
from .terms import token_bytes

TERA = 1e12
BACKWARD_OF_ATTENTION = 2.5
"""FLOPs of attention's backward for each of its forward, which has two products of five."""


@dataclass(frozen=True)
class Rates:
    """What one device really does, not what it is sold with.

    Attributes:
        tflops: of products in bf16.
        bandwidth: of its memory, TB/s.
        network: between ranks that share a prompt, GB/s.
    """

    tflops: float = 350.0
    bandwidth: float = 2.5
    network: float = 150.0


@dataclass(frozen=True)
class PhaseTime:
    """A line of the estimate.

    Attributes:
        name: of the phase.
        seconds: of one update, on each rank.
        arithmetic: how they come about.
    """

    name: str
    seconds: float
    arithmetic: str

    def __str__(self) -> str:
        return f"{self.name:<34} {self.seconds:>9,.1f}   {self.arithmetic}"


def phase_times(shape: ModelShape, options: PlanOptions, rates: Rates) -> list[PhaseTime]:
    """Of one update of one group, in order."""
    prompt, responses = options.prompt_tokens, options.group_size * options.response_tokens
    backward = 4 if options.lora_rank else 6
    own, read = prompt * (prompt + 1) // 2, prompt
    times = []
    if options.decodes:
        times.append(_decoding_time(shape, options, rates))
    times += [
        _time(shape, options, rates, "capture", prompt, 2, own, 1.0),
        _time(shape, options, rates, "score", responses, 2, responses * read, 1.0),
        _time(shape, options, rates, "replay", responses, 2 + backward, responses * read, 3.5),
    ]
    if options.is_exact:
        flops = 2 + backward
        times.append(_time(shape, options, rates, "prompt backward", prompt, flops, own, 3.5))
    return times


def active_numel(shape: ModelShape) -> int:
    """Parameters that a token is multiplied with in the layers: of experts those it is sent to."""
    count = count_parameters(shape)
    experts = 0
    if count.experts:
        experts = count.experts * shape["num_experts_per_tok"] // shape.num_experts
    return count.projections + count.routers + experts


def pair_flops(shape: ModelShape) -> tuple[int, int]:
    """FLOPs of all layers for a query and a key: where all are seen, and where a window ends.

    Of selected tokens the number is that of the index scores; attention itself is to few.
    """
    dims = 2 * shape.head_dim
    if shape.count(LATENT):
        dims = shape.num_latent_dims + shape["kv_lora_rank"]
    whole = windowed = 0
    for layer in shape.layers:
        each = 2 * shape.num_heads * dims
        if layer.kind == LATENT and "index_head_dim" in shape.config:
            index = 2 * shape["index_n_heads"] * shape["index_head_dim"]
            whole += index if layer.has_indexer else 0
        elif layer.window is not None:
            windowed += each
        elif layer.kind in (ATTENTION, LATENT):
            whole += each
    return whole, windowed


def _time(
    shape: ModelShape,
    options: PlanOptions,
    rates: Rates,
    name: str,
    num_tokens: int,
    flops: int,
    num_pairs: int,
    passes: float,
) -> PhaseTime:
    """Of `num_tokens` through all layers, which see `num_pairs` keys."""
    sp_size = options.engine.sp_size
    numel = active_numel(shape)
    whole, windowed = pair_flops(shape)
    windows = [layer.window for layer in shape.layers if layer.window is not None]
    in_window = min(num_pairs, num_tokens * max(windows, default=0))
    selected = 0
    if "index_topk" in shape.config:
        dims = shape.num_latent_dims + shape["kv_lora_rank"]
        each = 2 * shape.num_heads * dims * shape.count(LATENT)
        selected = each * min(num_pairs, num_tokens * shape["index_topk"])
    attention = passes * (whole * num_pairs + windowed * in_window + selected)
    products = flops * numel * num_tokens
    seconds = (products + attention) / sp_size / rates.tflops / TERA
    arithmetic = (
        f"({flops} x {numel:,} x {num_tokens:,} + {attention / TERA:,.0f} T of attention) FLOPs"
        + (f" / {sp_size}" if sp_size > 1 else "")
    )
    if sp_size > 1:
        sent = _sent_bytes(shape, options, num_tokens, passes > 1)
        seconds += sent / rates.network / 1e9
        arithmetic += f", {sent / GIB:,.1f} GiB from other ranks"
    return PhaseTime(name, seconds, arithmetic)


def _sent_bytes(
    shape: ModelShape, options: PlanOptions, num_tokens: int, has_backward: bool
) -> float:
    """That a rank receives in attention layers; see `distributed.travel`."""
    sp_size, layers = options.engine.sp_size, shape.count(ATTENTION) + shape.count(LATENT)
    keys, values = shape.head_dim, shape.head_dim
    if shape.count(LATENT):
        keys, values = shape.num_latent_dims, shape["kv_lora_rank"]
    size = options.itemsize
    each = keys * size + (values + 1) * 4
    if has_backward:
        each += (keys + 2 * values) * size + (keys + 1) * 4
    return layers * (sp_size - 1) * shape.num_heads * num_tokens / sp_size * each


def _decoding_time(shape: ModelShape, options: PlanOptions, rates: Rates) -> PhaseTime:
    size, sp_size = options.itemsize, options.engine.sp_size
    weights = active_numel(shape) * (0.5 if options.is_nf4 else size)
    weights += shape["vocab_size"] * shape.hidden_size * size
    state = options.prompt_tokens * token_bytes(shape, size) / sp_size
    seconds = options.response_tokens * (weights + state) / rates.bandwidth / TERA
    arithmetic = (
        f"{options.response_tokens:,} steps that read {weights / GIB:,.1f} GiB of weights and "
        f"{state / GIB:,.1f} GiB of state, once for all responses"
    )
    return PhaseTime("decoding", seconds, arithmetic)
