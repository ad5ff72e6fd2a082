"""Device tensors that are kept until their copy to the host has run.

`Tensor.record_stream` would do it without a list, and give the memory back at a time nobody knows:
how long a prompt fits would then depend on the speed of the bus.
"""

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from .lanes import Event, Lane, Lanes

MAX_HELD_BYTES = 128 * 2**20
"""Most bytes of a chunk's own keys and values that wait for their copy."""


class Departures:
    """Sources of copies to the host, oldest first.

    A source is dropped when its copy has run, or when the compute lane has waited for it: what the
    compute lane allocates after that may lie there.

    Attributes:
        nbytes: bytes of the storages that are kept.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.nbytes = 0
        self._lanes = lanes
        self._held: deque[tuple[Event, tuple[Tensor, ...], int]] = deque()

    def hold(self, copied: Event, sources: Sequence[Tensor]) -> None:
        """Keep `sources` until `copied`."""
        by_storage = {source.untyped_storage().data_ptr(): source for source in sources}
        kept = tuple(by_storage.values())
        num_bytes = sum(source.untyped_storage().nbytes() for source in kept)
        self._held.append((copied, kept, num_bytes))
        self.nbytes += num_bytes

    def drop_copied(self) -> None:
        """Drop what has been copied by now."""
        while self._held and self._held[0][0].query():
            self._drop_oldest()

    def drop_behind(self, copied: Event | None) -> None:
        """Drop what was sent with this event or before: the compute lane has waited for it.

        So one chunk's keys and values are held at most, whatever the speed of the lanes.
        """
        if any(event is copied for event, _, _ in self._held):
            while self._drop_oldest() is not copied:
                pass

    def drop_above(self, num_bytes: int) -> None:
        """Let the compute lane wait for the oldest until at most `num_bytes` are held."""
        while self._held and self.nbytes > num_bytes:
            self._lanes.wait(Lane.COMPUTE, self._held[0][0])
            self._drop_oldest()

    def _drop_oldest(self) -> Event:
        event, sources, num_bytes = self._held.popleft()
        self._lanes.let_go(sources)
        self.nbytes -= num_bytes
        return event
