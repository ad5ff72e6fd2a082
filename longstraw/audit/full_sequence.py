"""The definition: prompt and response in one sequence, one graph, no cache, no chunks.

Everything the engine does is compared with this, parameter by parameter. It uses the model's own
eager attention and shares no code with the engine's passes.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention import attend_with
from ..errors import UnsupportedModelError
from ..members import GroupScores
from ..models import RouterSums
from ..models.registry import SERVED_FAMILIES
from ..segments import PromptGroup
from .sparse_definition import latents_constant, stop_tokens, ties_decided

_STOPPED_NAME = "longstraw_stopped_definition"
_prompt_len: list[int] = []


def full_sequence_step(
    model: nn.Module,
    groups: Sequence[PromptGroup],
    loss_of: Callable[[list[GroupScores]], Tensor],
    *,
    prompt_gradient: str = "exact",
    temperature: float = 1.0,
    with_router: bool = False,
    index_ties: str = "first",
) -> Tensor:
    """Add the gradient of `loss_of` to the parameters' `.grad`, the plain way.

    Args:
        model: the causal LM, or a PEFT model around one.
        groups, loss_of: as for `Engine.accumulate`.
        prompt_gradient: "stopped" detaches keys and values (or latents) of all prompt tokens but
            the last, and all that they give to a recurrence.
        temperature: logits are divided by it.
        with_router: give the loss routing sums.
        index_ties: which of equal index scores are selected, see `EngineConfig`.

    Returns:
        The loss, detached.
    """
    scores = []
    for group in groups:
        rows = [
            full_sequence_scores(
                model,
                group.prompt_ids,
                ids,
                prompt_gradient=prompt_gradient,
                temperature=temperature,
                with_router=with_router,
                index_ties=index_ties,
            )
            for ids in group.completion_ids
        ]
        router = [row.router for row in rows if row.router is not None]
        scores.append(
            GroupScores(
                pad_sequence([row.logps[0] for row in rows], batch_first=True),
                pad_sequence([row.entropies[0] for row in rows], batch_first=True),
                RouterSums.cat(router) if router else None,
            )
        )
    loss = loss_of(scores)
    loss.backward()
    return loss.detach()


def full_sequence_scores(
    model: nn.Module,
    prompt_ids: Tensor,
    completion_ids: Tensor,
    *,
    prompt_gradient: str = "exact",
    temperature: float = 1.0,
    with_router: bool = False,
    index_ties: str = "first",
) -> GroupScores:
    """Scores `[1, R]` of one response, with the graph of the whole sequence.

    Args:
        prompt_ids: `[P]`; completion_ids: `[R]`.
    """
    token_ids = torch.cat([prompt_ids, completion_ids])[None]
    num_constant = prompt_ids.numel() - 1 if prompt_gradient == "stopped" else 0
    options: dict[str, Any] = {"output_router_logits": True} if with_router else {}
    with _prompt_state_constant(model, num_constant), ties_decided(model, index_ties):
        output = model(input_ids=token_ids, use_cache=False, **options)
    logits = output.logits[0, prompt_ids.numel() - 1 : -1]
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    logps = log_p.gather(-1, completion_ids[:, None]).squeeze(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    router = _router_sums(model, output.router_logits) if with_router else None
    return GroupScores(logps[None], entropies[None], router)


def _router_sums(model: nn.Module, router_logits: Sequence[Tensor]) -> RouterSums:
    config: Any = model.config
    config = config.get_text_config(decoder=True)
    field = SERVED_FAMILIES[config.model_type].router_top_k
    assert field is not None
    probs = [torch.softmax(logits, dim=-1) for logits in router_logits]
    chosen = [p.topk(getattr(config, field), dim=-1).indices.flatten() for p in probs]
    counts = torch.stack(
        [c.bincount(minlength=p.shape[-1]) for c, p in zip(chosen, probs, strict=True)]
    )
    num_rows = torch.tensor([float(sum(p.shape[0] for p in probs))])
    return RouterSums(
        counts.sum(0).float()[None], torch.stack([p.sum(0) for p in probs]).sum(0)[None], num_rows
    )


@contextmanager
def _prompt_state_constant(model: nn.Module, num_tokens: int) -> Iterator[None]:
    """Run the model's eager attention with the first `num_tokens` keys and values detached.

    And its recurrence, with their part of it.
    """
    # Of latent attention the latents are held constant, and not what is made of them.
    is_latent = any(hasattr(module, "expand_kv") for module in model.modules())
    name = _STOPPED_NAME if num_tokens and not is_latent else "eager"
    _prompt_len.append(num_tokens)
    try:
        with (
            attend_with(model, name),
            _prompt_recurrence_constant(model, num_tokens),
            latents_constant(model, num_tokens),
        ):
            yield
    finally:
        _prompt_len.pop()


@contextmanager
def _prompt_recurrence_constant(model: nn.Module, num_tokens: int) -> Iterator[None]:
    """Detach what the first tokens put into the state of Gated DeltaNet layers.

    That is what their convolution reads of them, what comes out of it, and their gates. The model
    looks these functions up in its module when it runs.
    """
    sources = {type(m).__module__ for m in model.modules() if hasattr(m, "dt_bias")}
    with ExitStack() as stack:
        for source in map(sys.modules.__getitem__, sources if num_tokens else ()):
            for name, stop in (
                ("causal_conv1d_fn", _stopped_convolution),
                ("torch_chunk_gated_delta_rule", _stopped_delta_rule),
            ):
                function = getattr(source, name)
                setattr(source, name, partial(stop, function, num_tokens))
                stack.callback(setattr, source, name, function)
        yield


def _stopped_convolution(
    function: Callable[..., Tensor], num_tokens: int, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    out = function(stop_tokens(x, num_tokens, -1), *args, **kwargs)
    return stop_tokens(out, num_tokens, -1)


def _stopped_delta_rule(
    function: Callable[..., Any], num_tokens: int, *qkv: Tensor, **kwargs: Any
) -> Any:
    gates = {name: stop_tokens(kwargs.pop(name), num_tokens, 1) for name in ("g", "beta")}
    return function(*(stop_tokens(x, num_tokens, 1) for x in qkv), **gates, **kwargs)


def _stopped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedModelError(
            f"{type(module).__module__} has no eager_attention_forward to take as definition."
        )
    key, value = (stop_tokens(x, _prompt_len[-1], -2) for x in (key, value))
    return eager(module, query, key, value, *args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(_STOPPED_NAME, _stopped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(_STOPPED_NAME, eager_mask)
