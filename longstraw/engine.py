"""The engine: one GRPO update, its phases in order.

    capture -> score -> loss -> replay -> prompt backward     `accumulate`, once per micro-batch
    finalize                                                  `finalize`, once per optimizer step

`Engine.accumulate` is the update; what it calls stands below it in the same order. The engine knows
tensors and segments. The loss is a function it is given: it gets values of log-probs and entropies,
and its gradient with respect to them is all that the replays need.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longstraw_kernels.page_attention import available_impl

from .backends import Backend, TorchBackend
from .config import EngineConfig
from .distributed import LockStep, Pass, RankWatch
from .errors import ConfigError, StalePromptStateError
from .gradient_gap import GradientGap
from .ledger import Ledger
from .models import Decoder, PolicyVersion, RouterSums, TokenCotangents
from .passes import SegmentLoss, SegmentPasses
from .prompts import CapturedPrompts
from .segments import PromptGroup, Segment
from .state import PageStore, SegmentState


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


@dataclass(frozen=True)
class UpdateReport:
    """What one `accumulate` did.

    Attributes:
        loss: the loss function's value, detached.
        num_replayed, num_skipped: members with and without a gradient of their own.
    """

    loss: Tensor
    num_replayed: int
    num_skipped: int


@dataclass(frozen=True)
class FinalizeReport:
    """The gradient of one optimizer step.

    Attributes:
        is_finite: False if it held NaN or infinity: it was taken away and the step will change
            nothing. None where the optimizer decides that itself.
        gap: `relative` and `cosine` of the gradient gap, when it is measured.
    """

    is_finite: bool | None
    gap: dict[str, float] | None


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
            device=device,
        )
        on_host = self.config.page_device == "host"
        home = torch.device("cpu") if on_host else self.decoder.device
        self.store = PageStore(home, self.config.page_size, self.config.state_budget_bytes)
        self.prompts = CapturedPrompts(self.store)
        self.backend = backend or TorchBackend()
        self._timeout_seconds = timeout_seconds
        self._meet_ranks()
        self.ledger = Ledger(
            self.decoder.device, self.config.progress, lambda at: self.watch.at(at)
        )
        self._passes = SegmentPasses(
            self.decoder, self.store, self.backend, self.lockstep, self.config
        )
        self._gap = GradientGap()
        self._step = 0
        self.drive_with(self.backend)

    def drive_with(self, backend: Backend) -> None:
        """Let `backend` drive backwards from now on. Collective.

        Raises:
            ConfigError: an option, or the model, asks for what this backend does not have.
        """
        if self.config.log_gradient_gap and not backend.keeps_gradients:
            raise ConfigError(
                "log_gradient_gap=True (longstraw_log_gradient_gap in the trainer) compares whole "
                "gradients, and here no rank holds them. Measure with ZeRO stage 0 or 1, or with "
                "LoRA under stage 2."
            )
        if Pass.SCORE in backend.turns and any(self.decoder.head.children()):
            raise ConfigError(
                f"the head is a {type(self.decoder.head).__name__} of several modules, whose "
                "weights ZeRO-3 would bring together for each slice of rows, and ranks have "
                "different numbers of slices. Leave the head out of target_modules, or use ZeRO-2."
            )
        if self.lockstep.world_size != RankWatch().world_size:
            self._meet_ranks()  # the process group is younger than this engine
        self.backend = backend
        self._passes.drive_with(backend, self.lockstep)

    def _meet_ranks(self) -> None:
        self.watch = RankWatch()
        self.lockstep = LockStep(timeout_seconds=self._timeout_seconds, watch=self.watch)

    def describe(self) -> str:
        """One line on how this engine runs, for logs."""
        config, decoder = self.config, self.decoder
        device = decoder.device
        attention = config.attention
        if attention == "auto":
            attention = f"auto ({available_impl(device)} where it can)"
        per_token = decoder.state_bytes(1, with_cotangents=config.needs_prompt_backward)
        return (
            f"{decoder.family.model_type} on {device}, {config.prompt_gradient} prompt gradient, "
            f"chunks of {config.chunk_size:,} tokens, pages of {config.page_size:,} on "
            f"{self.store.device}, {per_token:,} bytes of state per prompt token, "
            f"attention {attention}, {self.backend.describe(decoder.trainable_parameters())}"
        )

    # ---------------------------------------------------------------- the update

    def accumulate(self, groups: Sequence[PromptGroup], loss_of: LossFunction) -> UpdateReport:
        """Add the gradient of `loss_of` over these groups to what the backend accumulates.

        The loss may couple members and groups in any way. It is called once, with graph-free
        values that require grad; nothing of the model's graph exists meanwhile. Collective: with
        several ranks all call this, the same number of times.

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
        with self.decoder.attached(), self._all_or_nothing():
            self.backend.begin_update(parameters)
            with self.lockstep.together("capture and scoring"):
                states = self._capture_all(groups, for_backward=True)
                scores = [self._score(s, g) for s, g in zip(states, groups, strict=True)]
            with self.lockstep.together("the loss", has_collectives=True):
                loss, losses = self._differentiate(loss_of, scores)
            with self.lockstep.together("replay"):
                replayed = 0
                for state, group, cotangents in zip(states, groups, losses, strict=True):
                    replayed += self._replay(state, group, cotangents)
                # After all replays: groups with the same prompt share its state. The last decides.
                is_complete = {s: g.is_complete for s, g in zip(states, groups, strict=True)}
                for state in is_complete:
                    if is_complete[state]:
                        self._finish_prompt(state)
        total = sum(len(group.completion_ids) for group in groups)
        return UpdateReport(loss, replayed, total - replayed)

    def finalize(self) -> FinalizeReport:
        """End the accumulation before the optimizer's step. Collective under data parallelism.

        Runs the prompt backwards that are still pending and averages gradients over ranks.
        """
        parameters = self.decoder.trainable_parameters()
        with self.decoder.attached(), self._all_or_nothing():
            self.backend.begin_update(parameters)
            with self.lockstep.together("prompt backward"):
                for state in self.prompts.pending():
                    self._finish_prompt(state)
                if self.backend.needs_anchor and not self.backend.has_gradient:
                    # Nobody had an advantage: the optimizer still needs a gradient, of zeros.
                    self._passes.run_idle(Pass.BACKWARD)
            gap = None
            if self.config.log_gradient_gap:
                gap = self._gap.summarize(parameters, self.config.prompt_gradient == "exact")
            self.watch.at("reducing gradients")
            finalized = self.backend.finalize(parameters)
        return FinalizeReport(finalized.is_finite, gap)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An error inside forgets what was accumulated since the last optimizer step."""
        try:
            yield
        except BaseException:
            self.backend.discard(self.decoder.trainable_parameters())
            self._gap.forget()
            for state in self.prompts.states():
                self.prompts.drop(state)
            raise

    @contextmanager
    def weights_gathered(self) -> Iterator[None]:
        """Say that inside, whole weights stand on every rank: passes need no other rank."""
        with self.backend.weights_gathered(), self.lockstep.suspended():
            yield

    def weights_changed(self) -> None:
        """Say that the weights were updated: every captured state is stale and freed."""
        self._step += 1
        self.prompts.drop_stale(self.policy_version)

    def release(self, prompt_ids: Tensor | None = None) -> None:
        """Free the state of one prompt, or of all that wait for no backward."""
        states = self.prompts.states()
        if prompt_ids is not None:
            held = self.prompts.find(prompt_ids, self.policy_version)
            states = [] if held is None else [held]
        for state in states:
            if not state.has_cotangent:
                self.prompts.drop(state)

    # ---------------------------------------------------------------- 1. capture

    def capture(self, prompt_ids: Tensor) -> SegmentState:
        """The state of `prompt_ids[:-1]` under the current weights, captured if it is not held.

        Args:
            prompt_ids: `[P]` on the model's device.
        """
        return self._capture(prompt_ids, keep=())

    def _capture(self, prompt_ids: Tensor, keep: tuple[SegmentState, ...]) -> SegmentState:
        """As `capture`; the states in `keep` are not dropped to make room."""
        version = self.policy_version
        held = self.prompts.find(prompt_ids, version)
        if held is not None:
            return held
        self.decoder.check_positions(prompt_ids.numel())
        segment = Segment(prompt_ids[None, :-1], (prompt_ids.numel() - 1,))
        self.prompts.make_room(self.decoder.state_bytes(segment.num_tokens, False), keep)
        state = self._passes.new_state(
            segment, version, needs_cotangent=self.config.needs_prompt_backward
        )
        with ExitStack() as undo:
            undo.callback(state.free)
            with self.decoder.attached(), self.ledger.phase("capture", segment.num_tokens) as bar:
                self._passes.capture(state, bar)
            undo.pop_all()
        self.ledger.num_captures += 1
        self._note_bytes()
        self.prompts.hold(state)
        return state

    @property
    def policy_version(self) -> PolicyVersion:
        """What a state captured now would be labelled with."""
        writes = self.backend.count_writes(self.decoder.trainable_parameters())
        return self.decoder.policy_version(self._step, writes)

    def _capture_all(
        self, groups: Sequence[PromptGroup], *, for_backward: bool
    ) -> list[SegmentState]:
        """The states of all groups at once; with room for their cotangents if asked."""
        for group in groups:
            longest = max((ids.numel() for ids in group.completion_ids), default=0)
            self.decoder.check_positions(group.prompt_len + longest)
        states: list[SegmentState] = []
        for group in groups:
            states.append(self._capture(group.prompt_ids, keep=tuple(states)))
        needed, tokens = self._response_bytes(groups, for_backward), 0
        if for_backward and self.config.needs_prompt_backward:
            tokens = sum(s.segment.num_tokens for s in set(states) if not s.has_cotangent)
            needed += self.decoder.state_bytes(tokens, True)
            needed -= self.decoder.state_bytes(tokens, False)
        self.prompts.make_room(needed, keep=tuple(states))
        what = f"an update (cotangents of {tokens:,} prompt tokens, pages of the longest responses)"
        self.store.require(needed, what)
        return states

    def _response_bytes(self, groups: Sequence[PromptGroup], for_backward: bool) -> int:
        """State that responses longer than a chunk hold while they are run; one batch at a time."""
        lengths = [ids.numel() for group in groups for ids in group.completion_ids]
        num_inputs = max(lengths, default=0) + self.config.router_statistics  # see `members`
        chunks_kept = max(num_inputs - 1, 0) // self.config.chunk_size
        tokens = self.config.replay_batch * chunks_kept * self.config.chunk_size
        return self.decoder.state_bytes(tokens, for_backward)

    # ---------------------------------------------------------------- 2. score

    def score(self, group: PromptGroup) -> GroupScores:
        """Log-probs and entropies of a group's responses, without a graph. Collective."""
        with self.decoder.attached(), self.lockstep.together("scoring"):
            (state,) = self._capture_all([group], for_backward=False)
            return self._score(state, group)

    def _score(self, state: SegmentState, group: PromptGroup) -> GroupScores:
        num_members = len(group.completion_ids)
        width = max((ids.numel() for ids in group.completion_ids), default=0)
        dtype = torch.float64 if self.decoder.base.dtype == torch.float64 else torch.float32
        logps = torch.zeros(num_members, width, dtype=dtype, device=self.decoder.device)
        entropies, router = torch.zeros_like(logps), []
        for batch, segment, targets in self._batches(group, self._scored_members(group)):
            child = self._passes.new_state(
                segment, state.policy_version, state, needs_cotangent=False
            )
            with ExitStack() as undo:
                undo.callback(child.free)
                with self.ledger.phase("score", segment.token_ids.numel()) as bar:
                    scores = self._passes.score(child, targets, bar)
            columns = min(width, segment.num_tokens)
            logps[batch, :columns] = scores.logps[:, :columns]
            entropies[batch, :columns] = scores.entropies[:, :columns]
            if child.router is not None:
                both = child.router if state.router is None else state.router + child.router
                router.append(both.detach())
        scored = [i for i in range(num_members) if group.completion_ids[i].numel()]
        if scored:
            # One distribution, the one after the prompt. Run with each member it comes out with
            # other last bits, and a threshold on entropies that falls on it would split the group.
            entropies[scored, 0] = entropies[scored[0], 0].clone()
        return GroupScores(logps, entropies, RouterSums.cat(router) if router else None)

    def _scored_members(self, group: PromptGroup) -> list[int]:
        every = range(len(group.completion_ids))
        if self.config.router_statistics:
            return list(every)  # an empty response still routes the prompt
        return [i for i in every if group.completion_ids[i].numel()]

    def _batches(
        self, group: PromptGroup, members: Sequence[int]
    ) -> list[tuple[list[int], Segment, Tensor]]:
        """Members `replay_batch` at a time, as input segment and targets."""
        batches = []
        for first in range(0, len(members), self.config.replay_batch):
            batch = list(members[first : first + self.config.replay_batch])
            segment = group.members(batch, keep_last_token=self.config.router_statistics)
            batches.append((batch, segment, group.targets(batch, segment.num_tokens)))
        return batches

    # ---------------------------------------------------------------- 3. loss

    def _differentiate(
        self, loss_of: LossFunction, scores: list[GroupScores]
    ) -> tuple[Tensor, list[GroupScores]]:
        """The loss, and dL/dscores in the shape of the scores."""
        leaves = [leaf.requires_grad_() for group in scores for leaf in group.leaves()]
        with self.ledger.phase("loss", 0), torch.enable_grad():
            loss = loss_of(scores)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        queue = iter(grads)
        cotangents = []
        for group in scores:
            logps, entropies = next(queue), next(queue)
            router = group.router
            if router is not None:
                router = RouterSums(router.counts, next(queue), router.num_rows)
            cotangents.append(GroupScores(logps, entropies, router))
        return loss.detach(), cotangents

    # ---------------------------------------------------------------- 4. replay

    def _replay(self, state: SegmentState, group: PromptGroup, cotangents: GroupScores) -> int:
        """Backward of each member that has a gradient; returns how many had."""
        self._check_fresh(state)
        router = None if cotangents.router is None else cotangents.router.probs
        has_entropies = bool(cotangents.entropies.any())
        needed = cotangents.logps.ne(0).any(1) | cotangents.entropies.ne(0).any(1)
        if router is not None:
            needed = needed | router.ne(0).any(1)
            self._add_router_cotangent(state, router)
        members = [i for i in self._scored_members(group) if bool(needed[i])]
        for batch, segment, targets in self._batches(group, members):
            child = self._passes.new_state(
                segment, state.policy_version, state, needs_cotangent=True
            )
            loss = SegmentLoss(
                targets,
                TokenCotangents(
                    _columns(cotangents.logps[batch], segment.num_tokens),
                    _columns(cotangents.entropies[batch], segment.num_tokens)
                    if has_entropies
                    else None,
                ),
                None if router is None else router[batch],
            )
            with ExitStack() as undo:
                undo.callback(child.free)
                with self.ledger.phase("replay", segment.token_ids.numel()) as bar:
                    self._passes.capture(child, bar, but_last=True)
                    self._passes.backward(child, loss, bar)
            self._note_bytes()
        return len(members)

    def _add_router_cotangent(self, state: SegmentState, per_member: Tensor) -> None:
        # Every member's sums contain the prompt's once, so the prompt gets the sum of cotangents.
        total = per_member.sum(0, keepdim=True)
        held = state.router_cotangent
        state.router_cotangent = total if held is None else held + total

    def _check_fresh(self, state: SegmentState) -> None:
        version = self.policy_version
        if state.policy_version != version:
            raise StalePromptStateError(
                f"prompt state was captured at {state.policy_version}, the policy is at {version}. "
                "A replay needs the weights of the capture. Capture again after changing weights "
                "(call Engine.weights_changed() after each optimizer step)."
            )

    # ---------------------------------------------------------------- 5. prompt backward

    def _finish_prompt(self, state: SegmentState) -> None:
        """The prompt's own backward from what its members left, then free its state."""
        if self.config.needs_prompt_backward and state.has_cotangent:
            self._check_fresh(state)
            loss = SegmentLoss(router_probs=state.router_cotangent)
            tokens = state.segment.token_ids.numel()
            with self._measuring_gap(), self.ledger.phase("prompt_backward", tokens) as bar:
                self._passes.backward(state, loss, bar)
        self.prompts.drop(state)

    def _measuring_gap(self) -> AbstractContextManager[None]:
        if not self.config.log_gradient_gap:
            return nullcontext()
        keep = self.config.prompt_gradient == "exact"
        return self._gap.measuring(self.decoder.trainable_parameters(), keep)

    def _note_bytes(self) -> None:
        self.ledger.state_bytes = max(self.ledger.state_bytes, self.store.peak_bytes)


def _columns(x: Tensor, width: int) -> Tensor:
    """`x` `[B, R]` cut or zero-padded to `width` columns."""
    if x.shape[1] >= width:
        return x[:, :width]
    return torch.nn.functional.pad(x, (0, width - x.shape[1]))
