"""The members of a group on their captured prompt: scored, and replayed.

Members are cut into the runs that several of them share and the rests of their own
(`branches.py`): a shared run is a segment between the prompt and its members, captured once, and
its backward comes after theirs. What a rollout has captured of a conversation is found here and
run neither for the first nor for the second time.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from .branches import Branch, grow_branches
from .captured import CapturedSegments
from .config import EngineConfig
from .ledger import Ledger
from .models import Decoder, RouterSums, TokenCotangents
from .passes import SegmentLoss, SegmentPasses
from .segments import PromptGroup, Segment, right_pad
from .state import SegmentState


@dataclass(frozen=True)
class GroupScores:
    """Values of one group's members, right-padded with zeros.

    Attributes:
        logps: `[G, R]`, log-probability of each response token.
        entropies: `[G, R]`, entropy of the distribution it was drawn from.
        router: routing sums `[G, X]` of each member's prompt and response, or None.
    """

    logps: Tensor
    entropies: Tensor
    router: RouterSums | None = None

    def leaves(self) -> list[Tensor]:
        """The tensors a loss may differentiate."""
        return [self.logps, self.entropies] + ([self.router.probs] if self.router else [])

    def cotangents(self, rows: Sequence[Branch], num_tokens: int) -> TokenCotangents:
        """These as dL/dscores, for runs as rows of one segment: summed over who shares a run."""
        has_entropies = bool(self.entropies.any())
        return TokenCotangents(
            _sum_over_members(self.logps, rows, num_tokens),
            _sum_over_members(self.entropies, rows, num_tokens) if has_entropies else None,
        )


class MemberPasses:
    """Scores and replays groups against what is captured."""

    def __init__(
        self,
        decoder: Decoder,
        captured: CapturedSegments,
        passes: SegmentPasses,
        ledger: Ledger,
        config: EngineConfig,
    ) -> None:
        self._decoder = decoder
        self._captured = captured
        self._passes = passes
        self._ledger = ledger
        self._config = config

    def state_bytes(
        self, state: SegmentState, group: PromptGroup, for_backward: bool
    ) -> tuple[int, int]:
        """State that a group needs beside its prompt's.

        Returns:
            What is held from scoring to replay (shared runs), and what exists only while one batch
            of responses is run: its own state if it is longer than a chunk, and for a backward the
            cotangents of the runs on its way.
        """
        branches = self._branches(state, group, range(len(group.completion_ids)))
        runs = [run for branch in branches for run in branch.walk()]
        state_bytes = self._passes.state_bytes
        shared = sum(state_bytes(r.num_tokens) for r in runs if r.is_inner and r.state is None)
        size = self._config.chunk_size
        longest = max((run.num_tokens for run in runs if not run.is_inner), default=0)
        # Without a limit only responses within a chunk are run together, and these keep nothing.
        rows = self._config.replay_batch or 1
        kept = (max(longest - 1, 0) // size) * size
        passing = state_bytes(kept, with_cotangents=for_backward, num_rows=rows)
        if for_backward:
            way = max((branch.longest_inner_path for branch in branches), default=0)
            passing += state_bytes(way, with_cotangents=True) - state_bytes(way)
        return shared, passing

    # ---------------------------------------------------------------- score

    def score(self, state: SegmentState, group: PromptGroup) -> GroupScores:
        """Log-probs and entropies of a group's responses, without a graph."""
        num_members = len(group.completion_ids)
        width = max((ids.numel() for ids in group.completion_ids), default=0)
        dtype = torch.float64 if self._decoder.base.dtype == torch.float64 else torch.float32
        logps = torch.zeros(num_members, width, dtype=dtype, device=self._decoder.device)
        sheet = _Sheet(logps, torch.zeros_like(logps), {})
        branches = self._branches(state, group, range(num_members))
        self._score_below(state, branches, group, sheet)
        router = [sheet.router[i] for i in range(num_members)] if sheet.router else None
        return GroupScores(sheet.logps, sheet.entropies, RouterSums.cat(router) if router else None)

    def _score_below(
        self,
        parent: SegmentState,
        branches: Sequence[Branch],
        group: PromptGroup,
        sheet: "_Sheet",
    ) -> None:
        for rows in self._batches(branches):
            self._score_segment(parent, rows, group, sheet)
        for branch in branches:
            if branch.is_inner:
                state = branch.state
                if state is None:
                    state = self._score_segment(parent, [branch], group, sheet, keep=True)
                else:
                    self._score_segment(parent, [branch], group, sheet)
                state.is_inner = True
                self._score_below(state, branch.children, group, sheet)
        if len(branches) > 1:
            sheet.agree_at_parting(branches, group)

    def _score_segment(
        self,
        parent: SegmentState,
        rows: Sequence[Branch],
        group: PromptGroup,
        sheet: "_Sheet",
        *,
        keep: bool = False,
    ) -> SegmentState:
        segment, targets = _segment(parent, rows, group)
        state = self._passes.new_state(segment, parent.policy_version, parent, needs_cotangent=keep)
        with ExitStack() as undo:
            undo.callback(state.free)
            with self._ledger.phase("score", segment.token_ids.numel()) as bar:
                scores = self._passes.score(state, targets, bar, keep=keep)
            if keep:
                undo.pop_all()
                self._hold(state)
        for row, branch in enumerate(rows):
            sheet.write(branch, scores.logps[row], scores.entropies[row])
        if state.router is not None and not keep:
            sheet.write_router(rows, state)
        return state

    # ---------------------------------------------------------------- replay

    def replay(self, state: SegmentState, group: PromptGroup, cotangents: GroupScores) -> int:
        """Backward of each member that has a gradient; returns how many had.

        Args:
            cotangents: dL/dscores, in the shape of the scores.
        """
        needed = cotangents.logps.ne(0).any(1) | cotangents.entropies.ne(0).any(1)
        if cotangents.router is not None:
            probs = cotangents.router.probs
            needed = needed | probs.ne(0).any(1)
            # Every member's sums contain the prompt's once, so that gets the sum of cotangents.
            for before in state.lineage():
                _add_router_cotangent(before, probs.sum(0, keepdim=True))
        members = [i for i, is_needed in enumerate(needed.tolist()) if is_needed]
        self._replay_below(state, self._branches(state, group, members), group, cotangents)
        return len(members)

    def _replay_below(
        self,
        parent: SegmentState,
        branches: Sequence[Branch],
        group: PromptGroup,
        cotangents: GroupScores,
    ) -> None:
        for rows in self._batches(branches):
            segment, targets = _segment(parent, rows, group)
            state = self._passes.new_state(
                segment, parent.policy_version, parent, needs_cotangent=True
            )
            loss = _loss(rows, segment, targets, cotangents)
            with ExitStack() as undo:
                undo.callback(state.free)
                with self._ledger.phase("replay", segment.token_ids.numel()) as bar:
                    self._passes.capture(state, bar, but_last=True)
                    self._passes.backward(state, loss, bar)
            self._ledger.note_state(self._captured.peak_bytes)
        for branch in branches:
            if branch.is_inner:
                self._replay_inner(parent, branch, group, cotangents)

    def _replay_inner(
        self,
        parent: SegmentState,
        branch: Branch,
        group: PromptGroup,
        cotangents: GroupScores,
    ) -> None:
        """What follows a shared run, then the run itself."""
        segment, targets = _segment(parent, [branch], group)
        state = branch.state or self._capture(parent, segment)
        state.keep_cotangents()
        self._replay_below(state, branch.children, group, cotangents)
        loss = _loss([branch], segment, targets, cotangents)
        with self._ledger.phase("replay", segment.num_tokens) as bar:
            self._passes.backward(state, loss, bar)
        assert not any(self._captured.is_pending(s) for s in self._captured.children(state))
        self._captured.drop(state)

    def _capture(self, parent: SegmentState, segment: Segment) -> SegmentState:
        """A shared run that was dropped since it was scored, or that only those replayed share."""
        state = self._passes.new_state(segment, parent.policy_version, parent, needs_cotangent=True)
        with ExitStack() as undo:
            undo.callback(state.free)
            with self._ledger.phase("capture", segment.num_tokens) as bar:
                self._passes.capture(state, bar)
            undo.pop_all()
        self._hold(state)
        return state

    # ---------------------------------------------------------------- runs

    def _branches(
        self, state: SegmentState, group: PromptGroup, members: Sequence[int]
    ) -> tuple[Branch, ...]:
        return grow_branches(
            [group.sequence(i).cpu() for i in range(len(group.completion_ids))],
            members=members,
            min_shared=self._config.min_shared_tokens,
            run_last=self._config.router_statistics,  # its routing counts, its output does not
            candidates=self._turns_after(state),
            held=self._turns_after,
        )

    def _turns_after(self, state: SegmentState) -> list[SegmentState]:
        """Captured segments that may be a part of responses.

        Not those of other prompts, although their tokens may be the same: a part of a response is
        used up with it, and a prompt waits for members of its own.
        """
        return [s for s in self._captured.children(state) if not s.is_prompt]

    def _batches(self, branches: Sequence[Branch]) -> list[list[Branch]]:
        """The ends of members, in order, as many at a time as are run together.

        By default as many as have half the tokens of a chunk, padding included. Their graph has the
        last layer and the head, which a chunk of the prompt has not, and is still the smaller one;
        and pages are visited once for all of them.
        """
        batches: list[list[Branch]] = []
        for branch in branches:
            if branch.is_inner:
                continue
            together = [*batches[-1], branch] if batches else []
            if together and self._fits_one_pass(together):
                batches[-1] = together
            else:
                batches.append([branch])
        return batches

    def _fits_one_pass(self, rows: Sequence[Branch]) -> bool:
        limit = self._config.replay_batch
        if limit is not None:
            return len(rows) <= limit
        return 2 * len(rows) * max(row.num_tokens for row in rows) <= self._config.chunk_size

    def _hold(self, state: SegmentState) -> None:
        self._captured.hold(state)
        self._ledger.num_captures += 1
        self._ledger.note_state(self._captured.peak_bytes)


