"""The prompts whose state is held: found by their tokens and the weights they were captured with.

Generation, scoring and replay of one prompt meet here, so that it is captured once however a
trainer slices its batches.
"""

import hashlib
from collections import OrderedDict

import torch
from torch import Tensor

from .state import PageStore, SegmentState

Key = tuple[int, bytes, object]


class CapturedPrompts:
    """States of prompts, least recently used first.

    A state with cotangents is *pending*: members were replayed and the prompt's own backward is
    still to come. Pending states are never dropped to make room.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._states: OrderedDict[Key, tuple[Tensor, SegmentState]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def find(self, prompt_ids: Tensor, version: object) -> SegmentState | None:
        """The state of `prompt_ids[:-1]` under `version`, if it is held."""
        key = _key(prompt_ids[:-1], version)
        if key not in self._states:
            return None
        self._states.move_to_end(key)
        return self._states[key][1]

    def find_prefix(self, token_ids: Tensor, version: object) -> SegmentState | None:
        """The longest held state under `version` whose tokens properly begin `token_ids`."""
        best: SegmentState | None = None
        for ids, state in self._states.values():
            n = ids.numel()
            if state.policy_version != version or not 0 < n < token_ids.numel():
                continue
            is_longer = best is None or n > best.segment.num_tokens
            if is_longer and torch.equal(ids, token_ids[:n]):
                best = state
        return best

    def hold(self, state: SegmentState) -> None:
        """Keep a captured prompt until it is dropped."""
        ids = state.segment.token_ids[0]
        key = _key(ids, state.policy_version)
        assert key not in self._states, "a prompt was captured twice under the same weights"
        self._states[key] = (ids, state)

    def drop(self, state: SegmentState) -> None:
        """Free one state."""
        state.free()
        self._states = OrderedDict(
            (key, held) for key, held in self._states.items() if held[1] is not state
        )

    def drop_stale(self, version: object) -> None:
        """Free every state of other weights."""
        for state in self.states():
            if state.policy_version != version:
                self.drop(state)

    def pending(self) -> list[SegmentState]:
        """States that wait for their prompt's backward."""
        return [state for state in self.states() if state.has_cotangent]

    def states(self) -> list[SegmentState]:
        return [state for _, state in self._states.values()]

    def make_room(self, num_bytes: int, keep: tuple[SegmentState, ...] = ()) -> None:
        """Drop states that can be captured again until `num_bytes` more fit."""
        for state in self.states():
            if self._store.fits(num_bytes):
                return
            if not state.has_cotangent and all(state is not kept for kept in keep):
                self.drop(state)


def _key(token_ids: Tensor, version: object) -> Key:
    # With the version: a reference adapter's state of a prompt stands beside the policy's.
    data = token_ids.to("cpu", torch.int64).contiguous().numpy().tobytes()
    return token_ids.numel(), hashlib.blake2b(data, digest_size=16).digest(), version
