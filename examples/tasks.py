"""Two tasks whose answer has to be fetched from the prompt, each with the policy that starts on it.

`TinyRetrieval` takes minutes on a CPU and no download; `Needles` takes any chat model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from comparison import HeldOut
from longstraw import Engine, EngineConfig, generate
from needles import make_dataset, short_and_right
from tiny_retrieval import (
    Recipe,
    exact_match,
    make_tokenizer,
    measure_accuracy,
    noisy_retriever,
    retrieval_rows,
)

HELD_OUT_SEED = 999
"""Of the prompts that measure a policy. Runs take their number as seed, from 0."""


class Task(Protocol):
    """A checkpoint, prompts, and a reward that a program can compute.

    Attributes:
        policy: names the checkpoint; results of other checkpoints are not reused.
        reward: a reward function of TRL.
        max_reply_tokens: most tokens of a reply.
        chunk_size: tokens that LongStraw runs at a time.
        learning_rate: what the policy learns well with.
        num_held_out: prompts that measure a policy.
        peft_config: the adapter to train, or None for all weights.
        is_bf16: whether the model's forward runs in bfloat16.
        is_on_cpu: whether it runs there although there may be a GPU.
    """

    policy: str
    reward: Callable[..., list[float]]
    max_reply_tokens: int
    chunk_size: int
    learning_rate: float
    num_held_out: int
    peft_config: LoraConfig | None
    is_bf16: bool
    is_on_cpu: bool

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The policy before training, the same at every call."""
        ...

    def rows(self, num_rows: int, prompt_tokens: int, seed: int) -> Dataset:
        """Prompts of `prompt_tokens` tokens with the columns that the reward reads."""
        ...

    def measure(self, model: PreTrainedModel, rows: Dataset) -> HeldOut:
        """Mean reward of replies to `rows`, the same at every call."""
        ...


class TinyRetrieval:
    """A value looked up among words, by a Llama of 391K parameters (`tiny_retrieval.py`).

    The reward is 1 for the right reply and 0 for another: means of it are accuracies.
    """

    reward = staticmethod(exact_match)
    max_reply_tokens = 2  # the value and the end
    learning_rate = 3e-4
    num_held_out = 128
    peft_config = None
    is_bf16 = False
    is_on_cpu = True  # so small that a GPU would wait for Python

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        """
        Args:
            folder: holds the checkpoint; it is trained there if it is missing.
        """
        # Matrices this small gain little from a second thread, and sums differ with their number.
        torch.set_num_threads(1)
        print(f"policy: the retriever of tiny_retrieval.py, kept in {folder}", flush=True)
        model, _ = noisy_retriever(recipe, folder, is_verbose=True)
        self.folder = model.name_or_path
        self.policy = Path(self.folder).name
        self.chunk_size = recipe.context  # the model is tiny: the whole prompt at once

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        return model, make_tokenizer()

    def rows(self, num_rows: int, prompt_tokens: int, seed: int) -> Dataset:
        return retrieval_rows(num_rows, seed, prompt_tokens)

    def measure(self, model: PreTrainedModel, rows: Dataset) -> HeldOut:
        accuracy = measure_accuracy(model, rows)
        return HeldOut(accuracy.sampled, accuracy.greedy)


class Needles:
    """A fact hidden in real documents (`needles.py`), for a chat model with LoRA.

    The reward is that of `short_and_right`: at least 0.5 if the reply holds the fact.
    """

    reward = staticmethod(short_and_right)
    max_reply_tokens = 16
    chunk_size = 512
    learning_rate = 6e-4
    num_held_out = 16

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        """
        Args:
            model: Hub id or folder of a chat model.
            dtype: of the frozen weights and of autocast.
        """
        self.policy, self.dtype = model, dtype
        self.is_bf16 = dtype is torch.bfloat16
        self.is_on_cpu = not torch.cuda.is_available()
        self.peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        model = AutoModelForCausalLM.from_pretrained(self.policy, dtype=self.dtype)
        return model.to("cpu" if self.is_on_cpu else "cuda"), self.tokenizer

    def rows(self, num_rows: int, prompt_tokens: int, seed: int) -> Dataset:
        return make_dataset(self.tokenizer, num_rows, prompt_tokens, seed)

    @torch.no_grad()
    def measure(self, model: PreTrainedModel, rows: Dataset, num_samples: int = 8) -> HeldOut:
        engine = Engine(model, EngineConfig(chunk_size=self.chunk_size))
        was_training = model.training
        model.eval()
        sampled, greedy = [], []
        with torch.random.fork_rng():
            torch.manual_seed(HELD_OUT_SEED)
            for row in rows:
                sampled += self._rewards(engine, row, num_samples, do_sample=True, top_k=0)
                greedy += self._rewards(engine, row, 1, do_sample=False)
                engine.release()
        model.train(was_training)
        return HeldOut(sum(sampled) / len(sampled), sum(greedy) / len(greedy))

    def _rewards(
        self, engine: Engine, row: dict[str, object], num_replies: int, **sampling: object
    ) -> list[float]:
        prompt = self.tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )[0].to("cpu" if self.is_on_cpu else "cuda")
        output = generate(
            engine, prompt, num_replies, max_new_tokens=self.max_reply_tokens, **sampling
        )
        texts = self.tokenizer.batch_decode(output[:, prompt.numel() :], skip_special_tokens=True)
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        return short_and_right(completions, [str(row["answer"])] * num_replies)
