"""Conversations that grow turn by turn: each turn is a segment, and the gradient covers all of it.

The reference is the definition on each member's whole sequence; it knows nothing of turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longstraw import Engine, EngineConfig, GroupScores, PromptGroup, generate, generate_rows
from longstraw.audit import full_sequence_step
from longstraw.errors import ShapeError
from tests.engine.compare import RandomLoss, gradients, worst_error
from tests.marks import slow_but
from tests.models import VOCAB, Float64Islands, tiny_model

TOLERANCE = 1e-9
NUM_MEMBERS = 4


@dataclass(frozen=True)
class Conversation:
    """Four members that share the first two of five turns.

    Attributes:
        group: prompt and whole responses; tool tokens are marked as context.
        contexts: per turn, what each member's next turn is generated from.
    """

    group: PromptGroup
    contexts: list[list[Tensor]]


def make_conversation(
    seed: int = 1, prompt_len: int = 21, num_members: int = NUM_MEMBERS
) -> Conversation:
    """Turns of 3 to 6 tokens; tool answers of 5 to 45, one longer than the prompt."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(2, VOCAB, (length,), generator=generator)

    prompt = ids(prompt_len)
    responses = [torch.empty(0, dtype=torch.long) for _ in range(num_members)]
    masks = [torch.empty(0, dtype=torch.long) for _ in range(num_members)]
    contexts = []
    for turn, (said, answered) in enumerate([(5, 45), (3, 12), (4, 9), (6, 5), (2, 0)]):
        common = (ids(said), ids(answered))
        for i in range(num_members):
            parts = common if turn < 2 else (ids(said + i), ids(answered))
            responses[i] = torch.cat([responses[i], *parts])
            ones, zeros = torch.ones_like(parts[0]), torch.zeros_like(parts[1])
            masks[i] = torch.cat([masks[i], ones, zeros])
        if answered:
            contexts.append([torch.cat([prompt, response]) for response in responses])
    return Conversation(PromptGroup(prompt, responses, loss_masks=masks), [[prompt], *contexts])


class MaskedLoss:
    """`RandomLoss` of the tokens that the masks leave, as a trainer does it."""

    def __init__(self, groups: Sequence[PromptGroup]) -> None:
        self.loss = RandomLoss(groups)
        self.groups = groups

    def __call__(self, scores: list[GroupScores]) -> Tensor:
        masked = []
        for group, score in zip(self.groups, scores, strict=True):
            mask = torch.zeros_like(score.logps)
            for row, part in zip(mask, group.loss_masks or (), strict=True):
                row[: part.numel()] = part
            masked.append(
                replace(score, logps=score.logps * mask, entropies=score.entropies * mask)
            )
        return self.loss(masked)


def reference_gradients(
    model: nn.Module, groups: Sequence[PromptGroup], mode: str, **options: Any
) -> dict[str, Tensor]:
    with Float64Islands():
        full_sequence_step(model, groups, MaskedLoss(groups), prompt_gradient=mode, **options)
    return gradients(model)


def make_engine(model: nn.Module, **changes: Any) -> Engine:
    options = {"chunk_size": 16, "page_size": 8, "min_shared_tokens": 4, **changes}
    return Engine(model, EngineConfig(**options))


def roll_out(engine: Engine, conversation: Conversation) -> None:
    """What a tool loop does: every member's context is captured before its next turn."""
    with Float64Islands():
        for contexts in conversation.contexts:
            engine.capture_shared(contexts)
            for context in contexts:
                engine.capture(context)


def update(engine: Engine, groups: Sequence[PromptGroup]) -> dict[str, Tensor]:
    with Float64Islands():
        engine.accumulate(groups, MaskedLoss(groups))
        engine.finalize()
    assert engine.store.bytes_in_use == 0 and engine.store.num_pages == 0
    return gradients(engine.decoder.model)


