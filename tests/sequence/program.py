"""What each rank of `test_gradient` runs: `python -m tests.sequence.program LAUNCH FOLDER`.

Runs every case of the launch and writes its gradients, and what the engine said of itself, to
`FOLDER/RANK.pt`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longstraw import Engine, EngineConfig, GroupScores, PromptGroup
from tests.engine.compare import RandomLoss, gradients
from tests.models import Float64Islands
from tests.sequence.cases import BASE, LAUNCHES, Case, shape_of


def main(launch: str, folder: Path) -> None:
    """Every case of `launch`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _, sp_size = shape_of(launch)
    records = {name: run(case, sp_size) for name, case in LAUNCHES[launch].items()}
    torch.save(records, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


def run(case: Case, sp_size: int) -> dict[str, Any]:
    """One update, as this rank makes it."""
    model = case.model()
    engine = Engine(model, EngineConfig(**{**BASE, **case.config}, sp_size=sp_size))
    groups = case.groups(engine.axes.dp_rank)
    selected = selected_total(engine, groups[0].prompt_ids)
    with Float64Islands():
        for part, loss_of in parts(groups, case.num_calls):
            engine.accumulate(part, loss_of)
        report = engine.finalize()
    assert engine.store.bytes_in_use == 0 and engine.store.num_pages == 0
    return {"gradients": gradients(model), "gap": report.gap, "selected": selected}


def selected_total(engine: Engine, prompt_ids: torch.Tensor) -> int:
    """The sum of the fingerprints of what this rank has of all selections in a prompt's capture."""
    with Float64Islands():
        state = engine.capture(prompt_ids)
    noted = [state.choices(c) for c in state.segment.chunks(engine.config.chunk_size)]
    return sum(choices.total("indexer") for choices in noted if choices is not None)


def parts(groups: list[PromptGroup], num_calls: int) -> list[tuple[list[PromptGroup], Any]]:
    """The groups by call: all at once, or member after member with one loss for all.

    The coupled loss needs all scores at once, so with several calls its gradient is that of its
    uncoupled terms; see `uncoupled`.
    """
    if num_calls == 1:
        return [(groups, RandomLoss(groups))]
    calls = []
    for call in range(num_calls):
        members = [range(call, len(g.completion_ids), num_calls) for g in groups]
        part = [
            PromptGroup(
                g.prompt_ids,
                [g.completion_ids[i] for i in chosen],
                is_complete=call == num_calls - 1,
            )
            for g, chosen in zip(groups, members, strict=True)
        ]
        calls.append((part, Uncoupled(groups, members)))
    return calls


class Uncoupled:
    """The terms of `RandomLoss` that belong to some members alone."""

    def __init__(self, groups: list[PromptGroup], members: list[range] | None = None) -> None:
        chosen = members or [range(len(g.completion_ids)) for g in groups]
        weights = RandomLoss(groups).weights
        self.weights = [w[list(rows)] for w, rows in zip(weights, chosen, strict=True)]

    def __call__(self, scores: list[GroupScores]) -> torch.Tensor:
        total = scores[0].logps.new_zeros(())
        for group, weight in zip(scores, self.weights, strict=True):
            weight = weight[:, : group.logps.shape[1]].to(group.logps)
            total = total + (group.logps * weight).sum()
            total = total + 0.3 * (group.entropies * weight.abs()).sum()
        return total


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
