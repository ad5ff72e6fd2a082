"""What is to be planned: the update, the ranks, and the memory that each has."""

from dataclasses import dataclass, field
from math import ceil

from ..config import EngineConfig
from ..errors import ConfigError
from .model_shape import RECURRENT, ModelShape

FEW_TRAINABLE = 0.1
"""Below this part of all parameters, gradients stay whole on each rank; see `DeepSpeedBackend`."""


@dataclass(frozen=True)
class PlanOptions:
    """An update of one group per sequence group, with Adam.

    Attributes:
        prompt_tokens, response_tokens: P and R.
        group_size: G.
        ranks: processes; a multiple of `engine.sp_size`.
        zero_stage: 0 to 3.
        ep_size: ranks that routed experts are divided over.
        lora_rank: of adapters on every projection of the layers; 0 trains everything.
        is_nf4: whether frozen projections are packed into 4 bits, constants quantized again.
        itemsize: of weights and activations, bytes.
        has_kernels: attention by kernels, which keep no scores (a GPU with Triton); else by its
            definition, whose tiles of scores are tensors.
        decodes: whether responses are generated here, by the engine.
        device_gib, host_gib: memory of a rank's device, and of the host for all of its ranks.
        engine: the engine's own settings.
    """

    prompt_tokens: int
    response_tokens: int = 8192
    group_size: int = 8
    ranks: int = 1
    zero_stage: int = 0
    ep_size: int = 1
    lora_rank: int = 0
    is_nf4: bool = False
    itemsize: int = 2
    has_kernels: bool = True
    decodes: bool = True
    device_gib: float = 80.0
    host_gib: float | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "response_tokens", "group_size", "ranks", "ep_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: at least 1 is needed.")
        sp_size = self.engine.sp_size
        if self.ranks % sp_size:
            raise ConfigError(
                f"{self.ranks} ranks with sp {sp_size}: ranks form groups of sp that share a "
                f"prompt, so their number is a multiple of it. Take --ranks "
                f"{ceil(self.ranks / sp_size) * sp_size}, or an --sp that divides {self.ranks}."
            )
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"--zero {self.zero_stage}: DeepSpeed has stages 0, 1, 2 and 3.")
        if self.ranks % self.ep_size:
            raise ConfigError(
                f"--ep {self.ep_size} with {self.ranks} ranks: it has to divide their number."
            )
        if self.lora_rank < 0 or (self.is_nf4 and not self.lora_rank):
            raise ConfigError(
                f"--nf4 with --lora-rank {self.lora_rank}: packed weights cannot be trained. Give "
                "the rank of the adapters that are, for example --lora-rank 16."
            )
        if self.device_gib <= 0:
            raise ConfigError(f"--device-gib {self.device_gib}: a positive number is needed.")

    def check(self, shape: ModelShape) -> None:
        """Raise `ConfigError` if the model cannot be divided so."""
        sp_size = self.engine.sp_size
        if shape.count(RECURRENT) and shape["linear_num_key_heads"] % sp_size:
            heads = shape["linear_num_key_heads"]
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ConfigError(
                f"--sp {sp_size}: the model's recurrent layers have {heads} key heads, which ranks "
                f"that share a prompt divide among them. Set it to one of {fitting}."
            )
        if self.ep_size > 1 and (not shape.num_experts or shape.num_experts % self.ep_size):
            raise ConfigError(
                f"--ep {self.ep_size} with {shape.num_experts} routed experts: it has to divide "
                "their number. Leave it out, or take a divisor."
            )

    @property
    def is_exact(self) -> bool:
        """Whether the prompt has a backward of its own."""
        return self.engine.needs_prompt_backward

    def owned(self, num_tokens: int) -> int:
        """Of a run of tokens in chunks, those of the rank that owns most; see `most_owned`."""
        whole, rest = divmod(num_tokens, self.engine.chunk_size)
        return whole * self.width(self.engine.chunk_size) + self.width(rest)

    def width(self, num_tokens: int) -> int:
        """Of one chunk's tokens, those of the rank that owns most; see `Ownership.width`."""
        sp_size = self.engine.sp_size
        if self.engine.sp_layout == "block_cyclic":
            return ceil(num_tokens / sp_size)
        cuts = [block * num_tokens // (2 * sp_size) for block in range(2 * sp_size + 1)]
        sizes = [stop - start for start, stop in zip(cuts, cuts[1:], strict=False)]
        return max(sizes[r] + sizes[-1 - r] for r in range(sp_size))

    @property
    def cotangent_itemsize(self) -> int:
        """Bytes of a number that later tokens leave on a page."""
        return 2 if self.engine.cotangent_dtype == "bfloat16" else 4

    @property
    def page_tokens(self) -> int:
        """Of a full page, which has no more than one rank's run of a chunk."""
        return min(self.engine.page_size, self.width(self.engine.chunk_size))

    @property
    def rows_at_a_time(self) -> int:
        """Responses that are replayed together, see `EngineConfig.replay_batch`."""
        rows = self.engine.replay_batch
        if rows is None:
            rows = max(1, self.engine.chunk_size // (2 * self.response_tokens))
        return min(rows, self.group_size)
