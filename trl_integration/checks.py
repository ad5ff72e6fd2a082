"""What is checked where it enters: the config, the dataset, what reward functions return.

Each check raises with what was found, what is needed and what to change.
"""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import datasets
from transformers import ProcessorMixin

from longstraw import ConfigError, DataError

from .prompt_reader import PLACEHOLDER, document_path

if TYPE_CHECKING:
    from .config import LongStrawGRPOConfig

logger = logging.getLogger(__name__)

# Optimizers that update parameters inside backward, so a second replay would see other weights.
_UPDATING_IN_BACKWARD = ("lomo", "adalomo", "layerwise")


def check_config(args: "LongStrawGRPOConfig") -> None:
    """Refuse options that the engine cannot honour."""
    assert args.steps_per_generation is not None and args.num_generations is not None
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % args.num_generations:
        raise ConfigError(
            f"per_device_train_batch_size * steps_per_generation = "
            f"{args.per_device_train_batch_size} * {args.steps_per_generation} = {rows} is not a "
            f"multiple of num_generations={args.num_generations}: a group of responses would be "
            "split over processes, and each would have to capture the prompt. Make it a multiple "
            "(for example per_device_train_batch_size=1 with gradient_accumulation_steps="
            f"{args.num_generations})."
        )
    refusals = [*_refusals(args), *_refusals_to_groups(args), *_refusals_to_refresh(args)]
    for is_found, reason in refusals:
        if is_found:
            raise ConfigError(reason)


def _refusals(args: "LongStrawGRPOConfig") -> list[tuple[bool, str]]:
    optim = str(getattr(args.optim, "value", args.optim))
    kwargs = args.gradient_checkpointing_kwargs
    reentrant = isinstance(kwargs, dict) and bool(kwargs.get("use_reentrant"))
    return [
        (
            args.fp16,
            "fp16=True: its loss scaler scales one backward, and an update has many. Use bf16=True "
            "or full precision.",
        ),
        (
            bool(args.fsdp),
            "fsdp is set: its sharded parameters are not served. Use DeepSpeed ZeRO-3, which "
            "shards them too (ds_configs/accelerate/zero3.yaml).",
        ),
        (
            bool(args.torch_compile),
            "torch_compile=True: every chunk has another history, so each would be compiled anew. "
            "Leave it off.",
        ),
        (
            bool(args.use_liger_kernel),
            "use_liger_kernel=True: its patched layers are not compared with the definition. Leave "
            "it off; log-probs are chunked over rows already.",
        ),
        (
            args.longstraw_logged_prompt_chars is not None
            and args.longstraw_logged_prompt_chars < 1,
            f"longstraw_logged_prompt_chars={args.longstraw_logged_prompt_chars}: give a positive "
            "number of characters, or None for whole prompts.",
        ),
        (
            args.neftune_noise_alpha is not None,
            "neftune_noise_alpha is set: a replay would draw other noise than the capture. "
            "Leave it out.",
        ),
        (
            args.gradient_checkpointing and reentrant,
            "gradient_checkpointing_kwargs has use_reentrant=True, which drops the cache that "
            'holds the prompt. Use {"use_reentrant": False}.',
        ),
        (
            any(name in optim for name in _UPDATING_IN_BACKWARD),
            f"optim={optim!r} updates weights during backward, and an update replays several "
            "backwards on the same weights. Use another optimizer, for example 'adamw_torch'.",
        ),
    ]


def _refusals_to_groups(args: "LongStrawGRPOConfig") -> list[tuple[bool, str]]:
    """Of options with which ranks that share prompts would not hold the same rows."""
    is_shared = args.longstraw_sp_size > 1
    found = f"with longstraw_sp_size={args.longstraw_sp_size}"
    config: Any = args.accelerator_config
    return [
        (
            is_shared and args.use_vllm,
            f"use_vllm=True {found}: vLLM would generate for each rank by itself. Leave it out: "
            "responses are decoded from captured prompts by all ranks of a group. A rollout_func "
            "that asks a vLLM server runs once per group.",
        ),
        (
            is_shared and bool(config.dispatch_batches),
            f"accelerator_config has dispatch_batches=True {found}: it would deal rows out to "
            "ranks, not to groups of them. Leave it out.",
        ),
        (
            is_shared and args.auto_find_batch_size,
            f"auto_find_batch_size=True {found}: a rank that runs out of memory would begin again "
            "while the others of its group wait for it. Leave it out.",
        ),
        (
            is_shared and args.eval_use_gather_object,
            f"eval_use_gather_object=True {found}: objects are gathered from each rank, and losses "
            "would count several times. Leave it out: losses are tensors.",
        ),
    ]


