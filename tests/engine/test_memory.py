"""Peak memory, counted in bytes of tensors: flat in the group, the formula in the prompt."""

import pytest
import torch

from longstraw import Engine, EngineConfig
from longstraw.audit import PeakTensorBytes, full_sequence_step
from tests.engine.compare import RandomLoss, random_groups
from tests.marks import slow_but
from tests.models import tiny_model

CHUNK = 64


def peak_of_update(
    prompt_len: int,
    num_members: int,
    prompt_gradient: str,
    *,
    replay_batch: int | None = None,
    response_len: int = 24,
) -> int:
    """Peak of one update with gradients already allocated, as in every step but the first."""
    model = _model()
    config = EngineConfig(
        chunk_size=CHUNK,
        page_size=32,
        prompt_gradient=prompt_gradient,
        replay_batch=replay_batch,
    )
    engine = Engine(model, config)
    (group,) = random_groups([(prompt_len + 1, (response_len,) * num_members)])
    loss_of = RandomLoss([group])
    with PeakTensorBytes() as counter:
        engine.accumulate([group], loss_of)
    return counter.peak_bytes


def _model() -> torch.nn.Module:
    model = tiny_model("llama", hidden_size=96, intermediate_size=256)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


@pytest.mark.parametrize("prompt_gradient", slow_but(["exact"], ["exact", "stopped"]))
def test_peak_does_not_grow_with_the_group(prompt_gradient: str) -> None:
    """From 2 to 8 members: at most 0.5 % (their log-probs; no graph, no state of theirs)."""
    two, eight = (peak_of_update(512, g, prompt_gradient) for g in (2, 8))
    assert eight <= 1.005 * two


def test_members_run_together_take_no_more_than_a_chunk_of_the_prompt() -> None:
    """Eight responses of 4 tokens, one at a time or together, half of a chunk of 64: the prompt's
    own backward has the larger graph."""
    alone, together = (
        peak_of_update(512, 8, "exact", replay_batch=rows, response_len=4) for rows in (1, None)
    )
    assert together <= 1.005 * alone


@pytest.mark.parametrize("prompt_gradient", ["exact", "stopped"])
def test_a_prompt_token_costs_its_state_and_nothing_else(prompt_gradient: str) -> None:
    """Doubling the prompt at a fixed chunk adds L*2*K*D*4 bytes per token, twice that with
    cotangents, within 1 %: no activation, mask or score of the prompt is kept."""
    short, long = (peak_of_update(p, 2, prompt_gradient) for p in (512, 1024))
    per_token = (long - short) / 512
    formula = Engine(_model()).decoder.state_bytes(1, with_cotangents=prompt_gradient == "exact")
    assert formula == 4 * 2 * 2 * 16 * 4 * (2 if prompt_gradient == "exact" else 1)
    assert per_token == pytest.approx(formula, rel=0.01)


def test_the_full_sequence_step_needs_many_times_as_much() -> None:
    """What the engine saves, on the same update: the definition keeps the whole prompt's graph."""
    model = _model()
    (group,) = random_groups([(513, (24, 24))])
    with PeakTensorBytes() as counter:
        full_sequence_step(model, [group], RandomLoss([group]))
    assert counter.peak_bytes > 5 * peak_of_update(512, 2, "exact")


def test_logits_exist_a_few_rows_at_a_time() -> None:
    """A response of 64 tokens, rows of 8: no tensor of 64 rows by the vocabulary is ever made."""
    (group,) = random_groups([(33, (64,))])
    peaks = {}
    for rows in (8, 64):
        model = tiny_model("llama", vocab_size=20_000)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        engine = Engine(model, EngineConfig(logprob_chunk_size=rows))
        with PeakTensorBytes() as counter:
            engine.accumulate([group], RandomLoss([group]))
        peaks[rows] = counter.peak_bytes
    one_logits_tensor = 64 * 20_000 * 4
    assert peaks[64] > one_logits_tensor
    assert peaks[8] < peaks[64] - one_logits_tensor
