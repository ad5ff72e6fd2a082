"""What `GRPOTrainer` and `Trainer` hold between two optimizer steps and do not save.

A resumed run is the uninterrupted one if it has this, and what `Trainer` saves itself: weights,
optimizer, scheduler, random state, `TrainerState`. Captured prompts are not part of it; each
optimizer step makes them stale. Only plain values and tensors are written, so that a file can be
read with `weights_only=True`.
"""

from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from longstraw import ConfigError

from .checkpoints import weights_only_start

# How rows are cut into micro-batches and steps. With other values the completions in use, and the
# place in the data, would not fit.
_GEOMETRY = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "longstraw_sp_size",
)


def collect(trainer: GRPOTrainer, micro_steps: int) -> dict[str, Any]:
    """The state of this rank.

    Args:
        micro_steps: forward and backward passes up to the last optimizer step.
    """
    ledger = trainer.engine.ledger  # type: ignore[attr-defined]
    loss = trainer._tr_loss
    return {
        "world_size": trainer.args.world_size,
        "geometry": _geometry(trainer),
        # Which slice of the generated completions comes next, and when new ones are generated.
        "micro_steps": micro_steps,
        "completions": _slices_to_come(trainer, micro_steps),
        # Whole passes over the data; each is another permutation.
        "passes": int(trainer.state.epoch or 0),
        # Gathered since the last log.
        "metrics": {
            mode: {name: [float(v) for v in values] for name, values in metrics.items()}
            for mode, metrics in trainer._metrics.items()
        },
        "loss": loss.detach().cpu().clone(),
        "last_logged_step": trainer._globalstep_last_logged,
        "step_seconds": trainer._current_train_step_time,
        # Logged as totals since the start.
        "captures": ledger.num_captures,
        "state_bytes": ledger.state_bytes,
        "printed": _printed(trainer),
    }


def check_geometry(saved: dict[str, Any], trainer: GRPOTrainer, path: str) -> None:
    """Raise `ConfigError` if a run cuts its rows otherwise than the one that wrote `saved`."""
    here = _geometry(trainer)
    there = {"longstraw_sp_size": 1, **saved["geometry"]}  # 1 before it was written down
    changed = [name for name, value in there.items() if value != here[name]]
    if changed:
        then = ", ".join(f"{name}={there[name]}" for name in changed)
        now = ", ".join(f"{name}={here[name]}" for name in changed)
        raise ConfigError(
            f"{path} was written with {then}, and this run has {now}: its completions, its "
            "place in the data or its optimizer partitions would not fit. Resume with the "
            f"checkpoint's values, or {weights_only_start(path)}."
        )


def restore(trainer: GRPOTrainer, saved: dict[str, Any]) -> None:
    """Put `saved` back. Collective.

    To be called when `Trainer` has set up its own counters, before the first micro-batch.
    """
    device = trainer.accelerator.device
    trainer._step = saved["micro_steps"]
    slices = saved["completions"]
    trainer._buffered_inputs = None if slices is None else [_unpack(s, device) for s in slices]
    for mode, metrics in saved["metrics"].items():
        trainer._metrics[mode] = defaultdict(list, metrics)
    trainer._tr_loss = saved["loss"].to(device)
    # `train_loss` is the mean over the steps of this call; the first log brings earlier ones.
    gathered: Any = trainer.accelerator.gather(trainer._tr_loss)
    trainer._total_loss_scalar -= gathered.mean().item()
    trainer._globalstep_last_logged = saved["last_logged_step"]
    trainer._current_train_step_time = saved["step_seconds"]
    ledger = trainer.engine.ledger  # type: ignore[attr-defined]
    ledger.num_captures, ledger.state_bytes = saved["captures"], saved["state_bytes"]
    _restore_printed(trainer, saved["printed"])


def is_within_generation(trainer: GRPOTrainer, micro_steps: int) -> bool:
    """Whether the completions of the last generation are still in use after `micro_steps`."""
    return micro_steps % _generation_period(trainer) != 0


def _geometry(trainer: GRPOTrainer) -> dict[str, int | None]:
    # Stages of ZeRO partition the optimizer differently, and DeepSpeed does not say so.
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    stage = None if plugin is None else int(plugin.zero_stage)
    return {name: getattr(trainer.args, name) for name in _GEOMETRY} | {"zero_stage": stage}