def tokens(engine: Engine, phase: str) -> int:
    """How many tokens a phase has passed through the model."""
    return sum(row["tokens"] for row in engine.ledger.table() if row["phase"] == phase)


def num_unique(sequences: Sequence[Tensor]) -> int:
    """Tokens that are left when what sequences begin with in common counts once."""
    return len({tuple(s[: i + 1].tolist()) for s in sequences for i in range(len(s))})


def test_no_turn_is_captured_twice() -> None:
    """Five turns, four members, the first two turns in common.

    The last token of a context is run with what follows it, as a prompt's is with each response:
    where the four part it is run four times instead of once.
    """
    conversation = make_conversation()
    engine = make_engine(tiny_model("llama").double())
    roll_out(engine, conversation)
    last = conversation.contexts[-1]
    assert tokens(engine, "capture") == num_unique([c[:-1] for c in last]) + (NUM_MEMBERS - 1)
    before = tokens(engine, "capture")
    update(engine, [conversation.group])
    assert tokens(engine, "capture") == before, "the update captured what the rollout had captured"


def test_an_update_runs_each_shared_turn_once() -> None:
    """Without a rollout of ours: what members have in common is scored and replayed once."""
    group = make_conversation().group
    engine = make_engine(tiny_model("llama").double())
    update(engine, [group])
    sequences = [torch.cat([group.prompt_ids[-1:], ids[:-1]]) for ids in group.completion_ids]
    expected = num_unique(sequences) + (NUM_MEMBERS - 1)
    assert tokens(engine, "score") == expected
    assert tokens(engine, "replay") == expected
    assert sum(len(s) for s in sequences) > 1.9 * expected
    assert tokens(engine, "capture") == group.prompt_len - 1


@pytest.mark.parametrize(
    ("family", "mode", "rolled_out"),
    slow_but(
        [
            ("llama", "exact", False),
            ("llama", "stopped", True),
            ("gpt2", "exact", True),
        ],
        product(["llama", "gemma3", "gpt_oss", "gpt2"], ["exact", "stopped"], [True, False]),
    ),
)
def test_the_gradient_is_that_of_the_full_sequences(
    family: str, mode: str, rolled_out: bool
) -> None:
    """Stopped holds the prompt constant and not the turns: these are the policy's."""
    conversation = make_conversation()
    model = tiny_model(family).double()
    engine = make_engine(model, prompt_gradient=mode)
    if rolled_out:
        roll_out(engine, conversation)
    error, name = worst_error(
        update(engine, [conversation.group]),
        reference_gradients(model, [conversation.group], mode),
    )
    assert error <= TOLERANCE, name


OPTIONS: dict[str, dict[str, Any]] = {
    "small chunks": {"chunk_size": 13, "page_size": 3},
    "smaller chunks": {"chunk_size": 3, "page_size": 2},
    "one chunk": {"chunk_size": 512, "page_size": 512},
    "members together": {"replay_batch": 4},
    "short runs shared": {"min_shared_tokens": 1},
    "nothing shared": {"min_shared_tokens": 10_000},
    "pages on the host": {"page_device": "host"},
}


@pytest.mark.parametrize(
    "name", slow_but(["small chunks", "members together", "nothing shared"], OPTIONS)
)
def test_no_option_changes_it(name: str) -> None:
    conversation = make_conversation()
    model = tiny_model("llama").double()
    engine = make_engine(model, **OPTIONS[name])
    roll_out(engine, conversation)
    error, parameter = worst_error(
        update(engine, [conversation.group]),
        reference_gradients(model, [conversation.group], "exact"),
    )
    assert error <= TOLERANCE, parameter


@pytest.mark.parametrize("rolled_out", slow_but([True], [True, False]))
def test_routing_statistics_count_each_members_whole_way(rolled_out: bool) -> None:
    """The load-balancing loss sees every token of every member once, shared ones for each."""
    conversation = make_conversation()
    model = tiny_model("qwen3_moe").double()
    engine = make_engine(model, router_statistics=True)
    if rolled_out:
        roll_out(engine, conversation)
    error, name = worst_error(
        update(engine, [conversation.group]),
        reference_gradients(model, [conversation.group], "exact", with_router=True),
    )
    assert error <= TOLERANCE, name


