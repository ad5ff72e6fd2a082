"""`ResumableGRPOTrainer`: TRL's trainer with checkpoints that can be trusted.

Where files are written and when they count is in `checkpoints`; what is written beside TRL's own
files, in `run_state`.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import SaveStrategy, rotate_checkpoints
from trl import GRPOTrainer

from longstraw import ConfigError

from . import run_state
from .checkpoints import (
    STATE_FILE,
    CheckpointWriter,
    check_complete,
    check_world_size,
    describe,
    find_checkpoint,
    keeping_errors_of,
)
from .sequence_parallel import SequenceParallelGRPOTrainer

logger = logging.getLogger(__name__)


class ResumableGRPOTrainer(SequenceParallelGRPOTrainer):
    """`trl.GRPOTrainer` whose checkpoints hold all that the next step depends on.

    * A checkpoint gets its final name when every rank has written its part. Callbacks (`on_save`),
      uploads and rotation see it under that name.
    * A run resumed with the same number of processes is the uninterrupted one, also in the middle
      of a generation's use (`steps_per_generation`, `num_iterations`).
    """

    _writer: CheckpointWriter | None = None
    _resumed: dict[str, Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._update_count = _UpdateCount(self)
        self.add_callback(self._update_count)

    # ---------------------------------------------------------------- saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Collective. Raises `CheckpointError` on every rank if one cannot write."""
        args = self.args
        run_dir = super()._get_output_dir(trial)
        writer = CheckpointWriter(
            run_dir, self.state.global_step, args.process_index, is_owner=args.should_save
        )
        writer.start()
        with self._writing_to(writer):
            self._write(model, trial, writer, run_dir)
        writer.finish()
        final = os.path.join(run_dir, writer.final.name)
        if args.push_to_hub:
            self._push_from_checkpoint(final)
        if args.should_save:
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _write(self, model: nn.Module, trial: Any, writer: CheckpointWriter, run_dir: str) -> None:
        """All files of this rank; an error is left in `writer.error`."""
        best = self.state.best_global_step
        # Told of a best step, `Trainer` waits for all ranks, where one that failed does not arrive,
        # and writes down the path of the unfinished folder.
        self.state.best_global_step = None
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:
            if self.is_deepspeed_enabled:
                # The others may stand in one of DeepSpeed's barriers, where no word reaches them.
                # The end of this process ends their wait.
                raise writer.failure({writer.rank: describe(error)}) from error
            writer.error = writer.error or error
        finally:
            self.state.best_global_step = best
        with writer.keeping_error():
            if best:
                self._note_best_checkpoint(run_dir)
                if self.args.should_save:
                    self.state.save_to_json(str(writer.folder / "trainer_state.json"))
            if not self.args.save_only_model:
                self._save_run_state(writer)

    def _save_run_state(self, writer: CheckpointWriter) -> None:
        writer.folder.mkdir(parents=True, exist_ok=True)
        state = run_state.collect(self, self._update_count.micro_steps)
        torch.save(state, writer.folder / STATE_FILE.format(rank=writer.rank))
        name, is_sharded = run_state.reference_file(self)
        if name is not None and (is_sharded or self.args.should_save):
            tensors = [tensor.cpu() for tensor in run_state.reference_tensors(self)]
            torch.save(tensors, writer.folder / name)

    def _note_best_checkpoint(self, run_dir: str) -> None:
        """As `Trainer` does, under the name that the folder is going to have."""
        state = self.state
        path = os.path.join(run_dir, f"checkpoint-{state.best_global_step}")
        is_this_one = state.best_global_step == state.global_step
        if self.args.save_strategy != SaveStrategy.NO and (is_this_one or os.path.exists(path)):
            state.best_model_checkpoint = path

    @contextmanager
    def _writing_to(self, writer: CheckpointWriter) -> Iterator[None]:
        """Inside, what `Trainer` writes to the run's folder goes to the writer's."""
        with ExitStack() as undo:
            undo.callback(setattr, self, "_writer", None)
            self._writer = writer
            if self.is_deepspeed_enabled:
                engine: Any = self.model_wrapped
                undo.enter_context(keeping_errors_of(engine.checkpoint_engine, writer))
            yield

    def _get_output_dir(self, trial: Any) -> str:
        if self._writer is not None:
            return str(self._writer.run_dir)
        return super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._writer is None:  # else the folder is moved while the upload reads it
            super()._push_from_checkpoint(checkpoint_folder)

    # Under DeepSpeed ranks meet after these; a rank that raised in one would be waited for.

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        with self._keeping_error():
            super().create_model_card(*args, **kwargs)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        with self._keeping_error():
            super()._save(output_dir, state_dict)

    def _save_rng_state(self, output_dir: str) -> None:
        with self._keeping_error():
            super()._save_rng_state(output_dir)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._writer is not None:
                stack.enter_context(self._writer.keeping_error())
            yield

    # ---------------------------------------------------------------- resuming

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As `Trainer.train`; a checkpoint that does not fit this run is refused first.

        Raises:
            ConfigError: on every rank. There is no such checkpoint, it is incomplete, or it was
                written by another number of processes or with other batches.
        """
        path = None
        try:
            if resume_from_checkpoint:
                path = self._open_checkpoint(resume_from_checkpoint)
            return super().train(path, trial, ignore_keys_for_eval)
        finally:
            self._resumed = None

    def _open_checkpoint(self, asked: str | bool) -> str:
        """The folder to resume from, the same on every rank, with its state read."""
        path, error = "", None
        try:
            path = find_checkpoint(asked, str(self.args.output_dir))
            self._resumed = self._read_run_state(path)
        except Exception as found:  # raised when the other ranks know
            error = found
        own = (os.path.basename(os.path.normpath(path)), None if error is None else str(error))
        answers = gather_object([own])
        if error is not None:
            raise error
        for rank, (name, problem) in enumerate(answers):
            if problem is not None:
                raise ConfigError(f"rank {rank} cannot resume: {problem}")
            if name != own[0]:
                raise ConfigError(
                    f"rank {rank} would resume from {name}, rank {self.args.process_index} from "
                    f"{own[0]}: all need the same step. Give the path of a checkpoint that every "
                    "node has."
                )
        return path

    def _read_run_state(self, path: str) -> dict[str, Any] | None:
        """What `run_state` saved, or None for a checkpoint that another trainer wrote."""
        args = self.args
        name = STATE_FILE.format(rank=args.process_index)
        is_ours = any(entry.startswith("longstraw_state_") for entry in os.listdir(path))
        if is_ours or (self.is_deepspeed_enabled and not args.save_on_each_node):
            check_world_size(path, args.world_size)
        needed = ["latest"] if self.is_deepspeed_enabled else ["optimizer.pt", "scheduler.pt"]
        if is_ours:
            rng = "rng_state.pth" if args.world_size == 1 else f"rng_state_{args.process_index}.pth"
            reference, _ = run_state.reference_file(self)
            needed += [name, rng] if reference is None else [name, rng, reference]
        check_complete(path, needed)
        if not is_ours:
            self._warn_about_foreign(path)
            return None
        file = os.path.join(path, name)
        saved = torch.load(file, map_location="cpu", weights_only=True)
        run_state.check_geometry(saved, self, path)
        return saved

    def _warn_about_foreign(self, path: str) -> None:
        args = self.args
        state = TrainerState.load_from_json(os.path.join(path, "trainer_state.json"))
        micro_steps = state.global_step * args.gradient_accumulation_steps
        if run_state.is_within_generation(self, micro_steps):
            logger.warning(
                f"{path} has no {STATE_FILE.format(rank=args.process_index)}: TRL's own trainer "
                "wrote it, while the completions of a generation were in use. They are not in it. "
                "New ones are sampled from the weights of the checkpoint for the same prompts, "
                "later generations come after other steps than in the uninterrupted run, and "
                "metrics gathered since the last log are lost."
            )

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        # PEFT makes the adapters that it loads fp32. TRL has made those on quantized weights bf16.
        loaded = cast(nn.Module, self.model if model is None else model)
        dtypes = {n: p.dtype for n, p in loaded.named_parameters() if p.requires_grad}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        for name, parameter in loaded.named_parameters():
            if name in dtypes:
                parameter.data = parameter.data.to(dtypes[name])

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # `Trainer` makes the next step before it asks whether there should be one, so a finished
        # run that is resumed, as a scheduler's restart does, would be one step longer each time.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        if self._resumed is not None:
            # Each pass draws the next permutation; `Trainer` would begin again with the first.
            for _ in range(self._resumed["passes"]):
                next(iter(sampler), None)
        return sampler

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """`Trainer` restores last things here: after its counters, before the first micro-batch."""
        super()._load_rng_state(checkpoint)
        if self._resumed is None or checkpoint is None:
            return
        run_state.restore(self, self._resumed)
        self._update_count.micro_steps = self._step
        name, _ = run_state.reference_file(self)
        if name is not None:
            tensors = torch.load(os.path.join(checkpoint, name), weights_only=True, mmap=True)
            for tensor, saved in zip(run_state.reference_tensors(self), tensors, strict=True):
                tensor.copy_(saved)
        if self._resumed["passes"] and not hasattr(self.train_dataset, "__len__"):
            logger.warning(
                f"The dataset is a stream, and the checkpoint was written in pass "
                f"{self._resumed['passes'] + 1} over it: the resumed run begins that pass anew."
            )


class _UpdateCount(TrainerCallback):
    """Micro-steps up to the last optimizer step.

    Not `trainer._step`: a checkpoint asked for on SIGTERM may be written when the gradients of the
    next step are there and the step is not, and resuming repeats that step.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.micro_steps = 0

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.micro_steps = self.trainer._step
