"""Captured state: what it costs in bytes, who owns it, when it is stale."""

import pytest
import torch

from longstraw import (
    Engine,
    EngineConfig,
    MemoryPlanError,
    PromptGroup,
    PromptStateError,
    StalePromptStateError,
    generate,
)
from longstraw.state import PageStore
from tests.engine.compare import RandomLoss, engine_gradients, random_groups
from tests.models import VOCAB, tiny_model


def page_store(**changes) -> PageStore:
    return PageStore(torch.device("cpu"), **{"page_size": 4, **changes})


def test_pages_own_their_storage() -> None:
    """A view would keep the whole projection alive: 10 tokens of a buffer of 1000 hold 10."""
    buffer = torch.randn(1, 2, 1000, 8)
    store = page_store()
    pages = store.write(buffer[:, :, :10], buffer[:, :, :10], start=5, needs_cotangent=True)
    assert [(p.start, p.num_tokens) for p in pages] == [(5, 4), (9, 4), (13, 2)]
    assert store.bytes_in_use == 2 * 2 * 10 * 8 * 4
    assert all(p.key.untyped_storage().nbytes() == p.key.nbytes for p in pages)
    assert torch.equal(torch.cat([p.key for p in pages], 2), buffer[:, :, :10])


def test_cotangents_are_accounted_in_fp32_and_given_back() -> None:
    """bf16 pages have fp32 cotangents: 2 + 4 bytes per number while both are held."""
    store = page_store()
    key = torch.randn(1, 2, 4, 8).bfloat16()
    (page,) = store.write(key, key, start=0, needs_cotangent=True)
    tiny = torch.full_like(key, 1e-4, dtype=torch.float32)
    for _ in range(1000):
        store.add_cotangent(page, tiny, tiny)
    assert page.key_cotangent is not None and page.key_cotangent.dtype == torch.float32
    # bf16 would have stopped growing at 0.03 or so
    assert torch.allclose(page.key_cotangent, torch.tensor(0.1), rtol=1e-4)
    assert store.bytes_in_use == 2 * key.numel() * (2 + 4)
    store.release([page])
    assert store.bytes_in_use == 0
    assert store.peak_bytes == 2 * key.numel() * (2 + 4)


def test_state_bytes_are_the_formulas() -> None:
    """L * 2 * K * D * itemsize per captured token, plus fp32 cotangents after a replay."""
    model = tiny_model("llama")  # 4 layers, 2 key heads of 16, fp32
    engine = Engine(model, EngineConfig(chunk_size=16, page_size=8))
    (group,) = random_groups([(101, (5, 3))])
    engine.capture(group.prompt_ids)
    assert engine.store.bytes_in_use == 100 * 4 * 2 * 2 * 16 * 4
    assert engine.store.bytes_in_use == engine.decoder.state_bytes(100, with_cotangents=False)
    open_group = PromptGroup(group.prompt_ids, group.completion_ids, is_complete=False)
    engine.accumulate([open_group], RandomLoss([group]))
    assert engine.store.bytes_in_use == engine.decoder.state_bytes(100, with_cotangents=True)
    engine.finalize()
    assert engine.store.bytes_in_use == 0


@pytest.mark.parametrize("change", [{"page_size": 3}, {"page_size": 500}, {"page_device": "host"}])
def test_how_state_is_held_does_not_change_a_bit(change) -> None:
    """Bitwise equality where no sum is reordered: the place of a page. Its size reorders the
    online softmax, so there rounding of fp64 is allowed."""
    groups = random_groups([(53, (9, 4))])
    base = engine_gradients(tiny_model("qwen3").double(), groups, _config())
    ours = engine_gradients(tiny_model("qwen3").double(), groups, _config(**change))
    for name, grad in base.items():
        if "page_device" in change:
            assert torch.equal(ours[name], grad)
        else:
            assert torch.allclose(ours[name], grad, rtol=1e-9, atol=1e-9 * grad.abs().max())


def _config(**changes) -> EngineConfig:
    return EngineConfig(**{"chunk_size": 16, "page_size": 8, **changes})