def test_context_tokens_get_no_score() -> None:
    group = make_conversation().group
    engine = make_engine(tiny_model("llama"))
    scores = engine.score(group)
    plain = engine.score(replace(group, loss_masks=None))
    for i, mask in enumerate(group.loss_masks or ()):
        row = scores.logps[i, : mask.numel()]
        assert torch.equal(row != 0, mask.bool())
        expected = plain.logps[i, : mask.numel()][mask.bool()]
        torch.testing.assert_close(row[mask.bool()], expected)


def test_turns_dropped_to_make_room_are_captured_again() -> None:
    """A budget in which the turns of eight members do not stand together: the same gradient."""
    conversation = make_conversation(num_members=8)
    model = tiny_model("llama").double()
    ample = make_engine(model)
    roll_out(ample, conversation)
    budget = ample.store.bytes_in_use * 3 // 4
    engine = make_engine(model, state_budget_bytes=budget)
    roll_out(engine, conversation)
    assert tokens(engine, "capture") > tokens(ample, "capture")
    ours = update(engine, [conversation.group])
    assert engine.store.peak_bytes <= budget
    error, name = worst_error(ours, reference_gradients(model, [conversation.group], "exact"))
    assert error <= TOLERANCE, name


def test_members_without_a_gradient_leave_nothing_behind() -> None:
    """Turns captured for them are freed with the prompt."""
    conversation = make_conversation()
    model = tiny_model("llama").double()
    engine = make_engine(model)
    roll_out(engine, conversation)
    with Float64Islands():
        report = engine.accumulate(
            [conversation.group], lambda scores: (scores[0].logps[1] ** 2).sum()
        )
    assert (report.num_replayed, report.num_skipped) == (1, 3)
    assert engine.store.bytes_in_use == 0
    ours = gradients(model)
    with Float64Islands():
        full_sequence_step(
            model,
            [conversation.group],
            lambda scores: (scores[0].logps[1] ** 2 * pad(conversation.group, scores[0])[1]).sum(),
        )
    error, name = worst_error(ours, gradients(model))
    assert error <= TOLERANCE, name


def pad(group: PromptGroup, scores: GroupScores) -> Tensor:
    """The group's loss masks, shaped like its scores."""
    mask = torch.zeros_like(scores.logps)
    for row, part in zip(mask, group.loss_masks or (), strict=True):
        row[: part.numel()] = part
    return mask


def test_equal_members_are_run_once() -> None:
    """Eight members, two different: one-word answers repeat."""
    group = PromptGroup(torch.arange(2, 30), [torch.tensor(ids) for ids in [(5, 6, 7), (8, 9)] * 4])
    model = tiny_model("llama").double()
    engine = make_engine(model, min_shared_tokens=256, replay_batch=1)
    with Float64Islands():
        report = engine.accumulate([group], RandomLoss([group]))
    assert report.num_replayed == 8
    assert tokens(engine, "replay") == 5
    ours = gradients(model)
    with Float64Islands():
        full_sequence_step(model, [group], RandomLoss([group]))
    error, name = worst_error(ours, gradients(model))
    assert error <= TOLERANCE, name


# ------------------------------------------------------------------- prompts that share


def prompts_that_share(num_groups: int = 3, shared: int = 37) -> list[PromptGroup]:
    """One document and several questions about it, and one prompt that is the document."""
    generator = torch.Generator().manual_seed(4)

    def ids(length: int) -> Tensor:
        return torch.randint(2, VOCAB, (length,), generator=generator)

    document = ids(shared)
    prompts = [torch.cat([document, ids(7 + i)]) for i in range(num_groups - 1)] + [document]
    return [PromptGroup(prompt, [ids(4), ids(9)]) for prompt in prompts]


