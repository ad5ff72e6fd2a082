"""What is there in each phase of an update, on the rank that has most: a list of terms per phase.

Knows which terms there are at the same time; knows nothing of how large they are or of what fits.
"""

from dataclasses import dataclass, replace
from math import ceil

from .graph import (
    BYTES_PER_LOGIT,
    BYTES_PER_SCORED_LOGIT,
    kept_terms,
    recurrent_bytes,
    unkept_bytes,
    work_term,
)
from .model_shape import ModelShape
from .options import PlanOptions
from .terms import (
    FP32,
    Term,
    fixed_terms,
    page_bytes,
    runs_whole_model,
    state_terms,
    token_bytes,
    total,
)


@dataclass(frozen=True)
class Phase:
    """One moment of an update.

    Attributes:
        name: of the phase.
        held: weights, gradients, optimizer: alike in all phases.
        state: of prompts and responses, which may be in host memory.
        passing: what exists on the device in this phase alone.
    """

    name: str
    held: list[Term]
    state: list[Term]
    passing: list[Term]

    def device_bytes(self, page_device: str) -> int:
        """Most bytes on the device."""
        state = total(self.state) if page_device == "model" else 0
        return total(self.held) + state + total(self.passing)

    @property
    def terms(self) -> list[Term]:
        return [*self.held, *self.state, *self.passing]


def phases(shape: ModelShape, options: PlanOptions) -> list[Phase]:
    """All phases in order."""
    found = [_capture(shape, options), _score(shape, options), *_replay(shape, options)]
    if options.is_exact:
        found += _prompt_backward(shape, options)
    if options.decodes:
        found.insert(0, _decoding(shape, options))
    return found


def _staging(shape: ModelShape, options: PlanOptions) -> list[Term]:
    """Of pages in host memory, those that are on the device: one that is read, one on its way."""
    if options.engine.page_device == "model":
        return []
    page = page_bytes(shape, options)
    return [Term("pages on their way", 2 * page, f"2 pages x {page:,} B, with cotangents")]


def _decoding(shape: ModelShape, options: PlanOptions) -> Phase:
    """Responses that are generated on the captured state: their own, in buffers that double."""
    tokens = options.prompt_tokens
    room = 1 << (options.response_tokens - 1).bit_length()
    rows = options.group_size
    num_bytes = rows * (room * token_bytes(shape, options.itemsize))
    num_bytes += recurrent_bytes(shape, options, rows)
    own = Term("responses' own state", num_bytes, f"{rows} x {room:,} tokens on every rank")
    state = state_terms(shape, options, tokens, with_cotangents=False)
    held = fixed_terms(shape, options, with_gradients=False)
    return Phase("decoding", held, state, [own, *_staging(shape, options)])


def _capture(shape: ModelShape, options: PlanOptions) -> Phase:
    """The last whole chunk of the prompt, without a graph; its state is not yet in pages."""
    size = min(options.engine.chunk_size, options.prompt_tokens)
    before = options.prompt_tokens - size
    held = unkept_bytes(shape, options, 1, size)
    own = Term("the chunk's own state", held, f"of {size:,} tokens, before it is in pages")
    passing = [own, work_term(shape, options, "capture", 1, size, before)]
    state = state_terms(shape, options, before, with_cotangents=False)
    fixed = fixed_terms(shape, options, with_gradients=False)
    return Phase("capture", fixed, state, [*passing, *_staging(shape, options)])


def _score(shape: ModelShape, options: PlanOptions) -> Phase:
    """Responses that are run together, without a graph: a layer, or a slice of logits."""
    engine, rows = options.engine, options.rows_at_a_time
    size = min(engine.chunk_size, options.response_tokens)
    earlier = options.response_tokens - size
    work = work_term(shape, options, "capture", rows, size, options.prompt_tokens + earlier)
    state = state_terms(shape, options, options.prompt_tokens, with_cotangents=False)
    passing = [
        max(work, _scored_logits_term(shape, options, rows * size), key=lambda t: t.num_bytes)
    ]
    if earlier:
        own = earlier * rows * token_bytes(shape, options.itemsize)
        passing.append(Term("response state", own, f"{rows} x {earlier:,} tokens"))
    fixed = fixed_terms(shape, options, with_gradients=False)
    return Phase("score", fixed, state, [*passing, *_staging(shape, options)])


