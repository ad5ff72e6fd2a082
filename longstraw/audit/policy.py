"""The model that is audited, described so that another process can make the same one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from ..errors import ConfigError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PolicySource:
    """Where a model comes from.

    Attributes:
        source: folder or hub id; None for a tiny random Qwen3, which needs no download.
        dtype: "float64", "float32" or "bfloat16".
        lora_rank: adapters of this rank on all linear layers are trained, with random weights: the
            zeros that training begins with would leave half of their gradients zero. None: all
            weights are trained.
        device: "cpu", "cuda", ...
        seed: of the random weights.
    """

    source: str | None = None
    dtype: str = "float32"
    lora_rank: int | None = None
    device: str = "cpu"
    seed: int = 0

    @property
    def name(self) -> str:
        """How a person would call it."""
        name = "a tiny random Qwen3" if self.source is None else self.source
        return name if self.lora_rank is None else f"{name} with LoRA of rank {self.lora_rank}"

    def load(self) -> Any:
        """The model in eval mode, on its device.

        Raises:
            ConfigError: there is no such model here.
        """
        torch.manual_seed(self.seed)
        model = tiny_model() if self.source is None else _load(self.source, self.dtype)
        if self.lora_rank is not None:
            from peft import LoraConfig, get_peft_model

            adapter = LoraConfig(
                r=self.lora_rank, target_modules="all-linear", init_lora_weights=False
            )
            model = get_peft_model(model, adapter)
        # By name and not by `.to`: where a model keeps a part in another dtype, that stays.
        if self.source is None or self.dtype == "float64":
            model = model.to(DTYPES[self.dtype])
        return model.to(self.device).eval()

    def load_tokenizer(self) -> Any:
        """The model's tokenizer."""
        assert self.source is not None, "the tiny random model has no tokenizer"
        try:
            return AutoTokenizer.from_pretrained(self.source)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no tokenizer for {self.source!r}: {_first_line(error)}. Save one beside the "
                "model (tokenizer.save_pretrained)."
            ) from error


def tiny_model() -> Any:
    """A random model of 130,000 parameters whose softmaxes are sharp, so that all of it matters."""
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=65536,
        initializer_range=0.4,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def _load(source: str, dtype: str) -> Any:
    wanted = torch.float32 if dtype == "float64" else DTYPES[dtype]
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=wanted)
    except (OSError, ValueError) as error:
        what = "a folder without a model" if Path(source).is_dir() else "no folder"
        raise ConfigError(
            f"--model {source!r} is {what}, and could not be loaded as a hub id: "
            f"{_first_line(error)}. Give a folder with config.json and weights, or an id such as "
            "Qwen/Qwen3-0.6B where the hub can be reached."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
