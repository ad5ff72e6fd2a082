"""The comparison of the two gradients: its statistics, and that it compares what it says."""

import json
from dataclasses import replace

import pytest

from comparison import (
    Comparison,
    HeldOut,
    Run,
    Spread,
    check_pairs,
    fifths,
    make_table,
    smooth,
    summarize_pairs,
)
from exact_vs_stopped import Arguments, compare, make_plans, parse_control
from tasks import TinyRetrieval
from tiny_retrieval import Recipe

UNTRAINED = Recipe(context=64, least_context=32, tight_steps=1, grow_steps=1, noisy_steps=1)
"""A policy that knows nothing: enough to see that the script runs."""


def make_run(gradient: str, seed: int, rewards: list[float], **changes: object) -> Run:
    """A run with these rewards, which also gives the held-out ones; `changes` are fields."""
    run = Run(
        prompt_gradient=gradient,
        lr_scale=1.0,
        prompt_tokens=64,
        seed=seed,
        rewards=rewards,
        grad_norms=[1.0 if gradient == "exact" else 0.5] * len(rewards),
        before=HeldOut(0.2, 0.5),
        after=HeldOut(rewards[-1], rewards[-1]),
        prompts_digest=f"prompts {seed}",
        first_replies_digest=f"replies {seed}",
        seconds=1.0,
    )
    return replace(run, **changes)


# --- statistics --------------------------------------------------------------------------------


def test_fifths_are_means_of_consecutive_parts():
    """Known numbers; 7 steps are cut at 1.4, 2.8, 4.2 and 5.6, to the nearest step."""
    assert fifths([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]) == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert fifths([0, 1, 2, 3, 4, 5, 6]) == [0, 1.5, 3, 4.5, 6]
    assert fifths([3, 5]) == [3, 5]


def test_a_smoothed_curve_looks_back_only():
    """So the first point is the first step's reward, and no gain is drawn before it is made."""
    assert smooth([0, 1, 2, 6], num_steps=3) == [0, 0.5, 1, 3]


def test_a_spread_has_the_deviation_of_a_sample():
    """2, 4, 9: mean 5, squares 9 + 1 + 16 over n - 1 = 2."""
    spread = Spread.of([2, 4, 9])
    assert (spread.mean, spread.low, spread.high) == (5, 2, 9)
    assert spread.std == pytest.approx(13**0.5)
    assert Spread.of([2]).std == 0


