"""What is trained when a prompt's state is read in several optimizer steps, without the engine.

"never": the full sequence in one graph, with the output of every adapter multiplied by 0 at the
prompt tokens but the last. N steps: a frozen copy of the model of step s fills transformers' own
cache with the prompt, and the model of now runs the responses on it.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from longstraw import Engine, EngineConfig, GroupScores, PromptGroup
from longstraw.audit.full_sequence import full_sequence_scores
from tests.engine.compare import RandomLoss, gradients, worst_error
from tests.models import Float64Islands, tiny_model

NUM_STEPS = 8
BESIDE_EXPERTS = r".*(self_attn\.\w_proj|linear_attn\.\w*proj\w*|shared_expert_gate)"
# A prompt of more chunks than one that is a multiple of none, and ragged members.
SHAPES = ((37, (9, 1, 4)),)
Scorer = Callable[[nn.Module, PromptGroup], GroupScores]


def adapted(family: str, **options: Any) -> nn.Module:
    """A tiny model with an adapter on every linear layer, both factors of which are random.

    Experts have none: theirs are added to weights, where no hook could tell tokens apart.
    """
    targets = BESIDE_EXPERTS if "experts" in str(tiny_model(family)) else "all-linear"
    options = {"r": 3, "lora_alpha": 6, "target_modules": targets, **options}
    model = get_peft_model(tiny_model(family).double(), LoraConfig(**options))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data = noise.to(torch.float64)
    return model


def config(refresh: int | str, **changes: Any) -> EngineConfig:
    options = {"chunk_size": 16, "page_size": 8, "temperature": 0.7, "prompt_refresh": refresh}
    if refresh not in ("never", 1):
        options["prompt_gradient"] = "stopped"
    return EngineConfig(**{**options, **changes})


# ---------------------------------------------------------------- the definitions


@contextmanager
def adapters_off_before(model: nn.Module, num_tokens: int) -> Iterator[None]:
    """Multiply what each adapter adds by 0 at the first `num_tokens` positions."""

    def mask(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        is_on = torch.arange(output.shape[-2]) >= num_tokens
        return output * is_on.to(output.dtype)[:, None]

    hooks = [m.register_forward_hook(mask) for n, m in model.named_modules() if ".lora_B." in n]
    assert hooks
    yield
    for hook in hooks:
        hook.remove()


def scores_of_never(model: nn.Module, group: PromptGroup) -> GroupScores:
    """Full sequences, base weights at all prompt positions but the last."""
    with adapters_off_before(model, group.prompt_len - 1):
        rows = [
            full_sequence_scores(model, group.prompt_ids, ids, temperature=0.7)
            for ids in group.completion_ids
        ]
    return joined(rows)


def scores_of_every_step(model: nn.Module, group: PromptGroup) -> GroupScores:
    return joined(
        [
            full_sequence_scores(
                model, group.prompt_ids, ids, temperature=0.7, prompt_gradient="stopped"
            )
            for ids in group.completion_ids
        ]
    )


class ScoresOfSteps:
    """Responses of the model of now on the cache of a model that is frozen every `num_steps`."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.calls = 0
        self.frozen: nn.Module | None = None

    def __call__(self, model: nn.Module, group: PromptGroup) -> GroupScores:
        if self.calls % self.num_steps == 0:
            self.frozen = copy.deepcopy(model)
        self.calls += 1
        return self.scores(model, group)

    def scores(self, model: nn.Module, group: PromptGroup) -> GroupScores:
        rows = []
        for ids in group.completion_ids:
            cache = DynamicCache()
            with torch.no_grad():
                self.frozen(group.prompt_ids[None, :-1], past_key_values=cache)
            tokens = torch.cat([group.prompt_ids[-1:], ids])[None]
            logits = model(tokens, past_key_values=cache).logits[0, :-1] / 0.7
            log_p = torch.log_softmax(logits, dim=-1)
            logps = log_p.gather(-1, ids[:, None]).squeeze(-1)
            rows.append(GroupScores(logps[None], -(log_p.exp() * log_p).sum(-1)[None]))
        return joined(rows)


def joined(rows: Sequence[GroupScores]) -> GroupScores:
    logps = [row.logps[0] for row in rows]
    entropies = [row.entropies[0] for row in rows]
    return GroupScores(
        pad_sequence(logps, batch_first=True), pad_sequence(entropies, batch_first=True)
    )


class LossWithReference:
    """`RandomLoss`, and squared differences from given log-probs.

    Not TRL's estimate of the KL divergence: the exponentials of random models leave fp64.
    """

    def __init__(self, groups: Sequence[PromptGroup]) -> None:
        self.random, self.reference = RandomLoss(groups), None

    def __call__(self, scores: list[GroupScores]) -> Tensor:
        loss = self.random(scores)
        if self.reference is not None:
            loss = loss + 0.1 * (self.reference - scores[0].logps).square().sum()
        return loss


# ---------------------------------------------------------------- trainings


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.5)


def by_definition(
    model: nn.Module,
    groups: Sequence[PromptGroup],
    scores: Scorer,
    name: str,
    *,
    beta: bool = False,
    steps: int = NUM_STEPS,
) -> dict[str, Tensor]:
    """The parameters after that many steps."""
    optimizer, loss = optimizer_of(model, name), LossWithReference(groups)
    with Float64Islands():
        for _ in range(steps):
            if beta:
                with torch.no_grad(), model.disable_adapter():
                    loss.reference = scores_of_every_step(model, groups[0]).logps
            loss([scores(model, group) for group in groups]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return trained(model)


def by_engine(
    model: nn.Module,
    groups: Sequence[PromptGroup],
    settings: EngineConfig,
    name: str,
    *,
    beta: bool = False,
    calls: int = 1,
    steps: int = NUM_STEPS,
) -> tuple[dict[str, Tensor], Engine]:
    """The same by the engine. With several `calls` per step the loss is divided between them."""
    engine, loss = Engine(model, settings), LossWithReference(groups)
    optimizer = optimizer_of(model, name)
    with Float64Islands():
        for _ in range(steps):
            if beta:
                with model.disable_adapter():
                    loss.reference = engine.score(groups[0]).logps
            for call in range(calls):
                given = [replace(group, is_complete=call == calls - 1) for group in groups]
                engine.accumulate(given, lambda scores: loss(scores) / calls)
            engine.finalize()
            optimizer.step()
            optimizer.zero_grad()
            engine.weights_changed()
    return trained(model), engine


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def movement_error(ours: dict[str, Tensor], reference: dict[str, Tensor], family: str) -> float:
    """Worst |difference| of a parameter, of how far it has come."""
    begin = trained(adapted(family))
    moved = {name: reference[name] - begin[name] for name in begin}
    return worst_error({name: ours[name] - begin[name] for name in begin}, moved)[0]


def checkpointed(model: nn.Module) -> nn.Module:
    model.enable_input_require_grads()
    model.base_model.model.activation_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: (Float64Islands(), Float64Islands())}
    )
    return model.train()


def gradient_by_definition(
    model: nn.Module, groups: Sequence[PromptGroup], scores: Scorer
) -> dict[str, Tensor]:
    with Float64Islands():
        RandomLoss(groups)([scores(model, group) for group in groups]).backward()
    return gradients(model)


def write(model: nn.Module) -> None:
    """As an optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.01)
