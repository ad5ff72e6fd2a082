"""One rank's memory as a table, and whether it fits a GPU."""

from argparse import Namespace
from dataclasses import dataclass, replace

from examples.dry_run.launch import Run
from examples.dry_run.terms import GIB, Term, total

DEVICE_GIB = 139.7
"""What torch finds on a GPU sold with 141 GB."""
RESERVED_PART = 20
"""One part in this many is for CUDA, NCCL and the allocator's rounding, which are not counted."""


@dataclass(frozen=True)
class Plan:
    """One rank's memory for one of the two gradients.

    Attributes:
        fixed: weights, adapters, optimizer.
        state: of the prompt.
        kept: by all layers for a backward.
        work: beside it, one at a time.
        others: other passes, in place of a backward.
        staged: of pages in host memory, what is on the device.
    """

    fixed: list[Term]
    state: list[Term]
    kept: list[Term]
    work: list[Term]
    others: list[Term]
    staged: Term

    def device_bytes(self, page_device: str) -> int:
        """The most that is held at a time."""
        backward = total(self.kept) + max(term.num_bytes for term in self.work)
        largest = max(backward, *(term.num_bytes for term in self.others))
        held = total(self.state) if page_device == "model" else self.staged.num_bytes
        return total(self.fixed) + held + largest


def rows_and_tokens(run: Run) -> tuple[int, int]:
    """Of the largest graph: a chunk of the prompt; if the prompt is held constant, that of the
    responses that are replayed together, which have half of a chunk's tokens."""
    engine, args = run.engine, run.args
    if engine.needs_prompt_backward:
        return 1, engine.chunk_size
    tokens = min(args.max_completion_length or 1, engine.chunk_size)
    rows = engine.replay_batch or max(1, engine.chunk_size // 2 // tokens)
    return min(rows, args.num_generations or 1), tokens


def show(plan: Plan, gradient: str, num_ranks: int) -> None:
    """Print every term of a plan; of those under `+`, the largest counts."""
    title = f"{gradient}, one of {num_ranks} ranks"
    print(f"{title:<34} {'GiB':>8}   from")
    for term in [*plan.fixed, *plan.state, *plan.kept]:
        print(term)
    largest = max(plan.work, key=lambda term: term.num_bytes)
    for term in plan.work:
        print(replace(term, name=f"  {'+' if term is largest else ' '} {term.name}"))
    for term in plan.others:
        print(replace(term, name=f"    or {term.name}"))
    host = total(plan.state) * num_ranks / GIB
    notes = {"model": "", "host": f", and {host:,.1f} GiB of host memory for {num_ranks} ranks"}
    for page_device, note in notes.items():
        num_bytes = plan.device_bytes(page_device)
        print(Term(f"total, pages on {page_device}", num_bytes, f"{num_bytes / 1e9:.1f} GB{note}"))
    print()


def ways_out(plan: Plan, run: Run) -> list[str]:
    """What to change for less memory."""
    engine, ways = run.engine, []
    if engine.page_device == "model":
        gib = (total(plan.state) - plan.staged.num_bytes) / GIB
        ways.append(f"--longstraw_page_device host (-{gib:.1f} GiB)")
    if engine.needs_prompt_backward and engine.cotangent_dtype == "float32":
        ways.append("--longstraw_cotangent_dtype bfloat16 (half of their cotangents)")
    half = engine.chunk_size // 2
    ways.append(f"--longstraw_chunk_size {half} (half of what a chunk takes)")
    return ways


def room_bytes(device_gib: float) -> int:
    """What of a GPU is there for what is counted."""
    return int(device_gib * GIB * (1 - 1 / RESERVED_PART))


def judge(plan: Plan, run: Run, device_gib: float) -> bool:
    """Say whether the run fits, and if not what would."""
    engine = run.engine
    needed, room = plan.device_bytes(engine.page_device) / GIB, room_bytes(device_gib) / GIB
    fits = needed <= room
    print(
        f"{'fits' if fits else 'does not fit'}: {engine.prompt_gradient}, pages on "
        f"{engine.page_device}, {needed:.1f} GiB of {room:.1f} ({device_gib} less one part in "
        f"{RESERVED_PART} for what is not counted)"
    )
    if not fits:
        print("  change one of: " + "; ".join(ways_out(plan, run)))
    return fits


def report(plans: dict[str, Plan], run: Run, own: Namespace, paper: str) -> int:
    """Print both tables, what the paper says, and the judgement; the command's exit status.

    Args:
        own: the dry run's own options, see `parser`.
    """
    engine = run.engine
    print(
        f"{own.prompt_tokens:,} prompt tokens, {run.world_size} ranks, {engine.sp_size} of which "
        f"share it, chunks of {engine.chunk_size:,}\n"
    )
    for gradient, plan in plans.items():
        show(plan, gradient, run.world_size)
    print(paper)
    return 0 if judge(plans[engine.prompt_gradient], run, own.device_gib) else 1