def test_differences_are_taken_within_a_seed():
    """Two seeds of very different level and equal gain: the difference has no spread.

    The spread of each gradient's own runs would hide it.
    """
    exact = [make_run("exact", 0, [0.5, 0.75]), make_run("exact", 1, [0.0, 0.25])]
    stopped = [make_run("stopped", 0, [0.5, 0.5]), make_run("stopped", 1, [0.0, 0.0])]
    row = summarize_pairs(exact, stopped)
    assert row.fifths == [Spread(0, 0, 0, 0), Spread(0.25, 0, 0.25, 0.25)]
    assert row.sampled == Spread(0.25, 0, 0.25, 0.25)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts_digest": "others"},
        {"first_replies_digest": "others"},
        {"before": HeldOut(0.3, 0.5)},
        {"seed": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_runs_that_differ_in_more_than_the_gradient_are_no_pair(changes):
    """What would make the comparison unfair raises, and is not averaged away."""
    other = replace(make_run("stopped", 0, [1.0]), **changes)
    with pytest.raises(RuntimeError, match="pairs|has to be the same"):
        check_pairs([make_run("exact", 0, [1.0])], [other])


def test_the_table_tells_who_is_ahead_and_how_the_norms_compare():
    """A control at another learning rate has a line of its own and is in no pair."""
    runs = [make_run("exact", seed, [0.5, 1.0]) for seed in (0, 1)]
    runs += [make_run("stopped", seed, [0.5, 0.5 + seed]) for seed in (0, 1)]
    runs += [make_run("stopped", 0, [0.5, 0.6], lr_scale=2.0)]
    runs += [make_run("stopped", 1, [0.5, 0.7], steps_scale=2.0)]
    table = make_table(Comparison(runs))
    assert "ahead in 1 of 2 seeds" in table
    assert "stopped / exact: 0.50 +- 0.00" in table
    assert "| exact - stopped | 0.00 +- 0.00 | 0.00 +- 0.71 | 0.00 +- 0.71 |" in table
    assert "| stopped, learning rate x 2 (1 seeds) | 0.50 +- 0.00 | 0.60 +- 0.00 |" in table
    assert "| stopped, steps x 2 (1 seeds) | 0.50 +- 0.00 | 0.70 +- 0.00 |" in table


# --- the script --------------------------------------------------------------------------------


def long_words(completions: list[str], **kwargs: object) -> list[float]:
    """A reward that replies of an untrained policy differ in; without one there is no gradient."""
    return [float(len(reply)) for reply in completions]


@pytest.fixture
def task(tmp_path, one_thread) -> TinyRetrieval:
    """The tiny task at 64 words, measured on few prompts."""
    task = TinyRetrieval(UNTRAINED, tmp_path / "checkpoint")
    task.reward = long_words
    return task


def test_the_script_runs_from_checkpoint_to_plot(task, tmp_path, capsys):
    """Two steps of two runs; then everything is there, and a second call trains nothing.

    What was trained also differs: from the same weights and replies, only the gradient can have
    made the norms of step 1 unequal.
    """
    options = Arguments(output_dir=str(tmp_path), prompt_tokens=[64], steps=[2])
    options = replace(options, seeds=1, held_out=4)
    [comparison] = compare(options, task)

    exact, stopped = comparison.pairs()  # raises if prompts or first replies differ
    assert exact[0].grad_norms[0] != stopped[0].grad_norms[0]
    assert len(exact[0].rewards) == len(stopped[0].rewards) == 2
    results = json.loads((tmp_path / "exact_vs_stopped.json").read_text())
    assert [len(result["runs"]) for result in results["results"]] == [2]
    assert (tmp_path / "exact_vs_stopped.md").read_text() == make_table(comparison) + "\n"
    assert (tmp_path / "exact_vs_stopped.png").read_bytes().startswith(b"\x89PNG")

    capsys.readouterr()
    assert compare(options, task) == [comparison]
    assert capsys.readouterr().out.count("found") == 2
    changed = replace(options, learning_rate=1e-4)
    assert compare(changed, task) != [comparison]
    assert capsys.readouterr().out.count("made again") == 2


def test_pairs_come_first_and_the_two_runs_of_a_seed_next_to_each_other(task):
    """So an interrupted comparison holds whole pairs, and controls come when all pairs are done."""
    options = Arguments(prompt_tokens=[64, 32], steps=[3, 2], seeds=2, control_seeds=1)
    plans = make_plans(replace(options, controls=["stopped:2:2"]), task)
    sizes = [(plan.prompt_tokens, plan.steps) for plan in plans]
    assert sizes == [(64, 3)] * 4 + [(32, 2)] * 4 + [(64, 6), (32, 4)]
    assert [plan.prompt_gradient for plan in plans[:2]] == ["exact", "stopped"]
    assert [plan.seed for plan in plans[:4]] == [0, 0, 1, 1]
    assert plans[-1].file_name == "32-seed0-stopped-rate2-steps2.json"
    with pytest.raises(ValueError, match="3 numbers for 2 prompt lengths"):
        make_plans(replace(options, steps=[1, 2, 3]), task)


@pytest.mark.parametrize(
    "text", ["stopped", "stopped:2", "stopped:1:1", "halved:2:1", "exact:x:1", "exact:1:0"]
)
def test_a_control_is_a_gradient_and_another_learning_rate_or_length(text):
    """At scales of 1 it would be one of the runs that are compared."""
    with pytest.raises(ValueError, match="give exact or stopped"):
        parse_control(text)
