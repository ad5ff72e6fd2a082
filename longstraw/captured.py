"""The segments whose state is held: found by their tokens and the weights they were captured with.

Generation, scoring and replay meet here, so that tokens are captured once however a trainer slices
its batches, and however a conversation grows: what continues a held segment becomes its child.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .state import PageStore, SegmentState


@dataclass
class _Use:
    """When a state was captured and last asked for, in optimizer steps."""

    captured_step: int
    used_step: int


class CapturedSegments:
    """States of segments, least recently used first, as a forest.

    A state is *pending* when members or children were replayed and its own backward is still to
    come. Pending states, and those that others continue, are not dropped to make room.

    Attributes:
        step: optimizer steps so far; ages are counted in them.
    """

    def __init__(self, store: PageStore) -> None:
        self.step = 0
        self._store = store
        self._states: dict[SegmentState, _Use] = {}
        self._runs_version: object = None

    @property
    def peak_bytes(self) -> int:
        """Most bytes of state and cotangents that were held at a time."""
        return self._store.peak_bytes

    # ---------------------------------------------------------------- finding

    def path(self, token_ids: Tensor, version: object) -> list[SegmentState]:
        """The held states under `version` that `token_ids` runs through, roots first.

        Args:
            token_ids: 1-D, on the CPU. Its last token is in no state, see `find`.
        """
        path = self._walk(token_ids, version)
        self._touch(path)
        return path

    def find(self, token_ids: Tensor, version: object) -> SegmentState | None:
        """The state of `token_ids[:-1]` under `version`, if it is held. `token_ids` on the CPU."""
        if token_ids.numel() == 1:  # the state of no token
            empty = [s for s in self.roots() if s.segment.num_tokens == 0]
            path = [s for s in empty if s.policy_version == version][:1]
        else:
            path = self._walk(token_ids, version)
        if not path or path[-1].segment.end != token_ids.numel() - 1:
            return None
        self._touch(path)
        return path[-1]

    def _walk(self, token_ids: Tensor, version: object) -> list[SegmentState]:
        path: list[SegmentState] = []
        here = self.roots()
        start = 0
        while True:
            rest = token_ids[start:-1]
            fits = [
                s
                for s in here
                if s.policy_version == version and 0 < s.segment.num_tokens and _begins(s, rest)
            ]
            if not fits:
                return path
            path.append(max(fits, key=lambda s: s.segment.num_tokens))
            start, here = path[-1].segment.end, self.children(path[-1])

    def roots(self) -> list[SegmentState]:
        """States that begin a sequence."""
        return [state for state in self._states if state.parent is None]

    def children(self, state: SegmentState) -> list[SegmentState]:
        """Held states that continue `state`."""
        return [other for other in self._states if other.parent is state]

    def states(self) -> list[SegmentState]:
        """All of them; one comes after all that continue it."""
        return sorted(self._states, key=lambda state: -state.depth)

    def pending(self) -> list[SegmentState]:
        """States that wait for their own backward, in the order in which they may have it."""
        return [state for state in self.states() if state.has_cotangent]

    def is_pending(self, state: SegmentState) -> bool:
        """Whether it, or anything that continues it, waits for its own backward."""
        return state.has_cotangent or any(self.is_pending(c) for c in self.children(state))

    def age(self, state: SegmentState) -> int:
        """Optimizer steps since the oldest part of what a reader of `state` sees was captured."""
        return self.step - min(self._states[s].captured_step for s in state.lineage())

    # ---------------------------------------------------------------- holding

    def hold(self, state: SegmentState) -> None:
        """Keep a captured segment until it is dropped."""
        assert state.parent is None or state.parent in self._states
        if self._runs_version is not None and not state.is_prompt:
            state.policy_version = self._runs_version
        self._states[state] = _Use(self.step, self.step)

    def run_members_with(self, version: object) -> None:
        """Say which weights members' own runs are of from now on, whatever their prompts' are.

        Runs of other weights are dropped. Only for prompts that are marked `is_prompt` as they are
        captured; what is not a prompt is then a run of members.
        """
        self._runs_version = version
        for state in self.states():
            if not state.is_prompt and state.policy_version != version:
                self.drop(state)

    def end_step(self, *, keeps_unused: bool) -> None:
        """Count an optimizer step; of prompts, free those that it has not asked for.

        Args:
            keeps_unused: leave those until their room is needed.
        """
        for state in self.states():
            if not keeps_unused and self._states[state].used_step < self.step:
                self.drop(state)
        self.step += 1

    def drop(self, state: SegmentState) -> None:
        """Free a state, and all that continue it: they cannot be read without it."""
        for child in self.children(state):
            self.drop(child)
        state.free()
        self._states.pop(state, None)

    def drop_unused(
        self,
        is_wanted: Callable[[], bool] = lambda: False,
        keep: Sequence[SegmentState] = (),
    ) -> None:
        """Drop states that can be captured again, oldest first, until `is_wanted`."""
        while not is_wanted():
            unused = next((s for s in self._states if self._is_unused(s, keep)), None)
            if unused is None:
                return
            self.drop(unused)

    def drop_new(self) -> None:
        """Drop what was captured since the last optimizer step and can be captured again."""
        old = [s for s, use in self._states.items() if use.captured_step < self.step]
        self.drop_unused(keep=old)

    def make_room(self, num_bytes: int, keep: Sequence[SegmentState] = ()) -> None:
        """Drop states that can be captured again until `num_bytes` more fit."""
        self.drop_unused(lambda: self._store.fits(num_bytes), keep)

    def release(self, state: SegmentState) -> None:
        """Drop a state with what continues it, and what only led to it, unless it is pending."""
        if self.is_pending(state):
            return
        parent = state.parent
        self.drop(state)
        if parent is not None and not parent.has_cotangent and not self.children(parent):
            self.release(parent)

    def _is_unused(self, state: SegmentState, keep: Sequence[SegmentState]) -> bool:
        is_kept = any(state is kept for kept in keep)
        return not (is_kept or state.has_cotangent or self.children(state))

    def _touch(self, path: Sequence[SegmentState]) -> None:
        for state in path:
            use = self._states.pop(state)
            use.used_step = self.step
            self._states[state] = use


def _begins(state: SegmentState, token_ids: Tensor) -> bool:
    tokens = state.tokens_on_cpu
    return tokens.numel() <= token_ids.numel() and torch.equal(tokens, token_ids[: tokens.numel()])