def test_order_of_members_and_groups_does_not_matter() -> None:
    """Sums in another order: rounding of fp64 only."""

    def total(scores):
        return sum((s.logps**2).sum() for s in scores)

    model = tiny_model("llama").double()
    first, second = random_groups([(31, (7, 2, 9)), (12, (4, 4))])
    mirrored = [PromptGroup(g.prompt_ids, g.completion_ids[::-1]) for g in (second, first)]
    found = []
    for groups in ([first, second], mirrored):
        engine = Engine(model, _config())
        engine.accumulate(groups, total)
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
        model.zero_grad()
    for name, grad in found[0].items():
        assert torch.allclose(found[1][name], grad, rtol=1e-9, atol=1e-9 * grad.abs().max())


def test_a_prompt_is_captured_once_for_rollout_scoring_and_replay() -> None:
    """And again after the weights have changed, because its state is another then."""
    model = tiny_model("llama")
    engine = Engine(model, _config())
    (group,) = random_groups([(31, (7, 2))])
    generate(engine, group.prompt_ids, 2, max_new_tokens=3, do_sample=False)
    engine.score(group)
    engine.accumulate([group], RandomLoss([group]))
    assert engine.ledger.num_captures == 1
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    engine.weights_changed()
    engine.score(group)
    assert engine.ledger.num_captures == 2


def test_weights_written_in_secret_make_state_stale() -> None:
    """Nobody said that the weights changed; torch's write counter did."""
    model = tiny_model("llama")
    engine = Engine(model, _config())
    (group,) = random_groups([(31, (7, 2))])
    state = engine.capture(group.prompt_ids)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    with pytest.raises(StalePromptStateError, match="weights_changed"):
        engine._check_fresh(state)
    engine.accumulate([group], RandomLoss([group]))  # captures anew
    assert engine.ledger.num_captures == 2


def test_a_weight_change_in_the_middle_of_a_group_is_an_error() -> None:
    """Pending cotangents belong to the weights before; using them would be a wrong gradient."""
    model = tiny_model("llama")
    engine = Engine(model, _config())
    (group,) = random_groups([(31, (7, 2))])
    open_group = PromptGroup(group.prompt_ids, group.completion_ids, is_complete=False)
    engine.accumulate([open_group], RandomLoss([group]))
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    with pytest.raises(StalePromptStateError):
        engine.finalize()


