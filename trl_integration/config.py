"""`LongStrawGRPOConfig`: TRL's `GRPOConfig` and the engine's options under `longstraw_`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from trl import GRPOConfig

from longstraw import (
    ConfigError,
    EngineConfig,
    bound_collectives,
    check_ranks,
    connect_cpu_ranks,
    launched_ranks,
    prepare_deepspeed,
    rank_axes,
)

from .checks import check_config
from .deepspeed_checks import check_deepspeed_config, count_every_rank, fill_deepspeed_config
from .parallelism import take_parallelism_config

# What torchrun, accelerate and DeepSpeed's launcher set, and MPI's.
_LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")


@dataclass
class LongStrawGRPOConfig(GRPOConfig):
    """Settings of `LongStrawGRPOTrainer`.

    Every field of `GRPOConfig` keeps its meaning and its default. The added ones say how prompts
    are captured, held and replayed; none of them changes an exact gradient, and
    `longstraw_prompt_refresh` alone the policy that it is of. Options that the engine cannot honour
    raise a `ConfigError` here, with the reason.

    Example:
        >>> args = LongStrawGRPOConfig(output_dir="out", num_generations=8,
        ...                            longstraw_chunk_size=4096, longstraw_page_device="host")
    """

    longstraw_prompt_gradient: str = field(
        default="exact",
        metadata={
            "help": "'exact': the gradient of the full sequence. 'stopped': the prompt's state is "
            "held constant, which saves the second pass over the prompt and is another gradient.",
            "choices": ["exact", "stopped"],
        },
    )
    longstraw_chunk_size: int = field(
        default=2048,
        metadata={"help": "Tokens run at a time; bounds the graph that exists during a backward."},
    )
    longstraw_page_size: int = field(
        default=512, metadata={"help": "Tokens per page of captured state."}
    )
    longstraw_replay_batch: int | None = field(
        default=None,
        metadata={
            "help": "Most responses of one prompt scored and replayed together; by default as many "
            "as have half the tokens of a chunk."
        },
    )
    longstraw_min_shared_tokens: int = field(
        default=256,
        metadata={
            "help": "Fewest tokens that several prompts, or several responses to one, begin with "
            "for which these are captured once and shared."
        },
    )
    longstraw_page_device: str = field(
        default="model",
        metadata={
            "help": "Where captured state lives: 'model' (the model's device) or 'host' memory.",
            "choices": ["model", "host"],
        },
    )
    longstraw_state_budget_gib: float | None = field(
        default=None,
        metadata={"help": "Most GiB that captured state and its cotangents may take."},
    )
    longstraw_spill_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder on a local disk for files of the state that exceeds the budget (or the "
            "host's free memory, without one). Takes state that is on the host."
        },
    )
    longstraw_spill_budget_gib: float | None = field(
        default=None,
        metadata={"help": "Most GiB of these files; unset: what is free in longstraw_spill_dir."},
    )
    longstraw_cotangent_dtype: str = field(
        default="float32",
        metadata={
            "help": "Dtype in which cotangents add up on the prompt's state: 'float32', or "
            "'bfloat16', which takes half the memory and rounds at each reader.",
            "choices": ["float32", "bfloat16"],
        },
    )
    longstraw_logprob_chunk_size: int = field(
        default=256, metadata={"help": "Rows whose full-vocabulary logits exist at a time."}
    )
    longstraw_attention: str = field(
        default="auto",
        metadata={
            "help": "Attention implementation; 'auto' takes the fastest that can compute a block.",
            "choices": ["auto", "reference", "triton", "flash_attn", "torch_flash"],
        },
    )
    longstraw_index_ties: str = field(
        default="first",
        metadata={
            "help": "Which of several tokens with the same index score sparse attention (DeepSeek "
            "V3.2, GLM-5) selects: the 'first' in the sequence or the 'last'. For the rule of the "
            "engine that generates; TRL's own scoring takes any of them, by the row's length.",
            "choices": ["first", "last"],
        },
    )
    longstraw_shared_rollout: bool = field(
        default=True,
        metadata={
            "help": "Decode responses from the captured prompt (transformers' generation only). "
            "False generates as TRL does, with the prompt once per response."
        },
    )
    longstraw_log_gradient_gap: bool = field(
        default=False,
        metadata={
            "help": "Log how far the stopped gradient is from the exact one. Costs the prompt's "
            "backward and one copy of the gradients."
        },
    )
    longstraw_prompt_refresh: str = field(
        default="every_step",
        metadata={
            "help": "For how many optimizer steps a prompt's captured state is read: 'every_step' "
            "(one), a number (the state is then of older weights than the responses, which needs "
            "longstraw_prompt_gradient='stopped'), or 'never' refreshed (prompts are run with the "
            "adapter switched off, so that its training does not change them). Prompts that a step "
            "does not use are freed after it, unless longstraw_state_budget_gib says how much may "
            "stay."
        },
    )
    longstraw_log_prompt_drift: bool = field(
        default=False,
        metadata={
            "help": "Log how far loss and log-probs on the prompt state in use are from those on "
            "one captured now. Costs one more capture and scoring of each micro-batch, and that "
            "state's bytes (in longstraw/state_bytes too)."
        },
    )
    longstraw_accumulate: str = field(
        default="auto",
        metadata={
            "help": "How DeepSpeed holds the gradients of an update: 'local' (on the parameters, "
            "in fp32, reduced once per step; for adapters), 'partitioned' (no full-size gradient "
            "on any rank; for full fine-tuning under ZeRO-2/3), 'auto' (by what is trainable).",
            "choices": ["auto", "local", "partitioned"],
        },
    )
    longstraw_sp_size: int = field(
        default=1,
        metadata={
            "help": "Ranks that share the tokens of each prompt and each response (sequence "
            "parallel). The number of processes is a multiple of it; batch sizes are per group of "
            "so many ranks. accelerate's parallelism_config with sp_size says the same."
        },
    )
    longstraw_sp_layout: str = field(
        default="block_cyclic",
        metadata={
            "help": "Which tokens of a chunk a rank has: 'block_cyclic' (one run), or 'zigzag' (an "
            "early and a late run, which evens out the work inside a chunk).",
            "choices": ["block_cyclic", "zigzag"],
        },
    )
    longstraw_allow_extrapolation: bool = field(
        default=False,
        metadata={"help": "Run positions beyond the model's max_position_embeddings."},
    )
    longstraw_document_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder that relative paths in the column document_file are relative to. None "
            "is the working directory."
        },
    )
    longstraw_logged_prompt_chars: int | None = field(
        default=400,
        metadata={
            "help": "Characters of a prompt (of each message of a conversation) that tables of "
            "completions show, a quarter of them from its beginning. None shows all."
        },
    )
    longstraw_progress: bool = field(
        default=True, metadata={"help": "Show progress within passes over many tokens."}
    )

    _counts_groups = False

    def __post_init__(self) -> None:
        take_parallelism_config(self)
        self._connect()
        with self.counting_groups():  # TRL derives what one generation has
            super().__post_init__()
        check_ranks(self.world_size)
        if self.deepspeed_plugin is not None:
            count_every_rank(getattr(self, "hf_deepspeed_config", None), self)
            config = self.deepspeed_plugin.hf_ds_config.config
            check_deepspeed_config(config, self)
            fill_deepspeed_config(config, self)
            bound_collectives(self.ddp_timeout)
        check_config(self)
        self.to_engine_config()  # an invalid value raises here, not at the first step

    def _connect(self) -> None:
        """What has to come before TRL looks at devices and processes."""
        on_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.uses_deepspeed:
            if not any(name in os.environ for name in _LAUNCHED):
                raise ConfigError(
                    "deepspeed is set, and this process was started without a launcher, so "
                    "DeepSpeed cannot know its ranks. Start it with accelerate launch "
                    "--config_file ds_configs/accelerate/zero2.yaml your_script.py (one process "
                    "is enough: --num_processes 1), or leave deepspeed out."
                )
            prepare_deepspeed(on_cpu=on_cpu)
        if on_cpu:
            # Said by name: under DeepSpeed accelerate counts CPU processes only if told of them.
            self.use_cpu = self.use_cpu or self.uses_deepspeed or launched_ranks() > 1
            connect_cpu_ranks(self.ddp_timeout)

    @property
    def world_size(self) -> int:
        """The number of processes; inside `counting_groups` of those that hold different rows."""
        num_ranks = super().world_size  # first: ranks are connected by then, and else it raises
        if not self._counts_groups or self.longstraw_sp_size == 1:
            return num_ranks
        return rank_axes(self.longstraw_sp_size, self.ddp_timeout).dp_size

    @contextmanager
    def counting_groups(self) -> Iterator[None]:
        """Let `world_size` count the ranks that share prompts as one process."""
        self._counts_groups = True
        try:
            yield
        finally:
            self._counts_groups = False

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed was asked for, here or by accelerate's configuration."""
        from_launcher = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        return self.deepspeed is not None or from_launcher

    def to_engine_config(self, *, router_statistics: bool = False) -> EngineConfig:
        """The engine's view of these settings."""
        for name in ("longstraw_state_budget_gib", "longstraw_spill_budget_gib"):
            budget = getattr(self, name)
            if budget is not None and budget <= 0:
                raise ConfigError(
                    f"{name}={budget}: give a positive number of GiB, or None for no limit."
                )
        if self.longstraw_spill_budget_gib is not None and self.longstraw_spill_dir is None:
            raise ConfigError(
                f"longstraw_spill_budget_gib={self.longstraw_spill_budget_gib} limits files, and "
                "without longstraw_spill_dir there are none. Name a folder, or leave it out."
            )
        try:
            return self._engine_config(router_statistics)
        except ConfigError as error:
            name = str(error).partition("=")[0]
            if not hasattr(self, f"longstraw_{name}"):
                raise
            raise ConfigError(f"longstraw_{error}") from None  # the name the user wrote

    def _engine_config(self, router_statistics: bool) -> EngineConfig:
        return EngineConfig(
            prompt_gradient=self.longstraw_prompt_gradient,  # type: ignore[arg-type]
            chunk_size=self.longstraw_chunk_size,
            page_size=self.longstraw_page_size,
            replay_batch=self.longstraw_replay_batch,
            min_shared_tokens=self.longstraw_min_shared_tokens,
            page_device=self.longstraw_page_device,  # type: ignore[arg-type]
            state_budget_bytes=_gib(self.longstraw_state_budget_gib),
            spill_dir=self.longstraw_spill_dir,
            spill_budget_bytes=_gib(self.longstraw_spill_budget_gib),
            cotangent_dtype=self.longstraw_cotangent_dtype,  # type: ignore[arg-type]
            logprob_chunk_size=self.longstraw_logprob_chunk_size,
            attention=self.longstraw_attention,
            index_ties=self.longstraw_index_ties,  # type: ignore[arg-type]
            temperature=self.temperature,
            fp32_head=self.cast_lm_head_to_fp32,
            log_gradient_gap=self.longstraw_log_gradient_gap,
            prompt_refresh=self.longstraw_prompt_refresh,
            log_prompt_drift=self.longstraw_log_prompt_drift,
            router_statistics=router_statistics,
            sp_size=self.longstraw_sp_size,
            sp_layout=self.longstraw_sp_layout,  # type: ignore[arg-type]
            allow_extrapolation=self.longstraw_allow_extrapolation,
            progress=self.longstraw_progress and not self.disable_tqdm and self.process_index == 0,
        )


def _gib(number: float | None) -> int | None:
    return None if number is None else int(number * 2**30)


def own_config(args: Any, model: Any) -> LongStrawGRPOConfig:
    """The trainer's config: the default one for None.

    Raises:
        ConfigError: it is TRL's.
    """
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return LongStrawGRPOConfig(f"{name.split('/')[-1] or 'model'}-LongStrawGRPO")
    if not isinstance(args, LongStrawGRPOConfig):
        raise ConfigError(
            f"args is a {type(args).__name__}: LongStrawGRPOTrainer takes a LongStrawGRPOConfig, "
            "which has the same fields and more. Change the name of the config as well."
        )
    return args
