"""`LongStrawGRPOTrainer`: TRL's GRPO trainer with the model passes done by the engine.

TRL keeps everything that decides *what* is trained: data, sampling, rewards, advantages, the loss,
metrics, the optimizer. The engine replaces *how* the model is run: where TRL runs prompt and
response once per row, the prompt is captured once and responses are scored and replayed on it.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from trl.models import unwrap_model_for_generation

from longstraw import (
    ConfigError,
    DeepSpeedBackend,
    Engine,
    GroupScores,
    TorchBackend,
    generate_rows,
    load_balancing_loss,
)

from .checks import (
    check_dataset,
    check_processing_class,
    check_prompts,
    check_refreshed_rollout,
    checked_reward,
)
from .config import LongStrawGRPOConfig, own_config
from .deepspeed_checks import (
    check_divided_experts,
    refuse_generation_by_each_rank,
    refuse_turns_of_each_rank,
)
from .prompt_drift import RepeatableLoss, refresh_metrics
from .replayed_engine import drive_accelerator
from .resumable import ResumableGRPOTrainer
from .rows import RowGroups, all_router_sums
from .seams import check_seams, whole_groups
from .sequence_parallel import refuse_environments, refuse_own_generation

logger = logging.getLogger(__name__)


class LongStrawGRPOTrainer(ResumableGRPOTrainer):
    """`trl.GRPOTrainer` for prompts that do not fit it; the arguments are the same.

    Replaced, and nothing else:

    * log-probs and entropies of policy and reference (`_get_per_token_logps_and_entropies`) come
      from captured prompts;
    * the backward (`compute_loss`): TRL's own loss runs on values, its gradient with respect to
      log-probs and entropies drives one replay per response and one backward of the prompt;
    * generation by transformers (`_generate_single_turn`) decodes from the captured prompt; vLLM
      and `rollout_func` work as in TRL;
    * the shuffle before micro-batches moves whole groups;
    * ranks may share prompts (`longstraw_sp_size`, `SequenceParallelGRPOTrainer`);
    * each prompt is fetched and tokenized once, shortened in logs, and may be given as token ids or
      with a document in a file (`PromptDataGRPOTrainer`);
    * checkpoints are complete or not there, and a resumed run is the uninterrupted one
      (`ResumableGRPOTrainer`).

    Attributes:
        engine: runs the policy; `engine.ledger` says where time and memory went.
    """

    _tag_names = ["trl", "grpo", "longstraw"]
    _name = "LongStraw GRPO"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: LongStrawGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *rest: Any,
        **kwargs: Any,
    ) -> None:
        check_seams()
        args = own_config(args, model)
        has_environment = kwargs.get("environment_factory") is not None
        folder = args.longstraw_document_dir
        check_dataset(train_dataset, "train_dataset", has_environment, folder)
        check_dataset(eval_dataset, "eval_dataset", has_environment, folder)
        refuse_environments(args.longstraw_sp_size, has_environment)
        check_refreshed_rollout(
            args,
            has_tools=bool(kwargs.get("tools")),
            has_environment=has_environment,
            has_rollout_func=kwargs.get("rollout_func") is not None,
        )
        # Before TRL looks for an image token in the config of what may be a text model.
        check_processing_class(processing_class)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            *rest,
            **kwargs,
        )
        self._options = args
        _without_reentrant_checkpointing(args)
        self._check_model_options()
        self._reward_errors: list[Exception] = []
        self.reward_funcs = [
            f
            if isinstance(f, nn.Module)
            else self._once_per_group(checked_reward(f, name, self._report_reward_error))
            for f, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        self.engine = self._make_engine(self.model)
        if args.gradient_checkpointing:  # switched on in the model when training starts
            self.engine.decoder.refuse_checkpointing()
        self._ref_engine = self._make_ref_engine()
        self._policy_adapters = self.engine.policy_version.adapters
        self._scores: list[GroupScores] | None = None
        self._rows: RowGroups | None = None
        self._has_finite_gradient = True
        self._shares_rollout = self._can_share_rollout()
        if not self.is_deepspeed_enabled:  # else when there is an engine to describe
            self._say_how_the_engine_runs()
        self.add_callback(_AfterStep(self))

    @property
    def _group_size(self) -> int:
        return cast(int, self.num_generations)

    # ---------------------------------------------------------------- construction

    def _make_engine(self, model: Any, **changes: Any) -> Engine:
        config = self._options.to_engine_config(router_statistics=self.aux_loss_enabled)
        config = replace(config, **changes)
        unwrapped: Any = self.accelerator.unwrap_model(model)
        return Engine(
            unwrapped,
            config,
            autocast=lambda: self.accelerator.autocast(),
            device=self.accelerator.device,  # where DeepSpeed will move it
            timeout_seconds=self.args.ddp_timeout,
        )

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.is_deepspeed_enabled:
            backend = DeepSpeedBackend(self.model_wrapped, self._options.longstraw_accumulate)
            self.engine.drive_with(backend)
            drive_accelerator(self.accelerator, backend)
            self._say_how_the_engine_runs()
        return prepared

    def _say_how_the_engine_runs(self) -> None:
        # Printed, not logged: a plain script sets up no logging and would not show it.
        self.accelerator.print(f"LongStraw: {self.engine.describe()}.")

    @property
    def _deepspeed_config(self) -> dict[str, Any]:
        return cast(Any, self.accelerator.state.deepspeed_plugin).deepspeed_config

    def _make_ref_engine(self) -> Engine | None:
        if self.ref_model is None:
            return None
        # Its weights stay, and each prompt is freed when it is scored: there is nothing to refresh.
        engine = self._make_engine(self.ref_model, prompt_refresh=1, log_prompt_drift=False)
        if self.is_deepspeed_enabled:
            engine.drive_with(DeepSpeedBackend(self.ref_model))
        return engine

    def _check_model_options(self) -> None:
        check_processing_class(self.processing_class)
        if self.is_fsdp_enabled:
            raise ConfigError(
                "accelerate was launched with FSDP, whose sharded parameters are not served. Use "
                "DeepSpeed ZeRO-3, which shards them too (ds_configs/accelerate/zero3.yaml)."
            )
        if self.is_deepspeed_enabled:
            config = self._deepspeed_config
            check_divided_experts(config, self.model, self._options)
            if self.tools and not self.use_vllm:
                refuse_turns_of_each_rank(config)
        for config in getattr(self.model, "peft_config", {}).values():
            if getattr(config, "is_prompt_learning", False):
                raise ConfigError(
                    f"{type(config).__name__}: prompt learning adds keys that belong to no token, "
                    "which captured prompts cannot hold. Use LoRA or another adapter."
                )

    def _can_share_rollout(self) -> bool:
        """Whether generation decodes from captured prompts; says why where it does not."""
        args = self._options
        if self.use_vllm or self.rollout_func is not None:
            return False
        config = self.generation_config  # TRL's fields and generation_kwargs together
        reasons = {
            "longstraw_shared_rollout=False": not args.longstraw_shared_rollout,
            "use_transformers_continuous_batching=True": self.use_transformers_continuous_batching,
            f"cache_implementation={config.cache_implementation!r}": bool(
                config.cache_implementation
            ),
            "use_cache=False": config.use_cache is False,
            f"guidance_scale={config.guidance_scale!r}": config.guidance_scale not in (None, 1),
            "generation_kwargs asks for beams or assisted decoding": any(
                getattr(config, key, None) not in (1, None)
                for key in ("num_beams", "prompt_lookup_num_tokens", "assistant_early_exit")
            ),
        }
        found = [reason for reason, is_found in reasons.items() if is_found]
        if found:
            refuse_own_generation(self.axes.sp_size, found[0])
            check_refreshed_rollout(args, own_generation=found[0])
            if self.is_deepspeed_enabled:
                refuse_generation_by_each_rank(self._deepspeed_config, found[0])
            logger.warning(
                f"Responses are generated by TRL, not from captured prompts: {found[0]}."
            )
        return not found

    # ---------------------------------------------------------------- rollout

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        work = "tokenizing prompts"
        with self._announced_meeting(work), self.engine.lockstep.together(work):
            # All ranks raise, or none.
            prompt_ids, *rest = super()._tokenize_prompts(prompts)
            check_prompts(prompt_ids)
            longest = max(len(ids) for ids in prompt_ids)
            self.engine.decoder.check_positions(longest + (self.max_completion_length or 0))
        return prompt_ids, *rest

    def _report_reward_error(self, error: Exception) -> None:
        if self.engine.lockstep.world_size == 1:
            raise error
        self._reward_errors.append(error)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self.engine.watch.at("reward functions")
        rewards = super()._calculate_rewards(*args, **kwargs)
        # Collected, not raised: the other ranks wait in the gather that ends the call above.
        error = self._reward_errors[0] if self._reward_errors else None
        self._reward_errors.clear()
        self.engine.lockstep.agree(error, "the reward functions")
        return rewards

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[list[int]], Any]:
        if not self._shares_rollout:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs
            )
        return self.generate_turn(prompt_ids), None

    def generate_turn(self, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        """One continuation of each context, decoded from captured state.

        Collective, except in a rollout: that runs on one rank of a sequence group, and the others
        join. For a `rollout_func` of your own: a context that continues an earlier one (a prompt,
        the policy's turn, a tool's answer) is found on its token ids, and only what is new is run.
        What several begin with is run once.

        Args:
            contexts: token ids, without padding. All are decoded together, as far as they fit.

        Returns:
            New token ids of each, up to and with the end of sequence.
        """
        with (
            self._announced_turn(contexts),
            unwrap_model_for_generation(
                cast(Any, self.model_wrapped),
                self.accelerator,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=cast(Any, self.args.gradient_checkpointing_kwargs),
            ),
            self.engine.weights_gathered(),
        ):
            device = self.accelerator.device
            rows = generate_rows(
                self.engine,
                [torch.as_tensor(ids, dtype=torch.long, device=device) for ids in contexts],
                generation_config=self.generation_config,
            )
        return [self._until_eos(row.tolist()) for row in rows]

    def _until_eos(self, ids: list[int]) -> list[int]:
        """`ids` up to and with the first end-of-sequence token."""
        ends = [i for i, token in enumerate(ids) if token in self.eos_token_ids]
        return ids[: ends[0] + 1] if ends else ids

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with whole_groups(self._group_size):
            return super()._prepare_inputs(generation_batch)

    # ---------------------------------------------------------------- scoring

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's signature and result: `[B, C]`, zero where masked.

        During a training loss these are the values that `compute_loss` differentiates; elsewhere
        they are scored here, without a graph.
        """
        if self._scores is not None and self._rows is not None:
            rows, scores = self._rows, self._scores
        else:
            rows = RowGroups.from_batch(input_ids, attention_mask, logits_to_keep)
            scores = self._score(model, rows)
        logps, entropies = rows.to_columns(scores)
        aux_loss = load_balancing_loss(all_router_sums(scores)) if compute_aux_loss else None
        return logps, entropies if compute_entropy else None, aux_loss

    def _score(self, model: nn.Module, rows: RowGroups) -> list[GroupScores]:
        """Scores under `model`; prompts of other weights than the policy's are freed at once."""
        is_ref = self._ref_engine is not None and model is self.ref_model
        engine = self._ref_engine if is_ref else self.engine
        assert engine is not None
        is_policy = engine.policy_version.adapters == self._policy_adapters and not is_ref
        scores = []
        with engine.lockstep.together("scoring", has_passes=True):
            for group in rows.groups:
                scores.append(engine.score(group))
                if not is_policy:
                    engine.release(group.prompt_ids)
        return scores

    # ---------------------------------------------------------------- loss and backward

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """TRL's loss; under autograd its gradient is accumulated here, by replays.

        The value returned has no graph to the model: the backward that `Trainer` runs on it is
        empty.
        """

        inputs = _without_context_logps(inputs)

        def trl_loss(inputs: dict[str, Any]) -> Tensor:
            return super(LongStrawGRPOTrainer, self).compute_loss(
                model, inputs, return_outputs, num_items_in_batch
            )

        if not torch.is_grad_enabled():
            return trl_loss(inputs)
        rows = self._training_rows(inputs)
        loss = RepeatableLoss(self, inputs, trl_loss)

        def loss_of(scores: list[GroupScores]) -> Tensor:
            self._rows, self._scores = rows, scores
            try:
                return loss(rows.to_columns(scores)[0])
            finally:
                self._rows = self._scores = None

        report = self.engine.accumulate(rows.groups, loss_of)
        self._log_engine("members_skipped", report.num_skipped)
        if report.drift is not None or self.engine.refresh.spans_steps:
            for name, value in refresh_metrics(report).items():
                self._log_engine(name, value)
        if self.accelerator.sync_gradients:
            self._finish_update()
        return report.loss.requires_grad_()

    def _training_rows(self, inputs: dict[str, Any]) -> RowGroups:
        """The micro-batch as groups, with groups that continue in a later one marked."""
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        has_context = inputs.get("tool_mask") is not None
        check_refreshed_rollout(self._options, has_context_tokens=has_context)
        num_rows = input_ids.shape[0]
        steps = cast(int, self._options.steps_per_generation)
        first = (self._step % steps) * num_rows
        ends = [(first + row + 1) % self._group_size == 0 for row in range(num_rows)]
        # A group that an optimizer step cuts is captured again with the new weights.
        complete = [end or self.accelerator.sync_gradients for end in ends]
        width = inputs["completion_ids"].shape[1]
        return RowGroups.from_batch(
            input_ids, mask, width, complete=complete, loss_mask=inputs.get("tool_mask")
        )

    def _finish_update(self) -> None:
        report = self.engine.finalize()
        self._has_finite_gradient = report.is_finite is not False
        if report.gap:
            self._log_engine("gradient_gap", report.gap["relative"])
            self._log_engine("gradient_cosine", report.gap["cosine"])
        ledger = self.engine.ledger
        self._log_engine("state_bytes", ledger.state_bytes)
        self._log_engine("captures", ledger.num_captures)
        for phase, seconds in ledger.take_seconds().items():
            self._log_engine(f"seconds/{phase}", seconds)
        for phase, num_bytes in ledger.peak_bytes().items():
            self._log_engine(f"peak_bytes/{phase}", num_bytes)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        return norm if self._has_finite_gradient else math.nan

    def after_step(self) -> None:
        """After each optimizer step: captured state ages; a step that was none is told."""
        is_skipped = not self._has_finite_gradient or self.accelerator.optimizer_step_was_skipped
        self._log_engine("skipped_steps", is_skipped)
        if is_skipped:
            self.accelerator.print(
                f"LongStraw: step {self.state.global_step + 1} changed no weight, because its "
                "gradient is not finite. Look at the rewards and the learning rate if this repeats."
            )
        self.engine.weights_changed()
        self.engine.watch.step = f"step {self.state.global_step + 2}"

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL; an error that another rank's end has caused names that rank."""
        self.engine.release()  # a run that begins or is resumed has other weights
        with self.engine.watch.guarding():
            return super().train(*args, **kwargs)

    def _log_engine(self, name: str, value: float) -> None:
        self._metrics["train"][f"longstraw/{name}"].append(float(value))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL; under DeepSpeed only during or after training, which makes its engine."""
        if self.is_deepspeed_enabled and isinstance(self.engine.backend, TorchBackend):
            raise ConfigError(
                "evaluate() was called before train() under DeepSpeed, whose engine is made when "
                "training starts. Evaluate with eval_on_start=True, or without DeepSpeed."
            )
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            # Nothing is replayed after an evaluation. Prompts of earlier steps are training's.
            self.engine.release(only_new=self.engine.refresh.spans_steps)


class _AfterStep(TrainerCallback):
    """Tells the trainer of each optimizer step."""

    def __init__(self, trainer: LongStrawGRPOTrainer) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.after_step()


def _without_context_logps(inputs: dict[str, Any]) -> dict[str, Any]:
    """The batch with log-probs of zero at tokens that are context only, as the engine gives them.

    TRL masks these tokens after it has taken ratios: exp(0 - old) could be infinite, and infinity
    times the mask is NaN.
    """
    mask = inputs.get("tool_mask")
    names = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
    if mask is None:
        return inputs
    found = {name: inputs[name] for name in names if inputs.get(name) is not None}
    return {**inputs, **{name: x.masked_fill(mask == 0, 0.0) for name, x in found.items()}}


def _without_reentrant_checkpointing(args: LongStrawGRPOConfig) -> None:
    """Undo what TRL sets for adapters under ZeRO-3 (the config has refused the user's own).

    It was for DeepSpeed before 0.19.8, and drops the cache that holds the prompt.
    """
    if isinstance(args.gradient_checkpointing_kwargs, dict):
        args.gradient_checkpointing_kwargs["use_reentrant"] = False