def _refusals_to_refresh(args: "LongStrawGRPOConfig") -> list[tuple[bool, str]]:
    """Of options by which another policy would generate than the one that is trained."""
    is_kept = args.to_engine_config().refresh_steps != 1
    found = f"with longstraw_prompt_refresh={args.longstraw_prompt_refresh!r}"
    other = (
        "generate with the present weights in the prompt, adapter included, which is another "
        "policy than the one that is trained. Leave it out: responses are decoded from captured "
        "prompts."
    )
    return [
        (is_kept and args.use_vllm, f"use_vllm=True {found}: vLLM would {other}"),
        (
            is_kept and not args.longstraw_shared_rollout,
            f"longstraw_shared_rollout=False {found}: TRL would {other}",
        ),
    ]


def check_refreshed_rollout(
    args: "LongStrawGRPOConfig",
    *,
    has_tools: bool = False,
    has_environment: bool = False,
    has_context_tokens: bool = False,
    own_generation: str | None = None,
    has_rollout_func: bool = False,
) -> None:
    """Raise if a rollout cannot be that of a policy whose prompts are not refreshed every step.

    Args:
        has_context_tokens: whether completions hold tokens that are not the policy's own.
        own_generation: why TRL generates, and not the engine.
        has_rollout_func: whether a user's function generates, perhaps with another policy; warns.
    """
    config = args.to_engine_config()
    if config.refresh_steps == 1:
        return
    turns = {
        "tools": has_tools,
        "environment_factory": has_environment,
        "a rollout_func with an env_mask": has_context_tokens,
    }
    found = [name for name, is_found in turns.items() if is_found]
    refresh = f"longstraw_prompt_refresh={args.longstraw_prompt_refresh!r}"
    if found:
        raise ConfigError(
            f"{found[0]} with {refresh}: each turn continues the one before it, so the policy's "
            "own earlier turns would be read as a prompt that is not refreshed. Leave "
            "longstraw_prompt_refresh at 'every_step', or train on one turn."
        )
    if own_generation is not None:
        raise ConfigError(
            f"{own_generation} with {refresh}: TRL would generate with the present weights in the "
            "prompt, adapter included, which is another policy than the one that is trained. Leave "
            "it out, so that responses are decoded from captured prompts."
        )
    if has_rollout_func:
        logger.warning(
            f"A rollout_func with {refresh}: take responses from trainer.generate_turn, in one "
            "turn. Whatever else generates reads the prompt with the present weights, and is "
            "another policy than the one that is trained."
        )


def check_dataset(dataset: Any, name: str, has_environment: bool, folder: str | None) -> None:
    """Raise if a dataset with known columns cannot give prompts; see `prompt_reader`.

    What differs from row to row is checked by `PromptReader`, but for files of a dataset that is
    there as a whole: one that is missing would end the run when its row comes.

    Args:
        folder: what a relative `document_file` is relative to.
    """
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_dataset(part, f"{name}[{key!r}]", has_environment, folder)
        return
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, Sequence):
        return
    if not has_environment and "prompt" not in columns:
        if "document_file" in columns:
            raise DataError(
                f"{name} has a column 'document_file' and none named 'prompt', which says where "
                f"the text of the file belongs. Add one; {PLACEHOLDER!r} alone is the whole file."
            )
        if "prompt_ids" not in columns:
            raise DataError(
                f"{name} has columns {list(columns)} and none named 'prompt'. Rename the one that "
                "holds the prompt, for example dataset.rename_column('question', 'prompt'), or "
                "give token ids as 'prompt_ids'."
            )
    _check_column_types(getattr(dataset, "features", None) or {}, name)
    if isinstance(dataset, datasets.Dataset):
        _check_documents(dataset, name, folder)


def _check_column_types(features: Mapping[str, Any], name: str) -> None:
    ids = features.get("prompt_ids")
    element = str(getattr(getattr(ids, "feature", None), "dtype", ""))
    if ids is not None and not (element.startswith(("int", "uint")) or _is_empty(ids)):
        raise DataError(
            f"the column 'prompt_ids' of {name} has type {ids}. Give a flat list of whole numbers "
            "per row."
        )
    file = features.get("document_file")
    is_path = getattr(file, "dtype", "") in ("string", "large_string")
    if file is not None and not (is_path or _is_empty(file)):
        raise DataError(
            f"the column 'document_file' of {name} has type {file}. Give the path of one text file "
            "per row, or None."
        )