@pytest.mark.parametrize("mode", ["exact", "stopped"])
def test_prompts_share_the_document_they_begin_with(mode: str) -> None:
    groups = prompts_that_share()
    model = tiny_model("llama").double()
    engine = make_engine(model, prompt_gradient=mode)
    with Float64Islands():
        engine.accumulate(groups, RandomLoss(groups))
    assert engine.store.bytes_in_use == 0
    prompts = [group.prompt_ids[:-1] for group in groups]
    # The document's last token is run with each question.
    assert tokens(engine, "capture") == num_unique(prompts) + 1
    if mode == "exact":
        assert tokens(engine, "prompt_backward") == num_unique(prompts) + 1
    ours = gradients(model)
    with Float64Islands():
        full_sequence_step(model, groups, RandomLoss(groups), prompt_gradient=mode)
    error, name = worst_error(ours, gradients(model))
    assert error <= TOLERANCE, name


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_shared_document_waits_for_all_that_continue_it(order: tuple[int, ...]) -> None:
    """Captured together, trained in one micro-batch each: its backward runs once, after them."""
    groups = prompts_that_share()
    model = tiny_model("llama").double()
    engine = make_engine(model)
    with Float64Islands():
        engine.capture_shared([group.prompt_ids for group in groups])
        for group in groups:
            engine.capture(group.prompt_ids)
        captured = tokens(engine, "capture")
        for i in order:
            engine.accumulate([groups[i]], RandomLoss([groups[i]]))
        engine.finalize()
    assert engine.store.bytes_in_use == 0
    assert tokens(engine, "capture") == captured
    assert tokens(engine, "prompt_backward") == captured
    ours = gradients(model)
    with Float64Islands():
        for group in groups:
            full_sequence_step(model, [group], RandomLoss([group]))
    error, name = worst_error(ours, gradients(model))
    assert error <= TOLERANCE, name


def test_an_optimizer_step_does_not_wait_for_groups_of_the_next_one() -> None:
    """What is pending is finished for this step; the next one captures anew."""
    groups = prompts_that_share()
    model = tiny_model("llama").double()
    engine = make_engine(model)
    with Float64Islands():
        engine.capture_shared([group.prompt_ids for group in groups])
        for group in groups:
            engine.capture(group.prompt_ids)
        engine.accumulate(groups[:1], RandomLoss(groups[:1]))
        engine.finalize()
    ours = gradients(model)
    engine.weights_changed()
    assert engine.store.bytes_in_use == 0
    with Float64Islands():
        full_sequence_step(model, groups[:1], RandomLoss(groups[:1]))
    error, name = worst_error(ours, gradients(model))
    assert error <= TOLERANCE, name


def test_releasing_a_prompt_frees_what_only_led_to_it() -> None:
    groups = prompts_that_share()
    engine = make_engine(tiny_model("llama"))
    engine.capture_shared([group.prompt_ids for group in groups])
    for group in groups:
        engine.capture(group.prompt_ids)
    for group in groups:
        engine.release(group.prompt_ids)
    assert engine.store.bytes_in_use == 0


def test_turns_are_decoded_as_whole_contexts_are() -> None:
    """Greedy tokens of `generate` on each context, from segments of earlier turns."""
    conversation = make_conversation()
    model = tiny_model("gemma3")
    engine = make_engine(model)
    options = {"max_new_tokens": 8, "do_sample": False}
    for contexts in conversation.contexts:
        engine.capture_shared(contexts)
        for context in contexts:
            found = generate(engine, context, 1, **options)
            row = context[None]
            plain = model.generate(row, attention_mask=torch.ones_like(row), **options)
            assert torch.equal(found, plain)


def test_masks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"loss_masks of \[2\] tokens for responses of \[3\]"):
        PromptGroup(torch.arange(4), [torch.arange(3)], loss_masks=[torch.ones(2)])


