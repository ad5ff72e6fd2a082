"""Checkpoint folders: written whole or not at all, and looked at before they are loaded.

A checkpoint is written as `RUN/_unfinished/checkpoint-N` and moved to `RUN/checkpoint-N` when every
rank is done, so what bears its final name is complete. Knows files and ranks; knows nothing of what
is trained.
"""

import glob
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from longstraw import ConfigError, LongStrawError

# Uploads to the hub leave out names with a leading underscore, and rotation and resuming look for
# names that begin with "checkpoint-".
UNFINISHED = "_unfinished"
STATE_FILE = "longstraw_state_{rank}.pt"
_TRAINER_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
# What transformers' save on SIGTERM leaves in a folder that it did not finish.
_JIT_SENTINEL = "checkpoint-is-incomplete.txt"


class CheckpointError(LongStrawError, RuntimeError):
    """A checkpoint that could not be written; the ones before it are as they were."""


class CheckpointWriter:
    """One checkpoint on its way to its final name.

    `start` and `finish` are collective: each ends with every rank knowing whether every rank
    succeeded. Between them an error is kept with `keeping_error` rather than raised, so that the
    rank still takes part in what the others wait for.

    Attributes:
        folder: where the files are written.
        final: where they are when `finish` returns.
        run_dir: the folder that `folder` lies in, in place of the run's own.
        error: the first error of this rank.
    """

    def __init__(self, run_dir: str, step: int, rank: int, *, is_owner: bool) -> None:
        """
        Args:
            run_dir: holds the run's checkpoints.
            step: optimizer steps done.
            is_owner: this rank makes, moves and removes folders: one rank of each file system.
        """
        self.final = Path(run_dir, f"checkpoint-{step}")
        self.run_dir = Path(run_dir, UNFINISHED)
        self.folder = self.run_dir / self.final.name
        self.rank = rank
        self.is_owner = is_owner
        self.error: Exception | None = None

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        """Keep an error raised inside for the ranks' agreement."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def start(self) -> None:
        """Make an empty folder, without what an interrupted save may have left."""
        if self.is_owner:
            with self.keeping_error():
                if self.run_dir.exists():
                    shutil.rmtree(self.run_dir)
                self.folder.mkdir(parents=True)
        self._agree()

    def finish(self) -> None:
        """Give the folder its final name.

        Raises:
            CheckpointError: on every rank, if one of them could not write or move its part.
        """
        if self.error is None:
            with self.keeping_error():
                _flush(self.folder)
        self._agree()
        if self.is_owner:
            with self.keeping_error():
                if self.final.exists():  # an earlier run's checkpoint of the same step
                    self.final.rename(self.run_dir / "replaced")
                self.folder.rename(self.final)
                shutil.rmtree(self.run_dir, ignore_errors=True)
        self._agree()

    def failure(self, errors: dict[int, str]) -> CheckpointError:
        """The error to raise for `errors` by rank."""
        last = newest_checkpoint(self.final.parent)
        which = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
        way_on = (
            "There is no complete checkpoint before it."
            if last is None
            else f"The last complete checkpoint is {last}: resume_from_checkpoint={str(last)!r}."
        )
        return CheckpointError(
            f"{self.final} was not written, because writing {self.folder} failed on {which}. "
            f"{way_on} Make room, or whatever the error asks for, before training goes on; "
            "save_total_limit bounds how many checkpoints are kept."
        )

    def _agree(self) -> None:
        own = None if self.error is None else describe(self.error)
        errors = {rank: e for rank, e in enumerate(gather_object([own])) if e is not None}
        if not errors:
            return
        if self.is_owner:  # all ranks are past their writing; a full disk needs the room
            shutil.rmtree(self.run_dir, ignore_errors=True)
        raise self.failure(errors) from self.error


def describe(error: Exception) -> str:
    """Type and text of an error, as the other ranks are told."""
    return f"{type(error).__name__}: {error}"


def _flush(folder: Path) -> None:
    """Write through what the system still holds in memory.

    A full disk behind a network, or a quota, is reported only then; and a rename may reach the disk
    before the data do.
    """
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        with suppress(FileNotFoundError):  # another rank's file, which it has just renamed
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def keeping_errors_of(checkpoint_engine: Any, writer: CheckpointWriter) -> Iterator[None]:
    """Keep what DeepSpeed's `checkpoint_engine.save` raises inside the context.

    DeepSpeed's ranks meet in barriers between and after the files they write. A rank that raised on
    a full disk would leave the others in a barrier that it never reaches.
    """
    save = checkpoint_engine.save

    def save_or_keep(state_dict: Any, path: str, *args: Any, **kwargs: Any) -> None:
        try:
            save(state_dict, path, *args, **kwargs)
        except Exception as error:
            writer.error = writer.error or error
            with suppress(OSError):  # room for the small files that are still to come
                os.remove(path)

    checkpoint_engine.save = save_or_keep
    try:
        yield
    finally:
        del checkpoint_engine.save  # the method of its class again


# ---------------------------------------------------------------- before loading


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """The complete checkpoint of the highest step in `run_dir`."""
    complete = {step: path for step, path in _checkpoints(run_dir) if not _is_cut_short(path)}
    return complete[max(complete)] if complete else None


def find_checkpoint(asked: str | os.PathLike[str] | bool, run_dir: str) -> str:
    """The folder to resume from.

    Args:
        asked: a path, or True for the newest complete checkpoint in `run_dir`.

    Raises:
        ConfigError: there is none, or the path is no folder.
    """
    found = [path.name for _, path in _checkpoints(run_dir)]
    if asked is True:
        newest = newest_checkpoint(run_dir)
        if newest is None:
            beside = f" ({', '.join(found)}: incomplete)" if found else ""
            raise ConfigError(
                f"resume_from_checkpoint=True, and output_dir={run_dir!r} holds no complete "
                f"checkpoint{beside}. Leave resume_from_checkpoint out to start from the "
                "beginning, or give the path of a checkpoint folder."
            )
        return str(newest)
    path = str(asked)
    if not os.path.isdir(path):
        there = f"output_dir holds {', '.join(found)}" if found else "output_dir holds none"
        raise ConfigError(
            f"resume_from_checkpoint={path!r} is not a folder. Give the path of a checkpoint "
            f"({there}), or True for the newest one in output_dir."
        )
    return path


def _checkpoints(run_dir: str | Path) -> list[tuple[int, Path]]:
    paths = [path for path in Path(run_dir).glob("checkpoint-*") if path.is_dir()]
    named = [(_NAME.fullmatch(path.name), path) for path in paths]
    return sorted((int(match[1]), path) for match, path in named if match)


def _is_cut_short(path: Path) -> bool:
    # The trainer's state is written after the weights and the optimizer.
    return not (path / _TRAINER_STATE).is_file() or (path / _JIT_SENTINEL).exists()


def written_world_size(path: str) -> int | None:
    """How many processes wrote a checkpoint; None if its files do not tell."""
    states = sorted(glob.glob(os.path.join(glob.escape(path), STATE_FILE.format(rank="*"))))
    if states:
        return torch.load(states[0], map_location="cpu", weights_only=True, mmap=True)["world_size"]
    if os.path.isfile(os.path.join(path, "rng_state.pth")):
        return 1
    return len(glob.glob(os.path.join(glob.escape(path), "rng_state_*.pth"))) or None


def check_world_size(path: str, world_size: int) -> None:
    """Raise `ConfigError` if a checkpoint was written by another number of processes."""
    written = written_world_size(path)
    if written in (None, world_size):
        return
    raise ConfigError(
        f"{path} was written by {written} process(es), and this run has {world_size}: completions "
        "in use, random state and optimizer partitions belong to a process each. Launch with "
        f"--num_processes {written}, or {weights_only_start(path)}."
    )


def check_complete(path: str, needed: list[str]) -> None:
    """Raise `ConfigError` if a checkpoint lacks one of the files `needed` or one is cut short."""
    missing = [name for name in [_TRAINER_STATE, *needed] if not Path(path, name).exists()]
    # torch writes zip archives, whose table of contents comes last.
    broken = [
        name
        for name in needed
        if name.endswith((".pt", ".pth")) and name not in missing
        if not zipfile.is_zipfile(os.path.join(path, name))
    ]
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is cut short" for name in broken]
    if Path(path, _JIT_SENTINEL).exists():
        problems.append(f"{_JIT_SENTINEL} says that it was not finished")
    if not problems:
        return
    newest = newest_checkpoint(Path(path).parent)
    other = "" if newest in (None, Path(path)) else f" ({newest} has what training needs)"
    raise ConfigError(
        f"{path} cannot be resumed from: {', '.join(problems)}. It was interrupted, written with "
        "save_only_model=True, or written under another kind of launch (with or without "
        f"DeepSpeed). Resume from another checkpoint{other}, or {weights_only_start(path)}."
    )


def weights_only_start(path: str) -> str:
    """What to do with a checkpoint of which only the weights can be used, as part of a message."""
    advice = f"start a new run from its weights with model_name_or_path={path!r}"
    script = Path(path, "zero_to_fp32.py")
    if script.exists() and not any(Path(path).glob("*model*.safetensors")):
        return f"{advice}, after making them with `python {script} {path} {path}`"
    return advice
