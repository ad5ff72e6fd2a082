"""Ranks that wait for each other and exchange a word, through the process group's store.

Not by a collective: it would need a group of its own over another network than the GPUs', and a
timeout longer than the slowest rank takes for the longest prompt. Here a rank is waited for as long
as it gives signs of life.
"""

import json
import time

import torch.distributed as dist

from .watch import RankWatch

_LOOK_AROUND_SECONDS = 1.0
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0002, 0.05
_PAUSE_PART = 0.05  # of the time waited so far


class Meeting:
    """A place where all ranks come the same number of times.

    Args:
        name: the same on every rank, and of no other meeting.
        timeout_seconds: how long to wait for a rank without a sign of life.
        watch: knows the other ranks.
    """

    def __init__(self, name: str, timeout_seconds: float, watch: RankWatch) -> None:
        self.timeout_seconds = timeout_seconds
        self.watch = watch
        self._name = f"longstraw/{name}"
        self._number = 0

    def exchange(self, word: str) -> list[str]:
        """The words of all ranks, by rank. Collective.

        Raises:
            RankLostError: a rank is gone, or gave no sign of life for too long.
        """
        if self.watch.world_size == 1:
            return [word]
        with self.watch.blaming("waiting for the other ranks"):
            return self._exchange(self.watch.store, word)

    def _exchange(self, store: dist.Store, word: str) -> list[str]:
        self._number += 1
        arrived, gate = self._keys(self._number)
        # Written over at the next meeting, which nobody enters before the gate of this one is open.
        store.set(f"{self._name}/{self.watch.rank}", word)
        if store.add(arrived, 1) < self.watch.world_size:
            self._wait(store, gate)
            return json.loads(store.get(gate))
        ranks = range(self.watch.world_size)
        words = [store.get(f"{self._name}/{rank}").decode() for rank in ranks]
        store.set(gate, json.dumps(words))
        for key in self._keys(self._number - 1):  # whoever is here has left there
            store.delete_key(key)
        return words

    def _wait(self, store: dist.Store, gate: str) -> None:
        """Until the gate is open. Asked for again and again: a wait that times out logs."""
        begin = moved = time.monotonic()
        others, look_around = self.watch.others(), begin + _LOOK_AROUND_SECONDS
        while not store.check([gate]):
            now = time.monotonic()
            pause = _PAUSE_PART * (now - begin)
            time.sleep(min(max(pause, _SHORTEST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS))
            if now < look_around:
                continue
            look_around = now + _LOOK_AROUND_SECONDS * max(1, self.watch.world_size / 16)
            if others != (others := self.watch.others()):
                moved = now
            if self.watch.missing() and not store.check([gate]):
                raise RuntimeError("its process is gone")
            if now - moved > self.timeout_seconds:
                raise RuntimeError(f"no sign of life for {self.timeout_seconds:.0f} s")

    def _keys(self, number: int) -> tuple[str, str]:
        return f"{self._name}/{number}/arrived", f"{self._name}/{number}/words"
