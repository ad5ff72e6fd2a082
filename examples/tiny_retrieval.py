"""A policy so small that GRPO visibly improves it within a test: it looks up a value in its prompt.

A prompt is filler words with four entries such as "apple 42 ." scattered among them, ending in the
question "? apple"; the right reply is "42". The policy, a Llama of 391K parameters over a tokenizer
of 246 words, learns by supervised training to retrieve, and is then spoiled on purpose: a teacher
that names another entry's value 6 times out of 10 leaves it right about one time in four when
sampled. It can retrieve and does not always want to, which is head-room for a reward.

    model, tokenizer = noisy_retriever(LONG_CONTEXTS, "out/retriever")
    trainer = LongStrawGRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=exact_match,
        train_dataset=retrieval_rows(160, seed=0, context=1024), ...)
"""

import hashlib
import inspect
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FILLER = sorted(
    set(
        """
        the of and to in a is that it was for on are as with his they at be this from I have or by
        one had not but what all were when we there can an your which their said if do will each
        about how up out them then she many some so these would other into has more her two like him
        see time could no make than first been its who now people my made over did down only way
        find use may water long little very after words called just where most know
        """.split()
    )
)
KEYS = """
    apple river stone cloud tiger piano lemon eagle maple robin ocean candle silver garden window
    bridge copper velvet meadow falcon harbor island jacket kettle ladder marble needle orange
    pepper quartz ribbon saddle temple urchin violet walnut yellow zebra anchor basket
    """.split()
VALUES = [f"{value:02d}" for value in range(100)]
MARKS = ["[", "]", "=", "?", "."]
VOCABULARY = ["<pad>", "<eos>", "<unk>", *VALUES, *MARKS, *KEYS, *FILLER]

Words = list[str]
Example = tuple[Words, list[bool]]
"""Words of one training text, and for each word whether it is to be learned."""


@dataclass(frozen=True)
class Recipe:
    """How the noisy retriever is made. Equal recipes give equal policies.

    The order of the three phases matters: starting with questions in filler stays at chance for
    hundreds of steps, as does training on noise before retrieval has formed.
    """

    seed: int = 0
    context: int = 256  # words of the longest prompt
    least_context: int = 128  # once `context` is reached, lengths are drawn from here to there
    num_entries: int = 4  # key-value pairs in it
    tight_steps: int = 150  # 1: "k v k v ... k v k v", no filler; retrieval forms at about step 100
    grow_steps: int = 200  # 2: filler and questions, context grown geometrically
    noisy_steps: int = 40  # 3: the teacher is wrong with probability `noise`
    noise: float = 0.6
    num_questions: int = 8  # asked of one context in phases 2 and 3
    tokens_per_step: int = 4096
    max_batch: int = 64
    learning_rate: float = 2e-3


LONG_CONTEXTS = Recipe(context=4096, least_context=512, grow_steps=320, noisy_steps=60)
"""A policy for prompts of 512 to 4,096 words; its training takes about 6 CPU minutes."""


