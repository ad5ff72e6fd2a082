"""Which rank is missing, and what it was doing: asked when a collective fails or a signal comes.

Each rank writes where it is into the process group's store. When peers stop answering, those on
this machine are looked up in the process table, and all are asked for their last word.
"""

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

import torch.distributed as dist

from ..errors import RankLostError

_PREFIX = "longstraw/rank"
_LOOK_AROUND_SECONDS = 1.0
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.05


class RankWatch:
    """What this rank says of itself, and what it knows of the others.

    Without a process group it only remembers its own place.

    Attributes:
        place: what this rank is doing, in words.
        step: which optimizer step it is in, in words; part of every place from then on.
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

    def at(self, place: str) -> None:
        """Say where this rank is. Cheap: one small message to the store."""
        self.place = f"{place}, {self.step}" if self.step else place
        self.sign_of_life()

    def sign_of_life(self) -> None:
        """Say that this rank gets on, where it is."""
        if self._store is None:
            return
        entry = f"{time.time():.3f}|{os.getpid()}|{socket.gethostname()}|{self.place}"
        try:
            self._store.set(f"{_PREFIX}{self.rank}", entry)
        except RuntimeError:
            self._store = None  # its host is gone, and with it what could be asked

    def meet(self, series: str, number: int, timeout_seconds: float) -> None:
        """Wait for every rank to come here, for as long as those that have not come get on.

        A collective's timeout would have to be longer than the slowest rank takes for the longest
        prompt; here it is the time without a sign of life. Collective.

        Args:
            series, number: name the meeting; numbers of a series count up.

        Raises:
            RankLostError: a rank is gone, or has not been anywhere new for that long.
        """
        if self._store is None:
            return
        arrived, gate = _meeting(series, number)
        with self.collective("waiting for the other ranks"):
            if self._store.add(arrived, 1) == self.world_size:
                self._store.set(gate, "")
                for key in _meeting(series, number - 1):  # whoever is here has left there
                    self._store.delete_key(key)
                return
            seen, since, pause = self._others(), time.monotonic(), _SHORTEST_PAUSE_SECONDS
            look_around = since + _LOOK_AROUND_SECONDS
            # Asked again and again, not waited for: a wait that times out writes to the log.
            while not self._store.check([gate]):
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                now = time.monotonic()
                if now < look_around:
                    continue
                look_around = now + _LOOK_AROUND_SECONDS
                if seen != (others := self._others()):
                    seen, since = others, now
                if self.missing():
                    raise RuntimeError("its process is gone")
                if now - since > timeout_seconds:
                    raise RuntimeError(f"no sign of life for {timeout_seconds:.0f} s")

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Turn the failure of a collective inside into a `RankLostError` that names the rank."""
        try:
            yield
        except RuntimeError as error:
            raise self.lost(what, error) from error

    def lost(self, what: str, error: BaseException) -> RankLostError:
        """The error to raise when peers stopped answering."""
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

    def missing(self) -> list[int]:
        """Ranks on this machine whose process is gone."""
        return [rank for rank, entry in self._others() if entry and _is_dead(entry)]

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Name the missing rank when anything inside fails because of it, or a SIGTERM comes."""
        with self._on_sigterm():
            try:
                yield
            except RankLostError:
                raise
            except RuntimeError as error:
                if not self.missing() and not _is_of_a_collective(error):
                    raise
                raise self.lost("waiting", error) from error

    # ---------------------------------------------------------------- the others

    def _others(self) -> list[tuple[int, list[str]]]:
        """Each other rank's last entry: time, pid, host, place; empty where nothing is known."""
        entries = []
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            entry: list[str] = []
            try:
                if self._store is not None and self._store.check([f"{_PREFIX}{rank}"]):
                    entry = self._store.get(f"{_PREFIX}{rank}").decode().split("|", 3)
            except RuntimeError:
                self._store = None
            entries.append((rank, entry))
        return entries

    def _describe_others(self) -> str:
        lines = []
        for rank, entry in self._others():
            if not entry:
                lines.append(f"\n  rank {rank}: nothing is known of it")
                continue
            when, pid, host, place = entry
            state = f"process {pid} on {host} is gone" if _is_dead(entry) else f"on {host}"
            age = time.time() - float(when)
            lines.append(f"\n  rank {rank}: {state}; last seen {age:.1f} s ago in {place}")
        return "".join(lines)

    # ---------------------------------------------------------------- signals

    @contextmanager
    def _on_sigterm(self) -> Iterator[None]:
        """Say where SIGTERM found this rank, then end as it asks.

        A launcher sends it to all other ranks when one has died, often before they notice.
        A handler that somebody else has set stays.
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
        def end(number: int, frame: Any) -> None:
            _say(f"rank {self.rank} was ended by SIGTERM in {self.place}.{self._describe_others()}")
            signal.signal(number, before)
            raise SystemExit(128 + number)

        return end


def _meeting(series: str, number: int) -> tuple[str, str]:
    return f"longstraw/{series}/{number}/arrived", f"longstraw/{series}/{number}/all"


def _say(message: str) -> None:
    # Not logging: it may be set up for nothing, and takes locks that a signal can find held.
    print(f"LongStraw: {message}", file=sys.stderr, flush=True)  # noqa: T201


def _is_dead(entry: list[str]) -> bool:
    """Whether the process is gone or a zombie; False for one of another machine."""
    _, pid, host, _ = entry
    if host != socket.gethostname():
        return False
    try:
        # The third field, behind the name in parentheses, is the state.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()
    except OSError:
        return False


def _is_of_a_collective(error: RuntimeError) -> bool:
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out waiting")
    return any(word in str(error) for word in words)
