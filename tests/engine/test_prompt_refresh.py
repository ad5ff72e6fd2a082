"""State of a prompt that is read in several optimizer steps: what is trained, and what it costs.

The definitions are in `refreshed.py`. fp64 with the fp32 casts lifted, so that a difference is a
mistake and not rounding.
"""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from longstraw import (
    ConfigError,
    Engine,
    EngineConfig,
    MemoryPlanError,
    PromptGroup,
    TorchBackend,
    generate,
)
from longstraw.captured import CapturedSegments
from longstraw.distributed import Pass
from longstraw.refresh import PromptRefresh
from tests.engine.compare import RandomLoss, gradients, random_groups, worst_error
from tests.engine.refreshed import (
    NUM_STEPS,
    SHAPES,
    ScoresOfSteps,
    adapted,
    adapters_off_before,
    by_definition,
    by_engine,
    checkpointed,
    config,
    gradient_by_definition,
    movement_error,
    optimizer_of,
    scores_of_every_step,
    scores_of_never,
    trained,
    write,
)
from tests.marks import slow_but
from tests.models import Float64Islands, tiny_model

TOLERANCE = 1e-9
CACHED_FAMILIES = ("llama", "qwen3", "gemma3")
"""With and without norms of queries and keys, and with sliding windows shorter than the prompt."""
FAMILIES = (*CACHED_FAMILIES, "qwen3_5", "qwen3_next")
"""With recurrent layers as well. Transformers' own cache writes their state in place, and what runs
on it cannot be differentiated."""


# ---------------------------------------------------------------- never


@pytest.mark.parametrize(
    ("family", "prompt_gradient"),
    slow_but(
        [("gemma3", "exact"), ("qwen3_5", "stopped")],
        product(FAMILIES, ["exact", "stopped"]),
    ),
)
def test_never_is_the_base_model_at_prompt_positions(family: str, prompt_gradient: str) -> None:
    """Per parameter of the adapter, in both modes, which agree: nothing trained is in the prompt.
    Two prompts, one of them within a chunk."""
    groups = random_groups([*SHAPES, (12, (5, 17))])
    expected = gradient_by_definition(adapted(family), groups, scores_of_never)
    engine = Engine(model := adapted(family), config("never", prompt_gradient=prompt_gradient))
    with Float64Islands():
        engine.accumulate(groups, RandomLoss(groups))
        engine.finalize()
    error, name = worst_error(gradients(model), expected)
    assert error <= TOLERANCE, name
    assert "prompt_backward" not in {row["phase"] for row in engine.ledger.table()}


def test_the_gradient_gap_of_never_is_nothing() -> None:
    """No weight that is trained takes part in the prompt, so stopping there leaves nothing out."""
    groups = random_groups(SHAPES)
    engine = Engine(adapted("llama"), config("never", log_gradient_gap=True))
    engine.accumulate(groups, RandomLoss(groups))
    assert engine.finalize().gap == {"relative": 0.0, "cosine": pytest.approx(1.0)}


def test_never_serves_a_trained_copy_of_the_head() -> None:
    """`modules_to_save` is switched off with the adapters, and scores responses with them."""
    groups = random_groups(SHAPES)
    expected = gradient_by_definition(
        adapted("llama", modules_to_save=["lm_head"]), groups, scores_of_never
    )
    engine = Engine(model := adapted("llama", modules_to_save=["lm_head"]), config("never"))
    with Float64Islands():
        engine.accumulate(groups, RandomLoss(groups))
    ours = gradients(model)
    assert any("modules_to_save" in name for name in ours)
    error, name = worst_error(ours, expected)
    assert error <= TOLERANCE, name


@pytest.mark.parametrize(
    "case",
    slow_but(
        ["reference"],
        ["sgd", "adamw", "two calls per step", "checkpointing", "reference"],
    ),
)
def test_eight_steps_of_never_are_eight_definitional_steps_on_one_capture(case: str) -> None:
    """The reference policy, adapters off, reads the same state: not even it captures again."""
    family = "qwen3" if case == "adamw" else "llama"
    groups, name = random_groups(SHAPES), "adamw" if case == "adamw" else "sgd"
    beta = case == "reference"
    reference = by_definition(adapted(family), groups, scores_of_never, name, beta=beta)
    model = checkpointed(adapted(family)) if case == "checkpointing" else adapted(family)
    calls = 2 if case.startswith("two") else 1
    ours, engine = by_engine(model, groups, config("never"), name, beta=beta, calls=calls)
    assert movement_error(ours, reference, family) <= TOLERANCE
    assert engine.ledger.num_captures == 1