def noisy_retriever(
    recipe: Recipe, cache_dir: str | os.PathLike[str], *, is_verbose: bool = False
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Give the policy to improve; it is trained unless `cache_dir` holds it.

    The checkpoint (1.5 MB) is named by a hash of the recipe and of this file, so a change to either
    trains again. It is written beside its place and renamed; a folder that exists is complete. The
    default recipe takes about 60 CPU seconds.

    Args:
        is_verbose: print a line for every 20 steps of the training.
    """
    folder = Path(cache_dir) / f"noisy-retriever-{recipe_hash(recipe)}"
    tokenizer = make_tokenizer()
    if not folder.is_dir():
        model = make_model(recipe.seed)
        train_supervised(model, recipe, is_verbose)
        save(model, folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer


def recipe_hash(recipe: Recipe) -> str:
    """Name a recipe together with the code that follows it."""
    source = inspect.getsource(inspect.getmodule(recipe_hash))
    text = json.dumps(asdict(recipe), sort_keys=True) + source + torch.__version__
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a checkpoint in one step: no reader meets a half-written folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".retriever-", dir=folder.parent))
    model.save_pretrained(staging)
    try:
        staging.rename(folder)
    except OSError:  # another process was faster; its folder holds the same policy
        shutil.rmtree(staging)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word of `VOCABULARY`."""
    ids = {word: index for index, word in enumerate(VOCABULARY)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def make_model(seed: int) -> LlamaForCausalLM:
    """A Llama of two layers with random weights, 391,296 parameters."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=1 << 17,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=VOCABULARY.index("<eos>"),
            pad_token_id=VOCABULARY.index("<pad>"),
        )
    )


# --- texts -------------------------------------------------------------------------------------


def draw_entries(rng: random.Random, num_entries: int) -> dict[str, str]:
    """Distinct keys, each with a value."""
    return {key: rng.choice(VALUES) for key in rng.sample(KEYS, num_entries)}


def scatter(rng: random.Random, entries: dict[str, str], num_words: int) -> Words:
    """Place the entries at random among filler, `num_words` in all."""
    num_filler = max(0, num_words - 3 * len(entries))
    cuts = sorted(rng.randint(0, num_filler) for _ in entries)
    words: Words = []
    for (key, value), start, end in zip(entries.items(), [0, *cuts], cuts, strict=False):
        words += [*rng.choices(FILLER, k=end - start), key, value, "."]
    return words + rng.choices(FILLER, k=num_filler - cuts[-1])


def retrieval_rows(num_rows: int, seed: int, context: int = 256, num_entries: int = 4) -> Dataset:
    """Prompts of `context` words with the right value as `answer`."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        entries = draw_entries(rng, num_entries)
        key = rng.choice(list(entries))
        words = [*scatter(rng, entries, context - 2), "?", key]
        rows.append({"prompt": " ".join(words), "answer": entries[key]})
    return Dataset.from_list(rows)


def exact_match(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """Reward 1 for the value that was asked for, 0 for anything else."""
    return [float(reply.strip() == value) for reply, value in zip(completions, answer, strict=True)]


# --- supervised training -----------------------------------------------------------------------


def train_supervised(model: LlamaForCausalLM, recipe: Recipe, is_verbose: bool = False) -> None:
    """Run the three phases of the recipe on `model`, in place."""
    rng, start = random.Random(recipe.seed), time.perf_counter()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    for step, batch in enumerate(supervised_batches(recipe, rng)):
        is_noisy = step >= recipe.tight_steps + recipe.grow_steps
        scale = 0.3 if is_noisy else min(1.0, (step + 1) / 30)
        for group in optimizer.param_groups:
            group["lr"] = scale * recipe.learning_rate
        loss = supervised_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_verbose and (step + 1) % 20 == 0:
            print(
                f"retriever: step {step + 1:3d}, {len(batch)} texts of {len(batch[0][0]):,} words, "
                f"loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )


def supervised_loss(model: LlamaForCausalLM, batch: list[Example]) -> torch.Tensor:
    """Mean cross-entropy of the words to learn; only their logits are computed."""
    ids = {word: index for index, word in enumerate(VOCABULARY)}
    tokens = torch.tensor([[ids[word] for word in words] for words, _ in batch])
    is_target = torch.tensor([targets for _, targets in batch])[:, 1:]
    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
    return F.cross_entropy(model.lm_head(hidden[is_target]), tokens[:, 1:][is_target])


def supervised_batches(recipe: Recipe, rng: random.Random) -> Iterator[list[Example]]:
    """Yield the batches of phases 1 to 3."""
    for _ in range(recipe.tight_steps):
        yield [tight_example(rng, recipe) for _ in range(recipe.max_batch)]
    shortest = 3 * recipe.num_entries + 2
    for step in range(recipe.grow_steps):
        growth = min(1.0, (step + 1) / (0.8 * recipe.grow_steps))
        longest = int(shortest * (recipe.context / shortest) ** growth)
        num_words = rng.randint(recipe.least_context if growth == 1.0 else shortest, longest)
        yield question_batch(rng, recipe, num_words, noise=0.0)
    for _ in range(recipe.noisy_steps):
        num_words = rng.randint(recipe.least_context, recipe.context)
        yield question_batch(rng, recipe, num_words, noise=recipe.noise)


def tight_example(rng: random.Random, recipe: Recipe) -> Example:
    """All entries without filler, then all again in another order, values to be learned."""
    entries = draw_entries(rng, recipe.num_entries)
    again = rng.sample(list(entries), len(entries))
    words = [word for key in [*entries, *again] for word in (key, entries[key])]
    return words, [False, False] * len(entries) + [False, True] * len(entries)


def question_batch(
    rng: random.Random, recipe: Recipe, num_words: int, noise: float
) -> list[Example]:
    """As many texts of `num_words` plus questions as `recipe.tokens_per_step` pays for."""
    num_tokens = num_words + 4 * recipe.num_questions
    size = max(8, min(recipe.max_batch, recipe.tokens_per_step // num_tokens))
    return [question_example(rng, recipe, num_words, noise) for _ in range(size)]


def question_example(rng: random.Random, recipe: Recipe, num_words: int, noise: float) -> Example:
    """A context and questions on it, keys drawn with replacement, replies to be learned."""
    entries = draw_entries(rng, recipe.num_entries)
    words = scatter(rng, entries, num_words - 2)
    targets = [False] * len(words)
    for _ in range(recipe.num_questions):
        key = rng.choice(list(entries))
        others = [other for other in entries if other != key]
        source = rng.choice(others) if rng.random() < noise else key
        words += ["?", key, entries[source], "<eos>"]
        targets += [False, False, True, True]
    return words, targets


# --- measuring ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accuracy:
    """How often replies to held-out prompts are right."""

    sampled: float  # expected, of a reply sampled at temperature 1: no sampling noise in it
    greedy: float  # of the likeliest reply


@torch.no_grad()
def measure_accuracy(model: LlamaForCausalLM, rows: Dataset, batch_size: int = 8) -> Accuracy:
    """The probability of the right reply, and whether it is the greedy one, as means over `rows`.

    The right reply is one value and the end of the sequence. Its probability stands in the logits
    after the prompt and after the value; a mean over samples would have noise on top.

    Args:
        rows: of `retrieval_rows`, all of one length.
    """
    ids = {word: index for index, word in enumerate(VOCABULARY)}
    was_training = model.training
    model.eval()
    sampled = greedy = 0.0
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        texts = zip(batch["prompt"], batch["answer"], strict=True)
        tokens = torch.tensor(
            [[ids[word] for word in (*prompt.split(), value, "<eos>")] for prompt, value in texts]
        )
        logits = model(tokens[:, :-1], use_cache=False, logits_to_keep=2).logits
        logps = logits.log_softmax(-1).gather(-1, tokens[:, -2:, None])
        sampled += float(logps.sum(1).exp().sum())
        greedy += float((logits.argmax(-1) == tokens[:, -2:]).all(1).sum())
    model.train(was_training)
    return Accuracy(sampled / len(rows), greedy / len(rows))