def _scored_logits_term(shape: ModelShape, options: PlanOptions, num_tokens: int) -> Term:
    rows, vocabulary = min(options.engine.logprob_chunk_size, num_tokens), shape["vocab_size"]
    if options.has_kernels:
        return Term("logits", 0, "made and used in a kernel")
    num_bytes = rows * vocabulary * BYTES_PER_SCORED_LOGIT
    arithmetic = f"{rows} x {vocabulary:,} x {BYTES_PER_SCORED_LOGIT} B"
    return Term("logits", num_bytes, arithmetic)


def _replay(shape: ModelShape, options: PlanOptions) -> list[Phase]:
    """Responses that are replayed together: the end of them, with the logits or a layer."""
    engine, rows = options.engine, options.rows_at_a_time
    size = min(engine.chunk_size, options.response_tokens)
    earlier = options.response_tokens - size
    history = options.prompt_tokens + earlier
    kept = kept_terms(shape, options, rows, size, is_read=False)
    work = work_term(shape, options, "replay", rows, size, history)
    logits = logits_term(shape, options, rows * size)
    state = state_terms(shape, options, options.prompt_tokens)
    if earlier:
        own = state_terms(shape, options, earlier, name="response state", rows=rows)
        state = [*state, *own]
    staging = _staging(shape, options)
    passing = [*kept, max(work, logits, key=lambda term: term.num_bytes), *staging]
    fixed = fixed_terms(shape, options)
    if rows < options.group_size or options.is_exact:
        return [Phase("replay", fixed, state, passing)]
    # One backward makes all gradients, from the top on, while it uses up what layers keep.
    bottom = [replace(term, num_bytes=term.num_bytes // len(shape.layers)) for term in kept]
    return [
        Phase("replay", fixed_terms(shape, options, with_gradients=False), state, passing),
        Phase("replay, first layer", fixed, state, [*bottom, work, *staging]),
    ]


def _prompt_backward(shape: ModelShape, options: PlanOptions) -> list[Phase]:
    """The last chunk, and the one before if the last is a short one."""
    size, tokens = options.engine.chunk_size, options.prompt_tokens
    last = (tokens - 1) % size + 1
    found = []
    ends = {"prompt backward": (last, tokens - last)}
    if last < size:
        ends["prompt backward, a whole chunk"] = size, tokens - last - size
    for name, (width, before) in ends.items():
        if before < 0:
            continue
        state = state_terms(shape, options, tokens)
        used = total(state_terms(shape, options, before)) - total(state)
        what = f"of the last {tokens - before:,} tokens, freed when their backward begins"
        state.append(Term("less pages", used, what))
        kept = kept_terms(shape, options, 1, width, is_read=True)
        # The end of the model is in the graph of responses, and costs as much here.
        which = "replay" if runs_whole_model(shape, options) else "prompt"
        work = work_term(shape, options, which, 1, width, before)
        fixed = fixed_terms(shape, options)
        passing = [*kept, work, *_staging(shape, options)]
        found.append(Phase(name, fixed, state, passing))
    return found


def logits_term(shape: ModelShape, options: PlanOptions, num_tokens: int) -> Term:
    """One slice of logits with its gradients, and what has come together for the head."""
    vocabulary, size = shape["vocab_size"], options.itemsize
    rows = min(options.engine.logprob_chunk_size, num_tokens)
    num_bytes, words = 0, []
    if not options.has_kernels:
        num_bytes = rows * vocabulary * BYTES_PER_LOGIT
        words.append(f"{rows} x {vocabulary:,} x {BYTES_PER_LOGIT} B")
    if not options.lora_rank:
        # One slice's part is that of the weights; the sum over more than one is in fp32.
        num_slices = ceil(num_tokens / rows)
        each = (0, size, FP32)[min(num_slices - 1, 2)]
        each = FP32 + size if options.has_kernels else each
        num_bytes += each * vocabulary * shape.hidden_size
        words.append(f"{vocabulary:,} x {shape.hidden_size:,} x {each} B of the head's gradient")
    return Term("logits", num_bytes, ", and ".join(words) or "made and used in a kernel")
