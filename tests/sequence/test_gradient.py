"""Ranks that share a prompt get the gradient of the plain full-sequence step.

(dp, sp) in (1, 2), (1, 3), (1, 4), (2, 1), (2, 2); fp64; per parameter. Keys and values are
reported apart: a lost cotangent of theirs leaves the loss as it is. Truth is the definition in one
process, the mean over the sequence groups' losses.

The table of all: `pytest tests/sequence --log-cli-level=INFO --log-cli-format='%(message)s'`.
"""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw.audit import full_sequence_step, selections
from longstraw.state import fingerprint
from tests.engine.compare import Gradients, RandomLoss, gradients, worst_error
from tests.models import Float64Islands, tiny_model
from tests.sequence.cases import BASE, LAUNCHES, SLOW, Case, shape_of
from tests.sequence.program import Uncoupled
from tests.trl.ranks import run_ranks

logger = logging.getLogger("tests.sequence")
TOLERANCE = 1e-9
SPARSE = ("deepseek_v32", "glm_moe_dsa")
ALL = [
    pytest.param(launch, name, marks=[pytest.mark.slow] if launch in SLOW else [])
    for launch, cases in LAUNCHES.items()
    for name in cases
]
Launched = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """The records of a launch, by rank; each is run once."""

    @functools.cache
    def launch(name: str) -> list[dict[str, Any]]:
        folder: Path = tmp_path_factory.mktemp(name.replace(", ", "_").replace(" ", ""))
        dp, sp = shape_of(name)
        arguments = ["-m", "tests.sequence.program", name, str(folder)]
        run_ranks(arguments, dp * sp, folder / "logs", timeout=600)
        return [torch.load(folder / f"{rank}.pt") for rank in range(dp * sp)]

    return launch


_TRUTHS: dict[tuple[str, int, bool], Gradients] = {}


def truth(case: Case, dp_size: int) -> Gradients:
    """The definition's gradient, the mean over `dp_size` sequence groups."""
    is_coupled = case.num_calls == 1
    key = (repr(case.truth()), dp_size, is_coupled)
    if key not in _TRUTHS:
        model = case.truth().model()
        total: Gradients = {}
        for dp_rank in range(dp_size):
            groups = case.groups(dp_rank)
            with Float64Islands():
                full_sequence_step(
                    model,
                    groups,
                    RandomLoss(groups) if is_coupled else Uncoupled(groups),
                    prompt_gradient=case.prompt_gradient,
                    temperature=BASE["temperature"],
                    with_router=case.with_router,
                )
            for name, gradient in gradients(model).items():
                total[name] = total.get(name, 0) + gradient / dp_size
        _TRUTHS[key] = total
    return _TRUTHS[key]


@pytest.mark.parametrize(("launch", "name"), ALL)
def test_the_gradient_is_that_of_the_full_sequence(
    launch: str, name: str, launched: Launched
) -> None:
    """Every parameter, keys and values among them, within 1e-9 of its largest element."""
    dp_size, _ = shape_of(launch)
    reference = truth(LAUNCHES[launch][name], dp_size)
    ours = launched(launch)[0][name]["gradients"]
    worst = {what: worst_error(_only(ours, what), _only(reference, what)) for what in _PARTS}
    logger.info(f"| {launch}, {name} | " + " | ".join(f"{e:.1e} {n}" for e, n in worst.values()))
    for error, parameter in worst.values():
        assert error <= TOLERANCE, parameter


_LATENTS = ("kv_a_proj_with_mqa", "kv_b_proj")
_PARTS = {
    "all": (),
    "keys": ("k_proj", "c_attn", *_LATENTS),
    "values": ("v_proj", "c_attn", *_LATENTS),
}


def _only(found: Gradients, what: str) -> Gradients:
    names = _PARTS[what]
    return {k: v for k, v in found.items() if not names or any(name in k for name in names)}


@pytest.mark.parametrize(("launch", "name"), ALL)
def test_every_rank_ends_with_the_same_bits(launch: str, name: str, launched: Launched) -> None:
    """They apply what one reduction gave; any other difference would grow from step to step."""
    first, *others = (record[name] for record in launched(launch))
    for other in others:
        for parameter, value in first["gradients"].items():
            assert torch.equal(value, other["gradients"][parameter]), parameter


@pytest.mark.parametrize(
    ("launch", "name"),
    [param for param in ALL if LAUNCHES[param.values[0]][param.values[1]].family in SPARSE],
)
def test_ranks_select_together_what_one_forward_does(
    launch: str, name: str, launched: Launched
) -> None:
    """To the token: the fingerprints of all (query, token) pairs of a prompt add up to those of the
    definition's selections."""
    case = LAUNCHES[launch][name]
    model = tiny_model(case.family).double()
    if case.lora:
        model = case.model().get_base_model()  # type: ignore[operator]
    ids = case.groups(0)[0].prompt_ids[:-1]
    expected = 0
    if ids.numel():
        with Float64Islands(), torch.no_grad():
            found = selections(model, ids)
        last = f".layers.{model.config.num_hidden_layers - 1}."  # ends a capture with its state
        expected = sum(
            int(fingerprint(x, torch.arange(len(x)))) for n, x in found.items() if last not in n
        )
    total = sum(record[name]["selected"] for record in launched(launch))
    assert total % 2**64 == expected % 2**64


def test_the_gap_is_that_of_whole_gradients(launched: Launched) -> None:
    """Each rank has a part of both gradients; norms and cosines of parts say nothing."""
    case = LAUNCHES["dp 1, sp 2"]["gap measured"]
    exact, stopped = truth(case.but(prompt_gradient="exact"), 1), truth(case, 1)
    flat = [torch.cat([g[n].flatten() for n in exact]) for g in (exact, stopped)]
    relative = float((flat[0] - flat[1]).norm() / flat[0].norm())
    cosine = float(torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0))
    for record in launched("dp 1, sp 2"):
        gap = record["gap measured"]["gap"]
        assert gap == pytest.approx({"relative": relative, "cosine": cosine}, rel=1e-9)
