"""What of TRL's internals the trainer leans on, written down so that a change cannot pass unseen.

`check_seams` runs when a trainer is made; `tests/trl/test_seams.py` runs it against the installed
TRL.
"""

import ast
import inspect
import logging
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from longstraw import ConfigError

SUPPORTED_TRL = ">=1.16,<2"

# method -> the parameters it is called with
_METHODS = {
    "compute_loss": ("model", "inputs"),
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ),
    "_prepare_inputs": ("generation_batch",),
    "_generate_and_score_completions": ("inputs",),
    "_generate": ("prompts",),
    "_tokenize_prompts": ("prompts",),
    "_get_dataloader": ("dataset",),
    "_set_signature_columns_if_needed": (),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_get_grad_norm": ("model", "grad_norm"),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations"),
    "prediction_step": ("model", "inputs", "prediction_loss_only"),
    "create_model_card": (),
    "_save_checkpoint": ("model", "trial"),
    "_get_output_dir": ("trial",),
    "_save": ("output_dir", "state_dict"),
    "_save_rng_state": ("output_dir",),
    "_push_from_checkpoint": ("checkpoint_folder",),
    "_run_epoch": (),
    "_get_train_sampler": ("dataset",),
    "_load_rng_state": ("checkpoint",),
    "create_accelerator_and_postprocess": (),
    "get_total_train_batch_size": ("args",),
    "evaluate": (),
}
# module function -> why it is needed
_FUNCTIONS = (
    "shuffle_sequence_dict",
    "unwrap_model_for_generation",
    "logger",
    "gather",
    "gather_object",
)
# What may be done with the prompts when their rewards are known, since they are shortened then.
_SCORING, _DONE_WITH_SHORTENED = "_generate_and_score_completions", {"len", "gather_object"}
# What a rollout returns is sent to other ranks field by field.
_ROLLOUT = "_generate"
_ROLLOUT_RETURNS = (
    "prompt_ids",
    "completion_ids",
    "tool_mask",
    "completions",
    "logprobs",
    "extra_fields",
    "images",
    "tool_images",
)
# The loss must take its log-probs from the method that the trainer overrides.
_CALLED_BY_LOSS = "_get_per_token_logps_and_entropies"


def check_seams() -> None:
    """Raise `ConfigError` if the installed TRL is not shaped as the trainer needs."""
    problems = [*_missing_methods(), *_missing_functions(), *_uses_of_shortened_prompts()]
    problems += _other_rollout_results()
    loss = getattr(GRPOTrainer, "_compute_loss", None)
    if loss is not None and _CALLED_BY_LOSS not in inspect.getsource(loss):
        problems.append(f"_compute_loss does not call {_CALLED_BY_LOSS}")
    if problems:
        raise ConfigError(
            f"trl {trl.__version__} differs from what this release was written for "
            f"({SUPPORTED_TRL}): {'; '.join(problems)}. Install a tested version, for example "
            "pip install 'trl==1.16.0'."
        )


def _missing_methods() -> Iterator[str]:
    for name, parameters in _METHODS.items():
        method = getattr(GRPOTrainer, name, None)
        if method is None:
            yield f"GRPOTrainer.{name} is gone"
            continue
        known = inspect.signature(inspect.unwrap(method)).parameters
        for parameter in parameters:
            if parameter not in known:
                yield f"GRPOTrainer.{name} has no parameter {parameter!r}"


def _missing_functions() -> Iterator[str]:
    for name in _FUNCTIONS:
        if not hasattr(grpo_trainer, name):
            yield f"trl.trainer.grpo_trainer.{name} is gone"


def _uses_of_shortened_prompts() -> Iterator[str]:
    scoring = getattr(GRPOTrainer, _SCORING, None)
    if scoring is None:
        return
    tree = _parsed(scoring)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    rewarded = [
        call.end_lineno or 0
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "_calculate_rewards"
    ]
    allowed = {
        argument
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in _DONE_WITH_SHORTENED
        for argument in call.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "prompts" and node not in allowed:
            if not rewarded or node.lineno > max(rewarded):
                yield f"{_SCORING} uses prompts after _calculate_rewards"
                return


def _other_rollout_results() -> Iterator[str]:
    rollout = getattr(GRPOTrainer, _ROLLOUT, None)
    if rollout is None:
        return
    returns = [node.value for node in ast.walk(_parsed(rollout)) if isinstance(node, ast.Return)]
    for value in returns:
        names = tuple(getattr(item, "id", "") for item in getattr(value, "elts", []))
        if names != _ROLLOUT_RETURNS:
            yield f"{_ROLLOUT} returns {names}, not {_ROLLOUT_RETURNS}"


def _parsed(method: Callable[..., Any]) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))


@contextmanager
def brief_warnings(shorten: Callable[[str], str]) -> Iterator[None]:
    """Inside the context TRL's trainer logs what `shorten` makes of its messages.

    Where no reward function scored a row, TRL logs the whole row.
    """

    def brief(record: logging.LogRecord) -> bool:
        record.msg = shorten(str(record.msg))
        return True

    logger = logging.getLogger(grpo_trainer.__name__)
    logger.addFilter(brief)
    try:
        yield
    finally:
        logger.removeFilter(brief)


@contextmanager
def replaced(module: Any, **functions: Any) -> Iterator[None]:
    """Inside the context names of a module mean something else."""
    originals = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


@contextmanager
def gathering_over_groups(accelerator: Any) -> Iterator[None]:
    """Let TRL's own calls of `gather` count a sequence group as one process inside the context.

    Args:
        accelerator: a `GroupAccelerator`; any other gathers as these functions do.
    """
    if not hasattr(accelerator, "gather_object"):
        yield
        return
    functions = {"gather": accelerator.gather, "gather_object": accelerator.gather_object}
    with replaced(grpo_trainer, **functions):
        yield


@contextmanager
def whole_groups(group_size: int) -> Iterator[None]:
    """Let TRL shuffle groups instead of rows inside the context.

    TRL shuffles the rows of a generation batch before it cuts the batch into micro-batches, which
    would scatter a group's members over micro-batches and capture its prompt in each of them.
    """

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        return shuffle_groups(batch, group_size)

    with replaced(grpo_trainer, shuffle_sequence_dict=shuffle):
        yield


def shuffle_groups(batch: dict[str, Any], group_size: int) -> dict[str, Any]:
    """Permute runs of `group_size` rows of every sequence in `batch`; members keep their order."""
    num_rows = len(next(value for value in batch.values() if value is not None))
    groups = torch.arange(num_rows).view(-1, group_size)
    order = groups[torch.randperm(len(groups))].flatten()

    def permute(value: Any) -> Any:
        if value is None or (isinstance(value, Tensor) and value.ndim == 0):
            return value
        return value[order] if isinstance(value, Tensor) else [value[i] for i in order]

    return {key: permute(value) for key, value in batch.items()}
