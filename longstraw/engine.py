"""The engine: one GRPO update, its phases in order.

    capture -> score -> loss -> replay -> prompt backward     `accumulate`, once per micro-batch
    finalize                                                  `finalize`, once per optimizer step

`Engine.accumulate` is the update; what it calls stands below it in the same order. The engine knows
tensors and segments. The loss is a function it is given: it gets values of log-probs and entropies,
and its gradient with respect to them is all that the replays need.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .backends import Backend, TorchBackend
from .branches import Branch, grow_branches
from .captured import CapturedSegments
from .checks import check_backend
from .config import EngineConfig
from .distributed import LockStep, Pass, RankAxes, RankWatch, rank_axes
from .drift import PromptDriftMeter
from .errors import StalePromptStateError
from .gradient_gap import GradientGap
from .ledger import Ledger
from .members import GroupScores, MemberPasses
from .models import Decoder, PolicyVersion, RouterSums
from .passes import SegmentLoss, SegmentPasses
from .refresh import PromptRefresh
from .reports import FinalizeReport, UpdateReport, describe
from .segments import PromptGroup, Segment
from .state import PageStore, SegmentState

LossFunction = Callable[[list[GroupScores]], Tensor]


class Engine:
    """Runs updates of one model. Making one is collective where a process group exists.

    Args:
        model: a causal LM of a served family, or a PEFT model around one.
        config: see `EngineConfig`.
        autocast: makes the mixed-precision context for forwards.
        backend: how backwards are driven; see also `drive_with`.
        device: where the model will run, if it is not there yet.
        timeout_seconds: how long to wait for other ranks.

    Attributes:
        axes: which ranks share this one's prompts, and which have others.
        watch: knows where this rank and the others are.

    Raises:
        UnsupportedModelError, ConfigError: the model cannot be served; see `check_model`.

    Example:
        >>> engine = Engine(model, EngineConfig(chunk_size=1024))
        >>> group = PromptGroup(prompt_ids, completion_ids)
        >>> report = engine.accumulate([group], lambda scores: my_loss(scores[0].logps))
        >>> engine.finalize()
        >>> optimizer.step(), optimizer.zero_grad(), engine.weights_changed()
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig | None = None,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        backend: Backend | None = None,
        device: torch.device | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        self.config = config or EngineConfig()
        self.decoder = Decoder(
            model,
            allow_extrapolation=self.config.allow_extrapolation,
            autocast=autocast,
            fp32_head=self.config.fp32_head,
            cotangent_dtype=self.config.cotangent_dtype,
            device=device,
        )
        self.axes: RankAxes = rank_axes(self.config.sp_size, timeout_seconds)
        self.store = PageStore.from_config(self.config, self.decoder.device, self.axes.sequence)
        self.captured = CapturedSegments(self.store)
        self.refresh = PromptRefresh(self.decoder, self.captured, self.config)
        self.backend = backend or TorchBackend()
        self._timeout_seconds = timeout_seconds
        self._meet_ranks()
        self.ledger = Ledger(
            self.decoder.device, self.config.progress, lambda at: self.watch.at(at)
        )
        self._passes = SegmentPasses(
            self.decoder, self.store, self.backend, self.lockstep, self.config, self.axes.sequence
        )
        self._members = MemberPasses(
            self.decoder, self.captured, self._passes, self.ledger, self.config
        )
        self._gap = GradientGap()
        self._drift = PromptDriftMeter(
            lambda ids, keep: self._capture_run(ids, None, keep, with_adapters=True),
            self.captured,
            self._members,
            self.store,
            self.ledger,
        )
        self.drive_with(self.backend)

    def drive_with(self, backend: Backend) -> None:
        """Let `backend` drive backwards from now on. Collective.

        Raises:
            ConfigError: an option, or the model, asks for what this backend does not have.
        """
        check_backend(self.config, self.decoder, backend)
        if self.lockstep.world_size != RankWatch().world_size:
            self._meet_ranks()  # the process group is younger than this engine
        self.backend = backend
        self._passes.drive_with(backend, self.lockstep)

    def _meet_ranks(self) -> None:
        self.watch = RankWatch()
        self.lockstep = LockStep(
            timeout_seconds=self._timeout_seconds,
            watch=self.watch,
            shares_passes=self.config.sp_size > 1,
        )

    def describe(self) -> str:
        """One line on how this engine runs, for logs."""
        return describe(self.config, self.decoder, self.store, self.refresh, self.backend)

    # ---------------------------------------------------------------- the update

    def accumulate(self, groups: Sequence[PromptGroup], loss_of: LossFunction) -> UpdateReport:
        """Add the gradient of `loss_of` over these groups to what the backend accumulates.

        The loss may couple members and groups in any way. It is called once, with graph-free
        values that require grad; nothing of the model's graph exists meanwhile. To measure the
        prompts' drift it is called once more, without autograd. Collective: with
        several ranks all call this, the same number of times; those that share a prompt
        (`sp_size`) with the same groups and the same loss.

        Args:
            groups: prompts and responses. A prompt may come in several calls; its own backward
                runs with the call that says `is_complete`, or in `finalize`.
            loss_of: list of `GroupScores`, one per group in order -> scalar.

        Raises:
            MemoryPlanError: the state would exceed the budget.
            RanksAbortedError, RankLostError: another rank failed, or is gone.

        After an error nothing is left of what was accumulated since the last optimizer step.
        """
        parameters = self.decoder.trainable_parameters()
        fresh = drift = None
        with self.decoder.attached(), self._all_or_nothing():
            self.backend.begin_update(parameters)
            with self.lockstep.together("capture and scoring", has_passes=True):
                self._check_same(groups)
                states = self._capture_all(groups, for_backward=True)
                scores = [self._members.score(s, g) for s, g in zip(states, groups, strict=True)]
                age = max(map(self.captured.age, states), default=0)
            if self.config.log_prompt_drift:
                with self.lockstep.together("prompt drift", has_passes=True):
                    fresh = self._drift.score(groups, states)
            with self.lockstep.together("the loss", has_collectives=True):
                loss, losses = self._differentiate(loss_of, scores)
                if fresh is not None:
                    drift = self._drift.compare(groups, loss_of, (loss, scores), fresh)
            with self.lockstep.together("replay", has_passes=True):
                replayed = 0
                for state, group, cotangents in zip(states, groups, losses, strict=True):
                    self._check_fresh(state)
                    replayed += self._members.replay(state, group, cotangents)
                # After all replays: groups with the same prompt share its state. The last decides.
                for state, group in zip(states, groups, strict=True):
                    state.awaits_members = not group.is_complete
                for state in dict.fromkeys(states):
                    self._finish_prompt(state)
        total = sum(len(group.completion_ids) for group in groups)
        return UpdateReport(loss, replayed, total - replayed, age, drift)

    def finalize(self) -> FinalizeReport:
        """End the accumulation before the optimizer's step. Collective under data parallelism.

        Runs the prompt backwards that are still pending and averages gradients over ranks.
        """
        parameters = self.decoder.trainable_parameters()
        with self.decoder.attached(), self._all_or_nothing():
            self.backend.begin_update(parameters)
            with self.lockstep.together("prompt backward", has_passes=True):
                while pending := self.captured.pending():
                    self._run_prompt_backward(pending[0])
                if self.backend.needs_anchor and not self.backend.has_gradient:
                    # Nobody had an advantage: the optimizer still needs a gradient, of zeros.
                    self._passes.run_idle(Pass.BACKWARD)
            gap = None
            if self.config.log_gradient_gap:
                gap = self._gap.summarize(
                    parameters, self.config.prompt_gradient == "exact", self.axes.sequence
                )
            self.watch.at("reducing gradients")
            finalized = self.backend.finalize(parameters)
        return FinalizeReport(finalized.is_finite, gap)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An error inside forgets what was accumulated since the last optimizer step."""
        try:
            with self.watch.naming_the_lost():
                yield
        except BaseException:
            self.backend.discard(self.decoder.trainable_parameters())
            self._gap.forget()
            for state in self.captured.states():
                self.captured.drop(state)
            raise

    @contextmanager
    def weights_gathered(self) -> Iterator[None]:
        """Say that inside, passes need no other rank but those that share its prompts."""
        with self.backend.weights_gathered(self.config.sp_size), self.lockstep.suspended():
            yield

    def weights_changed(self) -> None:
        """Say that the optimizer took a step: captured state that is stale now is freed."""
        self.captured.end_step(keeps_unused=self.refresh.keeps_unused)
        self.refresh.drop_stale(self._weights)

    def release(self, prompt_ids: Tensor | None = None, *, only_new: bool = False) -> None:
        """Free the state of one prompt, or of all that wait for no backward.

        Args:
            only_new: of these, what was captured since the last optimizer step.
        """
        if prompt_ids is None:
            self.captured.drop_new() if only_new else self.captured.drop_unused()
            return
        held = self.refresh.find(prompt_ids.cpu(), self._weights)
        if held is not None:
            self.captured.release(held)

    # ---------------------------------------------------------------- 1. capture

    def capture(self, prompt_ids: Tensor, keep: Sequence[SegmentState] = ()) -> SegmentState:
        """The state of `prompt_ids[:-1]`, captured under the current weights if none is held.

        What it has in common with a held state is not run again; the rest continues that.

        Args:
            prompt_ids: `[P]` on the model's device.
            keep: states that are not dropped to make room.

        Raises:
            MemoryPlanError: the state would not fit.
        """
        self.decoder.check_positions(prompt_ids.numel())
        on_cpu = prompt_ids.cpu()
        held = self.refresh.find(on_cpu, self._weights)
        if held is not None:
            return held
        path = self.captured.path(on_cpu, self.policy_version)
        parent = path[-1] if path else None
        start = parent.segment.end if parent is not None else 0
        return self._capture_run(prompt_ids[start:-1], parent, keep)

    def _capture_run(
        self,
        token_ids: Tensor,
        parent: SegmentState | None,
        keep: Sequence[SegmentState] = (),
        *,
        with_adapters: bool = False,
    ) -> SegmentState:
        """The state of `token_ids` `[T]` behind `parent`; adapters are as the policy has them."""
        start = parent.segment.end if parent is not None else 0
        segment = Segment(token_ids[None], (token_ids.numel(),), start)
        kept = keep if parent is None else (*keep, parent)
        # What continues a prompt may turn out to be a part of responses, which have a backward.
        is_turn = parent is not None and not self.refresh.spans_steps
        has_backward = self.config.needs_prompt_backward or is_turn
        needed = self._passes.state_bytes(segment.num_tokens, keeps_boundaries=has_backward)
        self.captured.make_room(needed, kept)
        state = self._passes.new_state(
            segment,
            self.policy_version,
            parent,
            needs_cotangent=self.config.needs_prompt_backward,
            keeps_boundaries=has_backward,
        )
        # What is kept over steps is no part of a response, which other weights run.
        state.is_prompt = self.refresh.spans_steps
        adapters = nullcontext() if with_adapters else self.refresh.capturing()
        with ExitStack() as undo:
            undo.callback(state.free)
            with self.decoder.attached(), self.ledger.phase("capture", segment.num_tokens) as bar:
                with adapters:
                    self._passes.capture(state, bar)
            undo.pop_all()
        self.captured.hold(state)
        self.ledger.num_captures += 1
        self.ledger.note_state(self.store.peak_bytes)
        return state

    def capture_shared(self, prompts: Sequence[Tensor]) -> None:
        """Capture what several prompts begin with, so that it is run once for all of them.

        Runs of at least `min_shared_tokens` count. The rest of each prompt, captured later,
        continues them.

        Args:
            prompts: each `[P]` on the model's device.
        """
        version = self.policy_version
        prompts = [p for p in prompts if not self.refresh.is_settled(p.cpu(), self._weights)]
        branches = grow_branches(
            [prompt.cpu() for prompt in prompts],
            min_shared=self.config.min_shared_tokens,
            candidates=[s for s in self.captured.roots() if s.policy_version == version],
            held=lambda state: [
                s for s in self.captured.children(state) if s.policy_version == version
            ],
        )
        for branch in branches:
            self._capture_inner(branch, None, prompts)

    def _capture_inner(
        self, branch: Branch, parent: SegmentState | None, prompts: Sequence[Tensor]
    ) -> None:
        if not branch.is_inner:
            return
        state = branch.state
        if state is None or state.is_used_up:  # dropped to make room for another run of this plan
            run = prompts[branch.members[0]][branch.start : branch.stop]
            state = self._capture_run(run, parent)
            # Unless it is all that one of them captures, no members of its own will come.
            state.awaits_members = any(
                prompts[i].numel() - 1 == branch.stop for i in branch.members
            )
        for child in branch.children:
            self._capture_inner(child, state, prompts)

    @property
    def policy_version(self) -> PolicyVersion:
        """What a prompt's state captured now would be labelled with."""
        return self.refresh.label(self._weights)

    @property
    def _weights(self) -> PolicyVersion:
        """The weights of now, adapters included."""
        writes = self.backend.count_writes(self.decoder.trainable_parameters())
        return self.decoder.policy_version(self.captured.step, writes)

    def _capture_all(
        self, groups: Sequence[PromptGroup], *, for_backward: bool
    ) -> list[SegmentState]:
        """The states of all groups at once; with room for their cotangents if asked."""
        for group in groups:
            longest = max((ids.numel() for ids in group.completion_ids), default=0)
            self.decoder.check_positions(group.prompt_len + longest)
        if self.refresh.spans_steps:
            self.captured.run_members_with(self._weights)
        self.capture_shared([group.prompt_ids for group in groups])
        states: list[SegmentState] = []
        for group in groups:
            states.append(self.capture(group.prompt_ids, keep=states))
        for state in states:
            for before in state.lineage():
                before.is_prompt = True
                if not before.needs_cotangent:
                    before.drop_boundaries()
        runs: list[int] = []
        if for_backward and self.config.needs_prompt_backward:
            # What prompts share is in the lineage of each.
            lineage = {s for state in states for s in state.lineage()}
            runs = [s.segment.num_tokens for s in lineage if not s.has_cotangent]
        cotangents = sum(
            self._passes.state_bytes(run, with_cotangents=True) - self._passes.state_bytes(run)
            for run in runs
        )

        def needed() -> int:
            # Asked again after each drop: a turn that is dropped will be run with its members.
            beside = [
                self._members.state_bytes(state, group, for_backward)
                for state, group in zip(states, groups, strict=True)
            ]
            passing = max((passing for _, passing in beside), default=0)
            return cotangents + sum(shared for shared, _ in beside) + passing

        self.captured.drop_unused(lambda: self.store.fits(needed()), keep=states)
        what = (
            f"an update (cotangents of {sum(runs):,} prompt tokens, pages of the longest responses)"
        )
        self.store.require(needed(), what)
        return states

    # ---------------------------------------------------------------- 2. score

    def score(self, group: PromptGroup) -> GroupScores:
        """Log-probs and entropies of a group's responses, without a graph. Collective."""
        scoring = self.lockstep.together("scoring", has_passes=True)
        with self.watch.naming_the_lost(), self.decoder.attached(), scoring:
            self._check_same([group])
            (state,) = self._capture_all([group], for_backward=False)
            return self._members.score(state, group)

    # ---------------------------------------------------------------- 3. loss

    def _differentiate(
        self, loss_of: LossFunction, scores: list[GroupScores]
    ) -> tuple[Tensor, list[GroupScores]]:
        """The loss, and dL/dscores in the shape of the scores, times the ranks that share a prompt.

        The scale of a gradient, in one place. Let L_g be the loss of sequence group g's rows as the
        loss function gives it: with its normaliser, and divided by the accumulation steps. Every
        token is run by one rank j of the group, so the sum over its sp ranks of what they have
        accumulated is the group's gradient:

            dL_g = sum_j d_gj        wanted: 1/dp sum_g dL_g, as in a data-parallel trainer

        Backends take the mean over all dp * sp ranks, whatever their stage. Cotangents that are
        sp times as large make that 1/(dp sp) sum_gj sp d_gj, which is it. Nothing else scales.
        """
        leaves = [leaf.requires_grad_() for group in scores for leaf in group.leaves()]
        with self.ledger.phase("loss", 0), torch.enable_grad():
            loss = loss_of(scores)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        # The leader's: where an element is zero on one rank only, ranks would part ways.
        sequence = self.axes.sequence
        queue = iter([sequence.broadcast_(grad * sequence.size) for grad in grads])
        cotangents = []
        for group in scores:
            logps, entropies = next(queue), next(queue)
            router = group.router
            if router is not None:
                router = RouterSums(router.counts, next(queue), router.num_rows)
            cotangents.append(GroupScores(logps, entropies, router))
        return loss.detach(), cotangents

    # ---------------------------------------------------------------- 4. replay

    def _check_same(self, groups: Sequence[PromptGroup]) -> None:
        tensors = [ids for g in groups for ids in (g.prompt_ids, *g.completion_ids)]
        masks = [mask != 0 for g in groups for mask in g.loss_masks or ()]
        endings = torch.tensor([g.is_complete for g in groups])
        what = "prompts, responses or masks"
        self.axes.sequence.check_same([*tensors, *masks, endings], what)

    def _check_fresh(self, state: SegmentState) -> None:
        version = self._weights
        if not self.refresh.is_valid(state.policy_version, version):
            raise StalePromptStateError(
                f"prompt state was captured at {state.policy_version}, the policy is at {version}. "
                "A replay needs the weights of the capture. Capture again after changing weights "
                "(call Engine.weights_changed() after each optimizer step)."
            )

    # ---------------------------------------------------------------- 5. prompt backward

    def _finish_prompt(self, state: SegmentState) -> None:
        """Run the prompt's own backward, unless something is still to be replayed on it."""
        if state.awaits_members:
            return
        for child in self.captured.children(state):
            if child.is_inner and not self.captured.is_pending(child):
                self.captured.drop(child)  # of members without a gradient
        if self.captured.children(state):
            return
        parent = state.parent
        self._run_prompt_backward(state)
        if parent is not None:
            self._finish_prompt(parent)

    def _run_prompt_backward(self, state: SegmentState) -> None:
        """The prompt's own backward from what members and children left; its state is used up.

        State that the next steps may read has none, and stays.
        """
        if self.config.needs_prompt_backward and state.has_cotangent:
            self._check_fresh(state)
            loss = SegmentLoss(router_probs=state.router_cotangent)
            tokens = state.segment.token_ids.numel()
            with self._measuring_gap(), self.ledger.phase("prompt_backward", tokens) as bar:
                self._passes.backward(state, loss, bar)
        if state.is_prompt and self.refresh.spans_steps:
            state.router_cotangent = None  # it was held constant
        else:
            self.captured.drop(state)

    def _measuring_gap(self) -> AbstractContextManager[None]:
        if not self.config.log_gradient_gap:
            return nullcontext()
        keep = self.config.prompt_gradient == "exact"
        return self._gap.measuring(self.decoder.trainable_parameters(), keep)