def _generation_period(trainer: GRPOTrainer) -> int:
    """Micro-batches for which one generation is used."""
    args: Any = trainer.args
    return args.steps_per_generation * args.num_iterations


# ---------------------------------------------------------------- completions in use


def _slices_to_come(trainer: GRPOTrainer, micro_steps: int) -> list[Any] | None:
    """The generated completions by micro-batch, None for those that were used up.

    Nothing at all right before a generation, which is where most checkpoints are written.
    """
    slices, period = trainer._buffered_inputs, _generation_period(trainer)
    if slices is None or not is_within_generation(trainer, micro_steps):
        return None
    left = period - micro_steps % period
    to_come = {(micro_steps + i) % len(slices) for i in range(left)}
    return [_pack(part) if i in to_come else None for i, part in enumerate(slices)]


def _pack(value: Any) -> Any:
    """`value` on the CPU, equal neighbouring rows of tokens once.

    A group's rows hold the same prompt, and a prompt may have a million tokens.
    """
    if isinstance(value, Tensor):
        if value.ndim == 2 and value.numel() and not value.is_floating_point():
            rows, counts = torch.unique_consecutive(value, dim=0, return_counts=True)
            return {"rows": rows.cpu(), "counts": counts.cpu()}
        return value.detach().cpu().clone()  # not the whole storage that it may be a view of
    if isinstance(value, dict):
        return {"items": {key: _pack(item) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_pack(item) for item in value]
    return _plain(value)


def _unpack(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_unpack(item, device) for item in value]
    if isinstance(value, dict):
        if "items" in value:
            return {key: _unpack(item, device) for key, item in value["items"].items()}
        return value["rows"].repeat_interleave(value["counts"], dim=0).to(device)
    return value


# ---------------------------------------------------------------- the printed completions


def _printed(trainer: GRPOTrainer) -> dict[str, Any] | None:
    """The table of completions, where it is printed; prompts are in it as logs show them."""
    if not (trainer.log_completions and trainer.accelerator.is_main_process):
        return None
    return {key: _plain(column) for key, column in trainer._logs.items() if key != "images"}


def _restore_printed(trainer: GRPOTrainer, printed: dict[str, Any] | None) -> None:
    for key, column in (printed or {}).items():
        parts = column.items() if isinstance(column, dict) else [(None, column)]
        for name, values in parts:
            target = trainer._logs[key] if name is None else trainer._logs[key][name]
            target.clear()
            target.extend(values)


def _plain(value: Any) -> Any:
    """`value` out of types that `weights_only=True` reads; what else there is, as text."""
    if isinstance(value, Tensor) or type(value) in (type(None), bool, int, float, str):
        return value
    if isinstance(value, str):  # of a class of its own
        return str(value)
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # an array or a number of numpy
        return value.tolist()
    if hasattr(value, "__iter__"):
        return [_plain(item) for item in value]
    return str(value)


# ---------------------------------------------------------------- a reference that moves


def reference_file(trainer: GRPOTrainer) -> tuple[str | None, bool]:
    """The file of a reference model that training changes, and whether each rank has its own.

    Only `sync_ref_model` changes it; any other reference is loaded from where it came from.
    """
    args: Any = trainer.args
    if not args.sync_ref_model or trainer.ref_model is None:
        return None, False
    if any(_differs_by_rank(p) for p in _reference(trainer).parameters()):
        return f"longstraw_reference_{args.process_index}.pt", True
    return "longstraw_reference.pt", False


def _differs_by_rank(parameter: nn.Parameter) -> bool:
    """Whether ranks hold other parts of it: ZeRO-3's, or other experts (AutoEP's mark)."""
    return hasattr(parameter, "ds_tensor") or not getattr(parameter, "allreduce", True)


def reference_tensors(trainer: GRPOTrainer) -> list[Tensor]:
    """What this rank holds of the reference; under ZeRO-3 its partitions (`ds_tensor`)."""
    parameters = _reference(trainer).parameters()
    return [getattr(parameter, "ds_tensor", parameter).detach() for parameter in parameters]


def _reference(trainer: GRPOTrainer) -> nn.Module:
    return cast(nn.Module, trainer.ref_model)