def _is_empty(feature: Any) -> bool:
    """Whether a column holds nothing that would show its type."""
    return "null" in (getattr(f, "dtype", "") for f in (feature, getattr(feature, "feature", None)))


def _check_documents(dataset: datasets.Dataset, name: str, folder: str | None) -> None:
    if "document_file" not in dataset.column_names:
        _warn_of_unused_placeholder(dataset, name)
        return
    column: Any = dataset.select_columns(["document_file"]).with_format("arrow")[:]
    files = [file for file in column.column(0).unique().to_pylist() if file is not None]
    paths = [document_path(file, folder, f"a row of {name}") for file in files]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        base = f"longstraw_document_dir={folder!r}" if folder else "the working directory"
        raise DataError(
            f"{len(missing):,} of the {len(files):,} files in the column 'document_file' of {name} "
            f"are not there, the first is {str(missing[0].absolute())!r}. Relative paths are "
            f"relative to {base}. Correct the paths, or set longstraw_document_dir to the folder "
            "of the files."
        )


def _warn_of_unused_placeholder(dataset: datasets.Dataset, name: str) -> None:
    if "prompt" not in dataset.column_names or not len(dataset):
        return
    if PLACEHOLDER in repr(dataset.select_columns(["prompt"]).with_format(None)[0]["prompt"]):
        logger.warning(
            f"The first prompt of {name} contains {PLACEHOLDER}, which stays as it is: no column "
            f"is named 'document_file' (columns: {dataset.column_names})."
        )


def check_processing_class(processing_class: Any) -> None:
    """Refuse processors of images."""
    if isinstance(processing_class, ProcessorMixin):
        raise ConfigError(
            f"the processing class is a multimodal processor ({type(processing_class).__name__}): "
            "images are not served yet. Pass the tokenizer "
            "(processing_class=processor.tokenizer) to train on text, or use TRL's own "
            "GRPOTrainer."
        )


def check_prompts(prompt_ids: Sequence[Sequence[int]]) -> None:
    """Raise if a tokenized prompt is empty."""
    for row, ids in enumerate(prompt_ids):
        if len(ids) == 0:
            raise DataError(
                f"the prompt of row {row} of the batch has no tokens: the first response token is "
                "predicted by the last prompt token, so at least one is needed. Filter empty "
                "prompts out, for example dataset.filter(lambda row: row['prompt'])."
            )


def checked_reward(
    function: Callable[..., Any], name: str, report: Callable[[Exception], None]
) -> Callable[..., Any]:
    """`function`, with errors for a wrong number of rewards and for what is no finite number.

    None stays what it is in TRL: this completion is not scored by this function.

    Args:
        report: given an error, also one that the function raises. The call then returns None for
            every completion, and whoever gave `report` raises when it is safe to.
    """

    def check(rewards: Any, completions: Sequence[Any]) -> list[Any]:
        values = _as_list(rewards)
        if values is None or len(values) != len(completions):
            found = type(rewards).__name__ if values is None else f"{len(values)} rewards"
            raise DataError(
                f"reward function {name!r} returned {found} for {len(completions)} completions. "
                "Return a list with one number (or None) per completion."
            )
        for index, reward in enumerate(values):
            if reward is not None and not _is_finite(reward):
                raise DataError(
                    f"reward function {name!r} returned {reward!r} for completion {index}. Return "
                    "a finite number, or None to leave this completion out of its group's baseline."
                )
        return values

    def unscored(error: Exception, completions: Sequence[Any]) -> list[None]:
        report(error)
        return [None] * len(completions)

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (the method, not whether it is callable)
    ):

        @functools.wraps(function, updated=())
        async def checked_async(*args: Any, **kwargs: Any) -> Any:
            try:
                return check(await function(*args, **kwargs), kwargs["completions"])
            except Exception as error:
                return unscored(error, kwargs["completions"])

        return checked_async

    @functools.wraps(function, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return check(function(*args, **kwargs), kwargs["completions"])
        except Exception as error:
            return unscored(error, kwargs["completions"])

    return checked


def _as_list(rewards: Any) -> list[Any] | None:
    """The items of a list, tuple, array, tensor, ...; None for what is no run of rewards."""
    if isinstance(rewards, (str, bytes, Mapping)):
        return None
    try:
        return list(rewards)
    except TypeError:  # not iterable; a tensor without dimensions is not either
        return None


def _is_finite(reward: Any) -> bool:
    try:
        return not isinstance(reward, str) and math.isfinite(float(reward))
    except (TypeError, ValueError, RuntimeError):  # no number; a tensor of several
        return False