# ------------------------------------------------------------------- prompts that are turns


def overlapping_groups() -> dict[str, PromptGroup]:
    """A's members begin with the tokens with which the prompts of all others go on."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> Tensor:
        return torch.randint(2, VOCAB, (length,), generator=generator)

    p, y, u = ids(20), ids(10), ids(9)
    return {
        "A": PromptGroup(p, [torch.cat([y, ids(6)]), torch.cat([y, u, ids(3)])]),
        "B": PromptGroup(torch.cat([p, y]), [ids(5), ids(7)]),
        "C": PromptGroup(torch.cat([p, y, u]), [ids(5), ids(7)]),
        "Q": PromptGroup(torch.cat([p, y, ids(6)]), [ids(5), ids(7)]),
        "R": PromptGroup(torch.cat([p, y, ids(6)]), [ids(5), ids(7)]),
    }


@pytest.mark.parametrize(
    ("names", "mode", "log_gap"),
    [
        ("AB", "exact", False),
        ("BA", "stopped", False),
        ("AQR", "exact", False),
        ("QRA", "exact", False),
        ("QRA", "stopped", False),
        ("BCA", "stopped", True),
    ],
)
def test_a_prompt_is_no_part_of_another_groups_responses(
    names: str, mode: str, log_gap: bool
) -> None:
    """Taken for a turn it would be used up by A, with what its own members left on it."""
    groups = [overlapping_groups()[name] for name in names]
    model = tiny_model("llama").double()
    engine = make_engine(model, prompt_gradient=mode, log_gradient_gap=log_gap)
    with Float64Islands():
        engine.accumulate(groups, RandomLoss(groups))
        engine.finalize()
    assert engine.store.bytes_in_use == 0
    ours = gradients(model)
    with Float64Islands():
        full_sequence_step(model, groups, RandomLoss(groups), prompt_gradient=mode)
    error, name = worst_error(ours, gradients(model))
    assert error <= TOLERANCE, name


@pytest.mark.parametrize("budget", [80, 90, 100, 120])
def test_what_is_planned_and_dropped_to_make_room_is_captured_again(budget: int) -> None:
    """Two documents are held; each is to be continued by two contexts."""
    generator = torch.Generator().manual_seed(5)
    documents = [torch.randint(2, VOCAB, (40,), generator=generator) for _ in range(2)]
    contexts = []
    for document in documents:
        more = torch.randint(2, VOCAB, (12,), generator=generator)
        for length in (3, 5):
            tail = torch.randint(2, VOCAB, (length,), generator=generator)
            contexts.append(torch.cat([document, more, tail]))
    model = tiny_model("llama")
    per_token = make_engine(model).decoder.state_bytes(1, False)
    engine = make_engine(model, state_budget_bytes=budget * per_token)
    for document in documents:
        engine.capture(document)
    options = {"max_new_tokens": 3, "do_sample": False}
    for row, context in zip(generate_rows(engine, contexts, **options), contexts, strict=True):
        plain = model.generate(
            context[None], attention_mask=torch.ones_like(context[None]), **options
        )
        assert torch.equal(row, plain[0, context.numel() :])


def test_where_members_part_a_context_token_hides_no_entropy() -> None:
    """Member 0 goes on with a tool's token, which has no score, member 1 with the policy's."""
    first, second = torch.arange(5, 17), torch.arange(5, 17)
    second[8] = 40
    mask = torch.ones(12)
    mask[8] = 0
    prompt = torch.arange(20, 40)
    group = PromptGroup(prompt, [first, second], loss_masks=[mask, torch.ones(12)])
    engine = make_engine(tiny_model("llama").double())
    with Float64Islands():
        scores = engine.score(group)
        plain = engine.score(PromptGroup(prompt, [second]))
    torch.testing.assert_close(scores.entropies[1], plain.entropies[0])
    assert scores.entropies[0, 8] == 0