def test_shared_runs_of_the_reference_are_not_taken_for_the_policys() -> None:
    """Members that begin alike have a run of their own on the prompt's state, which both policies
    read: it belongs to the weights that ran it. 12 tokens in common, and 8 make a run."""
    (group,) = random_groups([(37, (20, 3, 5))])
    first = group.completion_ids[0]
    members = [first, *(torch.cat([first[:12], ids]) for ids in group.completion_ids[1:])]
    groups = [PromptGroup(group.prompt_ids, members)]
    two_steps = {"beta": True, "steps": 2}
    reference = by_definition(adapted("llama"), groups, scores_of_never, "sgd", **two_steps)
    settings = config("never", min_shared_tokens=8)
    ours, _ = by_engine(adapted("llama"), groups, settings, "sgd", **two_steps)
    assert movement_error(ours, reference, "llama") <= TOLERANCE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedSegments, "run_members_with", lambda self, version: None)
        wrong, _ = by_engine(adapted("llama"), groups, settings, "sgd", **two_steps)
    assert movement_error(wrong, reference, "llama") > 1e-3


def test_the_definition_tells_adapters_that_stay_on_in_the_prompt() -> None:
    """What would be the every-step policy, under another name."""
    groups = random_groups(SHAPES)
    reference = by_definition(adapted("llama"), groups, scores_of_never, "sgd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptRefresh, "capturing", lambda self: nullcontext())
        wrong, _ = by_engine(adapted("llama"), groups, config("never"), "sgd")
    assert movement_error(wrong, reference, "llama") > 1e-2


def test_a_rollout_decodes_from_the_state_that_is_trained_on() -> None:
    """Greedy tokens are those of the definition, and nothing is captured for them again."""
    (group,) = random_groups(SHAPES)
    engine = Engine(model := adapted("llama"), config("never"))
    with Float64Islands(), torch.no_grad():
        output = generate(engine, group.prompt_ids, 2, max_new_tokens=6, do_sample=False)
        engine.weights_changed()
        engine.score(group)
        sequence = group.prompt_ids[None]
        with adapters_off_before(model, group.prompt_len - 1):
            for _ in range(output.shape[1] - group.prompt_len):
                token = model(sequence, use_cache=False).logits[:, -1:].argmax(-1)
                sequence = torch.cat([sequence, token], dim=1)
    assert torch.equal(output, sequence.expand(2, -1))
    assert engine.ledger.num_captures == 1


def test_what_is_trained_is_trained_again_after_a_capture_that_failed() -> None:
    """Adapters are on again, and flags as they were: PEFT sets them for a whole adapter."""
    model = adapted("llama")
    frozen = next(n for n, p in model.named_parameters() if "lora_A" in n)
    model.get_parameter(frozen).requires_grad_(False)
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    (group,) = random_groups(SHAPES)
    small = Engine(model, config("never", state_budget_bytes=1000))
    with pytest.raises(MemoryPlanError):
        small.capture(group.prompt_ids)
    Engine(model, config("never")).capture(group.prompt_ids)
    with pytest.raises(RuntimeError, match="in the middle"), small.refresh.capturing():
        raise RuntimeError("in the middle")
    assert {n: p.requires_grad for n, p in model.named_parameters()} == before
    assert small.decoder.policy_version(0, 0).adapters == ("default",)


# ---------------------------------------------------------------- N steps


@pytest.mark.parametrize("family", slow_but(["llama"], CACHED_FAMILIES))
def test_four_steps_read_what_the_first_of_them_captured(family: str) -> None:
    """Eight steps, two captures, and the parameters of a model that is frozen every four."""
    groups = random_groups(SHAPES)
    reference = by_definition(adapted(family), groups, ScoresOfSteps(4), "sgd")
    ours, engine = by_engine(adapted(family), groups, config(4), "sgd")
    assert movement_error(ours, reference, family) <= TOLERANCE
    assert engine.ledger.num_captures == 2
    with pytest.MonkeyPatch.context() as patch:
        is_valid = PromptRefresh.is_valid
        patch.setattr(
            PromptRefresh,
            "is_valid",
            lambda self, version, now: is_valid(self, version, now) and version.step == now.step,
        )
        wrong, refreshed = by_engine(adapted(family), groups, config(4), "sgd")
    assert refreshed.ledger.num_captures == NUM_STEPS
    assert movement_error(wrong, reference, family) > 1e-6


def test_full_fine_tuning_may_refresh_every_few_steps() -> None:
    """Without adapters the same definition holds; two calls in each step share the state."""
    groups = random_groups(SHAPES)
    begin = trained(tiny_model("llama").double())
    reference = by_definition(tiny_model("llama").double(), groups, ScoresOfSteps(2), "sgd")
    ours, engine = by_engine(tiny_model("llama").double(), groups, config(2), "sgd", calls=2)
    moved = {name: reference[name] - begin[name] for name in begin}
    error, name = worst_error({name: ours[name] - begin[name] for name in begin}, moved)
    assert error <= TOLERANCE, name
    assert engine.ledger.num_captures == NUM_STEPS // 2


def test_ages_count_per_state_and_what_prompts_share_has_their_age() -> None:
    """Three prompts with 30 tokens in common, the third from the second step on. Its state is of
    that step as a whole: it does not continue the run that the first step captured for the two."""
    engine = Engine(model := adapted("llama"), config(3, min_shared_tokens=8))
    prompts = [group.prompt_ids for group in random_groups([(37, (2,)), (38, (2,)), (39, (2,))])]
    prompts = [torch.cat([prompts[0][:30], prompt[30:]]) for prompt in prompts]
    ages, num_captures = [], []
    for step in range(4):
        wanted = prompts[: 2 if step == 0 else 3]
        engine.capture_shared(wanted)
        states = [engine.capture(prompt) for prompt in wanted]
        for state in states:
            assert {s.policy_version for s in state.lineage()} == {state.policy_version}
        ages.append([engine.captured.age(state) for state in states])
        num_captures.append(engine.ledger.num_captures)
        write(model)
        engine.weights_changed()
    assert ages == [[0, 0], [1, 1, 0], [2, 2, 1], [0, 0, 2]]
    assert num_captures == [3, 4, 4, 7]


def test_weights_written_in_secret_make_state_of_n_steps_stale() -> None:
    """A step that nobody announced is not counted, so it must not pass for none."""
    model = adapted("llama")
    engine = Engine(model, config(4))
    (group,) = random_groups(SHAPES)
    engine.capture(group.prompt_ids)
    write(model)
    engine.weights_changed()
    engine.capture(group.prompt_ids)
    assert engine.ledger.num_captures == 1
    write(model)
    engine.capture(group.prompt_ids)
    assert engine.ledger.num_captures == 2


def test_the_next_step_does_not_make_it_valid_again() -> None:
    """A budget keeps the stale state; it must not be taken for one of an announced step."""
    model = adapted("llama")
    engine = Engine(model, config(4, state_budget_bytes=2**30))
    (group,) = random_groups(SHAPES)
    engine.capture(group.prompt_ids)
    engine.weights_changed()
    write(model)
    newer = engine.capture(group.prompt_ids)
    engine.weights_changed()
    assert engine.capture(group.prompt_ids) is newer
    assert engine.ledger.num_captures == 2
    fresh = Engine(model, config(1)).score(group)
    assert torch.equal(engine.score(group).logps, fresh.logps)


def test_every_step_is_as_before() -> None:
    """One capture per step, stale after it, and the full-sequence step's parameters."""
    groups = random_groups(SHAPES)
    reference = by_definition(adapted("llama"), groups, scores_of_every_step, "sgd")
    settings = config("every_step", prompt_gradient="stopped")
    ours, engine = by_engine(adapted("llama"), groups, settings, "sgd")
    assert movement_error(ours, reference, "llama") <= TOLERANCE
    assert engine.ledger.num_captures == NUM_STEPS
    assert engine.store.num_pages == 0


# ---------------------------------------------------------------- what stays held


def test_prompts_that_a_step_did_not_use_are_freed_after_it() -> None:
    """Without a budget memory holds the prompts of the last step, and not of all before."""
    engine = Engine(adapted("llama"), config("never"))
    first, second = random_groups([(37, (2,)), (21, (2,))])
    one = engine.decoder.state_bytes(36, with_cotangents=False)
    engine.score(first)
    engine.weights_changed()
    assert engine.store.bytes_in_use == one
    engine.score(second)
    engine.weights_changed()
    assert engine.store.bytes_in_use == engine.decoder.state_bytes(20, with_cotangents=False)


def test_within_a_budget_prompts_stay_and_the_least_recently_used_goes_first() -> None:
    """Room for two of three prompts of equal length."""
    groups = random_groups([(37, (2,))] * 3)
    one = Engine(tiny_model("llama").double()).decoder.state_bytes(36, with_cotangents=False)
    engine = Engine(adapted("llama"), config("never", state_budget_bytes=one * 5 // 2))
    for step, order in enumerate([[0, 1], [0], [], [2], [0]]):
        for index in order:
            engine.score(groups[index])
        engine.weights_changed()
        assert engine.store.bytes_in_use == 2 * one, step
    assert engine.ledger.num_captures == 3  # 1 made room for 2; 0 was used after it
    engine.score(groups[1])
    assert engine.ledger.num_captures == 4


def test_an_evaluation_frees_its_own_prompts_only() -> None:
    """What is captured since the last step; what the next step will read stays."""
    engine = Engine(adapted("llama"), config("never"))
    train, held_out = random_groups([(37, (2,)), (21, (2,))])
    engine.score(train)
    engine.weights_changed()
    engine.score(held_out)
    engine.release(only_new=True)
    engine.score(train)
    assert engine.ledger.num_captures == 2
    engine.release()
    assert engine.store.num_pages == 0


# ---------------------------------------------------------------- drift


def test_drift_is_nothing_at_age_zero_and_grows() -> None:
    """Adapters move a little each step; the numbers are those of both definitions' scores."""
    groups = random_groups(SHAPES)
    engine = Engine(model := adapted("llama"), config(4, log_prompt_drift=True))
    optimizer, by_steps, loss = optimizer_of(model, "sgd"), ScoresOfSteps(4), RandomLoss(groups)
    reports = []
    with Float64Islands():
        for _ in range(5):
            with torch.no_grad():
                used = by_steps(model, groups[0])
                fresh = scores_of_every_step(model, groups[0])
            held = engine.store.bytes_in_use
            report = engine.accumulate(groups, loss)
            assert engine.store.bytes_in_use in (held, held + engine.decoder.state_bytes(36, False))
            expected = (used.logps - fresh.logps).abs()
            num_scored = sum(ids.numel() for ids in groups[0].completion_ids)
            assert report.drift.logps_max == pytest.approx(expected.max().item(), abs=1e-10)
            mean = expected.sum().item() / num_scored
            assert report.drift.logps_mean == pytest.approx(mean, abs=1e-10)
            difference = (loss([used]) - loss([fresh])).item()
            assert report.drift.loss == pytest.approx(difference, abs=1e-9)
            reports.append(report)
            engine.finalize()
            optimizer.step()
            optimizer.zero_grad()
            engine.weights_changed()
    assert [report.prompt_age for report in reports] == [0, 1, 2, 3, 0]
    maxima = [report.drift.logps_max for report in reports]
    assert maxima[0] == maxima[4] == 0 < maxima[1] < maxima[2] < maxima[3]
    assert engine.ledger.num_captures == 2  # the fresh ones are no part of the update
    rows = {row["phase"]: row for row in engine.ledger.table()}
    assert rows["prompt_drift"]["tokens"] == 5 * (36 + 37 - 36 + 9 + 1 + 4 + 3 - 1)


def test_drift_of_never_is_the_distance_to_adapters_in_the_prompt() -> None:
    """The scores of an engine that runs prompts with adapters, in the same units. Only tokens that
    the loss looks at count."""
    (group,) = random_groups(SHAPES)
    masks = [torch.ones_like(ids) for ids in group.completion_ids]
    masks[0][2:7] = 0
    group = replace(group, loss_masks=masks)
    engine = Engine(model := adapted("llama"), config("never", log_prompt_drift=True))
    with Float64Islands():
        with_adapters = Engine(model, config(1)).score(group)
        used = engine.score(group)
        report = engine.accumulate([group], lambda scores: scores[0].logps.sum())
    differences = (used.logps - with_adapters.logps).abs()
    assert differences[0, 2:7].eq(0).all()
    assert report.drift.logps_max == pytest.approx(differences.max().item(), abs=1e-10)
    assert report.drift.logps_max > 1e-2
    mean = differences.sum().item() / sum(int(mask.sum()) for mask in masks)
    assert report.drift.logps_mean == pytest.approx(mean, abs=1e-10)


def test_measuring_drift_changes_no_gradient() -> None:
    groups = random_groups([(37, (20, 3)), (12, (5,))])
    found = []
    for is_measured in (False, True):
        engine = Engine(model := adapted("llama"), config("never", log_prompt_drift=is_measured))
        with Float64Islands():
            engine.accumulate(groups, RandomLoss(groups))
            engine.finalize()
        found.append(gradients(model))
    assert all(torch.equal(found[1][name], grad) for name, grad in found[0].items())


def test_a_fresh_state_that_does_not_fit_is_refused_before_a_backward() -> None:
    """Room for one state: enough without the measurement, and an error that says so with it."""
    groups = random_groups(SHAPES)
    model = adapted("llama")
    budget = Engine(model).decoder.state_bytes(36, with_cotangents=False) * 3 // 2
    Engine(model, config("never", state_budget_bytes=budget)).accumulate(groups, RandomLoss(groups))
    gradients(model)
    engine = Engine(model, config("never", state_budget_bytes=budget, log_prompt_drift=True))
    with pytest.raises(MemoryPlanError, match="budget"):
        engine.accumulate(groups, RandomLoss(groups))
    assert engine.store.bytes_in_use == 0
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------- what cannot hold


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_refresh": "nevr"}, "Did you mean 'never'"),
        ({"prompt_refresh": 0}, "whole number of optimizer steps"),
        ({"prompt_refresh": "0"}, "whole number of optimizer steps"),
        ({"prompt_refresh": True}, "prompt_refresh=True"),
        ({"prompt_refresh": 2.0}, "prompt_refresh=2.0"),
        ({"prompt_refresh": 4}, "backward through weights that are gone.*'stopped'"),
        (
            {"prompt_refresh": 4, "prompt_gradient": "stopped", "log_gradient_gap": True},
            "log_gradient_gap=True.*log_prompt_drift",
        ),
    ],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("given", "steps"),
    [(1, 1), ("every_step", 1), ("1", 1), ("never", None), (4, 4), ("4", 4)],
)
def test_a_policy_is_a_word_or_a_number_of_steps(given: int | str, steps: int | None) -> None:
    settings = EngineConfig("stopped", prompt_refresh=given)
    assert settings.refresh_steps == steps
    assert EngineConfig.from_dict(settings.to_dict()) == settings


def test_never_refuses_what_is_trained_without_adapters_by_name() -> None:
    """Its state would change with training and be read all the same."""
    with pytest.raises(ConfigError, match="LlamaForCausalLM has none.*peft_config"):
        Engine(tiny_model("llama"), config("never"))
    model = tiny_model("qwen2")
    biased = get_peft_model(model, LoraConfig(target_modules=["q_proj"], bias="all"))
    with pytest.raises(ConfigError, match=r"q_proj\.base_layer\.bias.*more.*bias='none'"):
        Engine(biased, config("never"))
    assert any(p.requires_grad for n, p in biased.named_parameters() if "lora_" in n)


def test_never_refuses_passes_that_gather_an_adapters_weights() -> None:
    """ZeRO-3: a rank that runs a prompt would leave the adapter out, and the others wait in it."""

    class Gathering(TorchBackend):
        turns = frozenset(Pass)
        gathers_weights = True

    class Exchanging(TorchBackend):
        turns = frozenset(Pass)

    with pytest.raises(ConfigError, match="ZeRO-3 brings an adapter's weights.*Use ZeRO-2"):
        Engine(adapted("llama"), config("never"), backend=Gathering())
    Engine(adapted("llama"), config(4), backend=Gathering())
    with pytest.raises(ConfigError, match="not served with expert_parallel"):
        Engine(adapted("llama"), config("never"), backend=Exchanging())
