"""The audit of one prompt length: the steps, in the order of the levels."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..config import EngineConfig
from ..engine import Engine
from ..state.free_memory import available_bytes
from .case import AuditCase, sample_case
from .closeness import Closeness, compare
from .levels import Judge, Level
from .policy import DTYPES, PolicySource
from .ranks import steps_of_ranks
from .steps import Step, both_gradients, definition_step, full_sequence_bytes

Announce = Callable[[str], None]


@dataclass(frozen=True)
class AuditOptions:
    """What is audited and how.

    Attributes:
        policy: the model.
        engine: how prompts are captured and replayed; `prompt_gradient` does not count.
        truth: dtype of the full-sequence step that everything is measured against.
        group_size, response_tokens: replies, and the most tokens of one.
        ranks: processes of level 3; 1 leaves it out.
        definition_tokens: longest prompt for which the full-sequence step is run; None: as free
            memory has room.
        seed: of the replies and their advantages.
    """

    policy: PolicySource
    engine: EngineConfig
    truth: str = "float64"
    group_size: int = 4
    response_tokens: int = 16
    ranks: int = 1
    definition_tokens: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class LengthAudit:
    """What was found at one prompt length.

    Attributes:
        response_tokens: of each reply.
        sha256: of the tokens and the advantages.
        levels: the four, in order.
        gap: the stopped gradient seen from the exact one, by family and over "all".
        seconds: of wall time.
    """

    prompt_tokens: int
    response_tokens: list[int]
    sha256: str
    levels: list[Level]
    gap: dict[str, Closeness]
    seconds: float


def audit_length(
    model: Any, prompt_ids: Tensor, options: AuditOptions, announce: Announce = lambda what: None
) -> LengthAudit:
    """All levels on one prompt.

    Args:
        model: what `options.policy` loads.
        announce: told what is done next.
    """
    begin = time.perf_counter()
    announce("sampling replies")
    engine = Engine(model, replace(options.engine, prompt_gradient="exact"))
    case = sample_case(
        engine,
        prompt_ids.to(options.policy.device),
        group_size=options.group_size,
        response_tokens=options.response_tokens,
        seed=options.seed,
    )
    del engine
    announce("the engine's gradients")
    exact, stopped = both_gradients(model, case, options.engine)
    gap = compare(stopped.gradients, exact.gradients)
    reason = _no_room(model, case, options)
    if reason is None:
        levels = _levels(model, case, options, exact, stopped, announce)
    else:
        levels = [Level(number, not_run=reason) for number in (1, 2, 3, 4)]
    lengths = [ids.numel() for ids in case.group.completion_ids]
    seconds = time.perf_counter() - begin
    return LengthAudit(prompt_ids.numel(), lengths, case.sha256, levels, gap, seconds)


def _levels(
    model: Any,
    case: AuditCase,
    options: AuditOptions,
    exact: Step,
    stopped: Step,
    announce: Announce,
) -> list[Level]:
    judge = _judge(model, case, "stopped", options, announce)
    execution = Level(
        1,
        judge.logps(stopped)
        + [replace(f, what="log-probs, exact mode") for f in judge.logps(exact)],
    )
    response = Level(2, judge.gradients(stopped))
    judge = _judge(model, case, "exact", options, announce)
    full = Level(4, judge.gradients(exact) + judge.optimizer_step(exact))
    return [execution, response, _distributed(case, options, judge, announce), full]


def _judge(
    model: Any, case: AuditCase, mode: str, options: AuditOptions, announce: Announce
) -> Judge:
    dtype = options.policy.dtype
    announce(f"full-sequence step, prompt {mode}, {dtype}")
    step = definition_step(model, case, mode, options.engine)
    if options.truth == dtype:
        return Judge(dtype, step, None)
    announce(f"full-sequence step, prompt {mode}, {options.truth}")
    precise = copy.deepcopy(model).to(DTYPES[options.truth])
    return Judge(dtype, definition_step(precise, case, mode, options.engine), step)


def _distributed(case: AuditCase, options: AuditOptions, judge: Judge, announce: Announce) -> Level:
    if options.ranks == 1:
        return Level(3, not_run="it takes several processes: add --ranks 2")
    findings = []
    for label, step, is_same in steps_of_ranks(
        case, options.policy, options.engine, options.ranks, announce
    ):
        findings += judge.gradients(step, f"{label}: ") + judge.optimizer_step(step, f"{label}: ")
        findings.append(is_same)
    return Level(3, findings)


def _no_room(model: Any, case: AuditCase, options: AuditOptions) -> str | None:
    """Why the full-sequence step is not run, or None."""
    num_tokens = case.group.prompt_len
    if options.definition_tokens is not None:
        if num_tokens <= options.definition_tokens:
            return None
        return (
            f"the full-sequence step was asked for up to {options.definition_tokens:,} prompt "
            "tokens (--definition-tokens)"
        )
    longest = max(ids.numel() for ids in case.group.completion_ids)
    itemsize = DTYPES[options.truth].itemsize
    needed = full_sequence_bytes(model, num_tokens + longest, itemsize)
    free = available_bytes(next(model.parameters()).device)
    if free is None or needed <= free:
        return None
    return (
        f"the full-sequence graph takes about {needed / 2**30:.0f} GiB in {options.truth}, and "
        f"{free / 2**30:.0f} GiB are free"
    )