@dataclass(frozen=True)
class _Sheet:
    """The scores of a group while they are written, run by run."""

    logps: Tensor
    entropies: Tensor
    router: dict[int, RouterSums]

    def write(self, branch: Branch, logps: Tensor, entropies: Tensor) -> None:
        columns = slice(branch.start, min(branch.stop, self.logps.shape[1]))
        num_tokens = columns.stop - columns.start
        for member in branch.members:
            self.logps[member, columns] = logps[:num_tokens]
            self.entropies[member, columns] = entropies[:num_tokens]

    def write_router(self, rows: Sequence[Branch], state: SegmentState) -> None:
        """The sums over a member's whole way, for members that end with `state`."""
        total = state.router
        for before in state.lineage():
            if before is not state and before.router is not None:
                total = before.router + total
        total = total.detach()
        for row, branch in enumerate(rows):
            for member in branch.members:
                self.router[member] = RouterSums(
                    total.counts[row : row + 1],
                    total.probs[row : row + 1],
                    total.num_rows[row : row + 1],
                )

    def agree_at_parting(self, branches: Sequence[Branch], group: PromptGroup) -> None:
        """Where members part they share one distribution, but it was run with each of them.

        It comes out with other last bits, and a threshold on entropies that falls on it would
        split the group.
        """
        column = branches[0].start
        members = [i for branch in branches for i in branch.members]
        members = [i for i in members if group.has_score(i, column)]
        if members:
            self.entropies[members, column] = self.entropies[members[0], column].clone()


