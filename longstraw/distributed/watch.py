"""Which rank is missing, and what it was doing: asked when ranks stop answering or a signal comes.

Each rank writes where it is into the process group's store. When peers stop answering, those on
this machine are looked up in the process table, and the last place of all is told.
"""

import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LongStrawError, RankLostError

_PREFIX = "longstraw/rank"
_SECONDS_TO_DIE = 0.5


class RankWatch:
    """What this rank says of itself, and what it knows of the others.

    Without a process group it only remembers its own place.

    Attributes:
        place: what this rank is doing, in words.
        step: which optimizer step it is in, in words; part of every place from then on.
        rank, world_size: in the process group; 0 and 1 without one.
    """

    def __init__(self) -> None:
        self.place = "starting"
        self.step = ""
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_distributed else 0
        self.world_size = dist.get_world_size() if is_distributed else 1
        self._store: Any = None
        if self.world_size > 1:
            self._store = dist.distributed_c10d._get_default_store()
        self.at("starting")

    @property
    def store(self) -> Any:
        """The process group's store."""
        if self._store is None:
            raise RuntimeError("the store is gone, and with it the rank that kept it")
        return self._store

    def at(self, place: str) -> None:
        """Say where this rank is. Cheap: one small message to the store."""
        self.place = f"{place}, {self.step}" if self.step else place
        self.sign_of_life()

    def sign_of_life(self) -> None:
        """Say that this rank gets on, where it is."""
        if self._store is None:
            return
        entry = f"{time.time():.3f}|{os.getpid()}|{_machine()}|{socket.gethostname()}|{self.place}"
        try:
            self._store.set(f"{_PREFIX}{self.rank}", entry)
        except RuntimeError:
            self._store = None  # its host is gone, and with it what could be asked

    # ---------------------------------------------------------------- errors

    @contextmanager
    def blaming(self, what: str) -> Iterator[None]:
        """Turn a failure to reach others inside into a `RankLostError` that names the rank."""
        try:
            yield
        except LongStrawError:
            raise
        except RuntimeError as error:
            raise self.lost(what, error) from error

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Name the missing rank when a collective inside fails, the place when SIGTERM comes."""
        if self.world_size == 1:
            yield
            return
        with self._on_sigterm(), self.naming_the_lost():
            yield

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Name the missing rank when a collective inside fails."""
        try:
            yield
        except (LongStrawError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            if self.world_size == 1 or not _is_of_a_collective(error):
                raise
            raise self.lost("waiting", error) from error

    def lost(self, what: str, error: BaseException) -> RankLostError:
        """The error to raise when peers stopped answering."""
        # A killed process closes its connections before it is gone from the process table.
        deadline = time.monotonic() + _SECONDS_TO_DIE
        while not self.missing() and time.monotonic() < deadline:
            time.sleep(_SECONDS_TO_DIE / 50)
        reason = "".join(str(error).strip().split(". ")[0].splitlines()[:1])
        message = (
            f"rank {self.rank} was {what} in {self.place} when the other ranks stopped answering "
            f"({type(error).__name__}: {reason}).{self._describe_others()}\n  The step was given "
            "up. Look at the log of the missing rank (out of memory and a full disk are common "
            "causes), then start again from the last checkpoint."
        )
        # At once: a launcher that saw the same kills this process before its traceback is out.
        _say(message)
        return RankLostError(message)

    # ---------------------------------------------------------------- the others

    def missing(self) -> list[int]:
        """Ranks on this machine whose process is gone."""
        return [rank for rank, entry in self.others() if entry and _is_dead(entry)]

    def others(self) -> list[tuple[int, list[str]]]:
        """Each other rank's last entry: time, pid, machine, host, place; empty if unknown."""
        entries = []
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            entry: list[str] = []
            try:
                if self._store is not None and self._store.check([f"{_PREFIX}{rank}"]):
                    entry = self._store.get(f"{_PREFIX}{rank}").decode().split("|", 4)
            except RuntimeError:
                self._store = None
            entries.append((rank, entry))
        return entries

    def _describe_others(self) -> str:
        lines = []
        for rank, entry in self.others():
            if not entry:
                lines.append(f"\n  rank {rank}: nothing is known of it")
                continue
            when, pid, _, host, place = entry
            state = f"process {pid} on {host} is gone" if _is_dead(entry) else f"on {host}"
            age = time.time() - float(when)
            lines.append(f"\n  rank {rank}: {state}; last seen {age:.1f} s ago in {place}")
        return "".join(lines)

    # ---------------------------------------------------------------- signals

    @contextmanager
    def _on_sigterm(self) -> Iterator[None]:
        """Say where SIGTERM found this rank, then end as it asks.

        A launcher sends it to all other ranks when one has died, often before they notice. A
        handler that somebody else has set stays. A rank that waits for its device ends when that
        returns, or when the launcher loses patience (30 s for torchrun).
        """
        is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if not is_free or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._handler(signal.getsignal(signal.SIGTERM)))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _handler(self, before: Any) -> Callable[[int, Any], None]:
        owner = os.getpid()

        def end(number: int, frame: Any) -> None:
            signal.signal(number, before)
            if os.getpid() != owner:
                # A forked child (a pool of workers that is ended): not a rank, and its copy of the
                # store's connection is ours.
                os.kill(os.getpid(), number)
                return
            _say(f"rank {self.rank} was ended by SIGTERM in {self.place}.{self._describe_others()}")
            raise SystemExit(128 + number)

        return end


def _say(message: str) -> None:
    # Not logging: it may be set up for nothing, and takes locks that a signal can find held.
    print(f"LongStraw: {message}", file=sys.stderr, flush=True)  # noqa: T201


@functools.cache
def _machine() -> str:
    """Names what shares a process table: containers and machines can share a host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown, process {os.getpid()}"


def _is_dead(entry: list[str]) -> bool:
    """Whether the process is gone or a zombie; False for one of another machine."""
    _, pid, machine, *_ = entry
    if machine != _machine():
        return False
    try:
        # The third field, behind the name in parentheses, is the state.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _is_of_a_collective(error: RuntimeError) -> bool:
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out waiting")
    is_network = isinstance(error, dist.DistNetworkError | dist.DistBackendError)
    return is_network or any(word in str(error) for word in words)