def test_the_budget_drops_what_can_be_captured_again() -> None:
    """Three prompts, room for one and a half in exact mode: every update fits, and the gradient
    is what it is without a budget."""
    groups = random_groups([(41, (3,)), (41, (5,)), (41, (2,))])
    model = tiny_model("llama")
    one = Engine(model).decoder.state_bytes(40, with_cotangents=True)
    engine = Engine(model, _config(state_budget_bytes=one * 3 // 2))
    for group in groups:
        engine.capture(group.prompt_ids)
    for group in groups:
        engine.accumulate([group], RandomLoss([group]))
    assert engine.store.peak_bytes <= one * 3 // 2
    assert engine.ledger.num_captures > 3  # dropped and captured again, not failed


def test_state_that_cannot_fit_raises_before_anything_runs() -> None:
    """With the numbers and the ways out; no gradient is left behind."""
    model = tiny_model("llama")
    engine = Engine(model, _config(state_budget_bytes=1000))
    (group,) = random_groups([(41, (3,))])
    with pytest.raises(MemoryPlanError, match="page_device='host'"):
        engine.accumulate([group], RandomLoss([group]))
    assert engine.store.bytes_in_use == 0
    assert all(p.grad is None for p in model.parameters())


def test_members_without_gradient_are_not_replayed() -> None:
    """Zero weight on two of three members; if no member has a gradient the prompt has none."""
    model = tiny_model("llama")
    (group,) = random_groups([(31, (7, 2, 9))])
    engine = Engine(model, _config())
    report = engine.accumulate([group], lambda scores: scores[0].logps[1].sum())
    assert (report.num_replayed, report.num_skipped) == (1, 2)
    before = [row["tokens"] for row in engine.ledger.table() if row["phase"] == "prompt_backward"]
    engine.accumulate([group], lambda scores: scores[0].logps.sum() * 0)
    after = [row["tokens"] for row in engine.ledger.table() if row["phase"] == "prompt_backward"]
    assert before == after


def test_an_empty_response_has_no_score_and_no_gradient() -> None:
    """A truncated completion that TRL masks away arrives here as no tokens."""
    model = tiny_model("llama")
    (group,) = random_groups([(31, (7, 3))])
    with_empty = PromptGroup(group.prompt_ids, [*group.completion_ids, torch.empty(0).long()])
    scores = Engine(model, _config()).score(with_empty)
    assert scores.logps.shape == (3, 7)
    assert not scores.logps[2].any() and not scores.entropies[2].any()


def test_pads_equal_to_real_tokens_change_nothing() -> None:
    """Padding is by length, never by token id: responses made of the pad token itself."""
    model = tiny_model("llama").double()
    prompt = torch.randint(2, VOCAB, (21,), generator=torch.Generator().manual_seed(0))
    zeros = [torch.zeros(n, dtype=torch.long) for n in (2, 6)]
    scores = Engine(model, _config(replay_batch=2)).score(PromptGroup(prompt, zeros))
    alone = Engine(model, _config()).score(PromptGroup(prompt, zeros[:1]))
    assert torch.allclose(scores.logps[0, :2], alone.logps[0], rtol=0, atol=1e-5)
    assert scores.logps[0, :2].all()


def test_a_freed_state_cannot_be_read() -> None:
    """Pages that are gone would otherwise look like a shorter prompt."""
    engine = Engine(tiny_model("llama"), _config())
    (group,) = random_groups([(31, (7,))])
    state = engine.capture(group.prompt_ids)
    engine.release()
    with pytest.raises(PromptStateError, match="Capture the segment again"):
        state.history(0)


def test_two_prompts_of_one_update_do_not_drop_each_other() -> None:
    """Room for one prompt only: an error that says so, not a state that is freed under a reader."""
    groups = random_groups([(41, (3,)), (41, (5,))])
    model = tiny_model("llama")
    one = Engine(model).decoder.state_bytes(40, with_cotangents=False)
    engine = Engine(model, _config(state_budget_bytes=one * 3 // 2, prompt_gradient="stopped"))
    with pytest.raises(MemoryPlanError, match="fewer prompts"):
        engine.accumulate(groups, RandomLoss(groups))


def test_a_long_rest_is_captured_and_not_run_at_once() -> None:
    """A held prompt of a few tokens that happens to begin a long one is no reason to run the rest
    for each member in one forward."""
    engine = Engine(tiny_model("llama"), _config())
    (short, long) = random_groups([(5, (1,)), (60, (1,))])
    engine.capture(short.prompt_ids)
    joined = torch.cat([short.prompt_ids[:-1], long.prompt_ids])
    generate(engine, joined, 2, max_new_tokens=2, do_sample=False)
    assert engine.ledger.num_captures == 2


def test_a_long_response_is_counted_before_anything_runs() -> None:
    """The prompt fits, the four chunks that a response holds during its replay do not: an error
    before the first backward, and not in the middle of the update."""
    groups = random_groups([(17, (3, 70))])
    model = tiny_model("llama")
    prompt = Engine(model).decoder.state_bytes(16, with_cotangents=True)
    engine = Engine(model, _config(state_budget_bytes=2 * prompt))
    with pytest.raises(MemoryPlanError, match="longest responses"):
        engine.accumulate(groups, RandomLoss(groups))
    assert all(p.grad is None for p in model.parameters())
    enough = prompt + engine.decoder.state_bytes(64, with_cotangents=True)
    roomy = Engine(model, _config(state_budget_bytes=enough))
    roomy.accumulate(groups, RandomLoss(groups))
    assert roomy.store.peak_bytes <= enough