def _segment(
    parent: SegmentState, rows: Sequence[Branch], group: PromptGroup
) -> tuple[Segment, Tensor]:
    """Runs as rows of one right-padded segment, and their targets `[B, T]`, -1 for none."""
    runs = [(branch.members, slice(branch.start, branch.stop)) for branch in rows]
    token_ids = [group.sequence(members[0])[run] for members, run in runs]
    lengths = tuple(ids.numel() for ids in token_ids)
    segment = Segment(right_pad(token_ids), lengths, start=parent.segment.end)
    targets = [group.targets(members, run) for members, run in runs]
    return segment, right_pad(targets, value=-1, num_tokens=segment.num_tokens)


def _loss(
    rows: Sequence[Branch], segment: Segment, targets: Tensor, cotangents: GroupScores
) -> SegmentLoss:
    router = cotangents.router
    return SegmentLoss(
        targets,
        cotangents.cotangents(rows, segment.num_tokens),
        None
        if router is None
        else torch.stack([router.probs[list(branch.members)].sum(0) for branch in rows]),
    )


def _sum_over_members(scores: Tensor, rows: Sequence[Branch], num_tokens: int) -> Tensor:
    """Columns of each run, `[B, num_tokens]`, zero behind its end."""
    return right_pad(
        [scores[list(branch.members), branch.start : branch.stop].sum(0) for branch in rows],
        num_tokens=num_tokens,
    )


def _add_router_cotangent(state: SegmentState, cotangent: Tensor) -> None:
    held = state.router_cotangent
    state.router_cotangent = cotangent if held is None else held + cotangent
