"""How far the stopped gradient is from the exact one: on a real model, by prompt length and layer.

    python examples/gradient_gap.py
    python examples/gradient_gap.py --model Qwen/Qwen3-0.6B --prompt_tokens 2048 32768

Each prompt hides a fact in real documents. Replies are sampled, rewarded and turned into GRPO's
advantages; the gradient of the policy loss is then taken twice from the same tensors, with the
prompt's gradient and with the prompt held constant. No weight changes. The default model and
lengths take about 12 minutes on one CPU core.

In the output folder: `gradient_gap.png`, `.md` (the table) and `.json` (everything).
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from comparison import Spread, cut, plt
from longstraw import Engine, EngineConfig, GroupScores, PromptGroup, generate
from needles import MARGIN, make_dataset, short_and_right
from smollm2 import load_smollm2

Gradient = dict[str, Tensor]


@dataclass
class Arguments:
    """What can be chosen on the command line."""

    output_dir: str = field(default="out/gradient_gap", metadata={"help": "Folder of the results."})
    model: str | None = field(
        default=None,
        metadata={"help": "Hub id or folder. Default: SmolLM2-135M-Instruct from its wheel."},
    )
    prompt_tokens: list[int] = field(
        default_factory=lambda: [128, 512, 2048, 4096], metadata={"help": "Prompt lengths."}
    )
    prompts: int = field(default=3, metadata={"help": "Prompts of each length."})
    num_generations: int = field(default=8, metadata={"help": "Replies sampled for each prompt."})
    max_completion_length: int = field(default=16, metadata={"help": "Most tokens in a reply."})
    chunk_size: int = field(default=512, metadata={"help": "Tokens run at a time."})
    seed: int = field(default=0, metadata={"help": "Of the prompts and the sampling."})


@dataclass(frozen=True)
class Gap:
    """The stopped gradient seen from the exact one, over some of the parameters."""

    cosine: float
    relative_error: float  # |stopped - exact| / |exact|
    norm_ratio: float  # |stopped| / |exact|


@dataclass(frozen=True)
class PromptGaps:
    """The gaps of one prompt."""

    prompt_tokens: int
    rewards: list[float]  # of its replies
    whole: Gap  # over all parameters
    by_projection: dict[str, Gap]
    by_layer: list[Gap]
    seconds: float


# --- the measurement ---------------------------------------------------------------------------


def main() -> None:
    """Measure every prompt of every length, and report."""
    parser = HfArgumentParser(Arguments)
    (options,) = parser.parse_args_into_dataclasses()
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    source = options.model or str(load_smollm2())
    tokenizer = AutoTokenizer.from_pretrained(source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # fp32: in half precision rounding would be part of the gap.
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device)
    found = []
    for prompt_tokens in options.prompt_tokens:
        found += measure_length(model, tokenizer, prompt_tokens, options)
    table = make_table(found) + "\n"
    print("\n" + table)
    (folder / "gradient_gap.md").write_text(table)
    values = {"settings": asdict(options), "prompts": [asdict(gaps) for gaps in found]}
    (folder / "gradient_gap.json").write_text(json.dumps(values, indent=1) + "\n")
    plot(found, Path(source).name, folder / "gradient_gap.png")
    print(f"wrote {folder}/gradient_gap.md, .json and .png")


def measure_length(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    options: Arguments,
) -> list[PromptGaps]:
    """The gaps of `options.prompts` prompts of one length.

    A prompt whose replies are all equally good has no gradient; the next one takes its place, and
    a line says so.
    """
    torch.manual_seed(options.seed)
    config = EngineConfig("stopped", options.chunk_size, replay_batch=options.num_generations)
    rows = make_dataset(tokenizer, 5 * options.prompts, prompt_tokens, options.seed)
    found: list[PromptGaps] = []
    for row in rows:
        start = time.perf_counter()
        ids = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )[0].to(model.device)
        model.eval()
        engine = Engine(model, config)
        group, rewards = sample_group(engine, tokenizer, ids, row["answer"], options)
        if max(rewards) == min(rewards):
            print(f"{len(ids):,} tokens: all replies have reward {rewards[0]:.2f}, skipped")
            continue
        # on the state of the prompt that the replies were sampled from
        stopped = gradient(model, engine, group, rewards)
        engine = Engine(model, replace(config, prompt_gradient="exact"))
        exact = gradient(model, engine, group, rewards)
        found.append(compare(exact, stopped, len(ids), rewards, time.perf_counter() - start))
        whole = found[-1].whole
        print(
            f"{len(ids):,} tokens: cosine {whole.cosine:.3f}, relative error "
            f"{whole.relative_error:.3f}, norm ratio {whole.norm_ratio:.3f}, "
            f"{found[-1].seconds:.0f} s",
            flush=True,
        )
        if len(found) == options.prompts:
            return found
    raise RuntimeError(
        f"{len(found)} of {len(rows)} prompts of {prompt_tokens:,} tokens had replies of different "
        f"reward, and {options.prompts} are needed: without a difference there is no gradient. "
        "Raise --num_generations, or take a model that is right now and then."
    )


def sample_group(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Tensor,
    answer: str,
    options: Arguments,
) -> tuple[PromptGroup, list[float]]:
    """Replies to one prompt at temperature 1, up to their end, and their rewards."""
    output = generate(
        engine,
        prompt_ids,
        options.num_generations,
        max_new_tokens=options.max_completion_length,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
    )
    replies = [until_end(ids, tokenizer.eos_token_id) for ids in output[:, len(prompt_ids) :]]
    texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = short_and_right(completions, [answer] * len(texts))
    return PromptGroup(prompt_ids, replies), rewards


def until_end(ids: Tensor, end: int) -> Tensor:
    """`ids` up to and with the first `end`."""
    ends = (ids == end).nonzero()
    return ids[: int(ends[0]) + 1] if len(ends) else ids


def gradient(
    model: PreTrainedModel, engine: Engine, group: PromptGroup, rewards: list[float]
) -> Gradient:
    """The policy gradient of one group, by parameter.

        loss = -sum_it(advantage_i * logp_it) / number of tokens
        advantage_i = (reward_i - mean) / (std + 1e-4)

    GRPO's loss where the policy is the one that sampled: every ratio is 1 and nothing is clipped.
    """
    scores = torch.tensor(rewards, device=group.prompt_ids.device)
    advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
    num_tokens = sum(ids.numel() for ids in group.completion_ids)

    def loss_of(groups: list[GroupScores]) -> Tensor:
        return -(advantages[:, None] * groups[0].logps).sum() / num_tokens

    engine.accumulate([group], loss_of)
    engine.finalize()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()  # lets go of the tensors that `found` keeps
    return found


# --- comparing ---------------------------------------------------------------------------------


def compare(
    exact: Gradient, stopped: Gradient, prompt_tokens: int, rewards: list[float], seconds: float
) -> PromptGaps:
    """The gaps between two gradients, whole and by part."""
    layers = sorted({layer for name in exact if (layer := layer_of(name)) is not None})
    # in the order of the model: q, k, v, o, gate, up, down
    projections = dict.fromkeys(part for name in exact if (part := projection_of(name)) is not None)
    return PromptGaps(
        prompt_tokens=prompt_tokens,
        rewards=rewards,
        whole=gap_over(exact, stopped, lambda name: True),
        by_projection={
            part: gap_over(exact, stopped, lambda name, part=part: projection_of(name) == part)
            for part in projections
        },
        by_layer=[
            gap_over(exact, stopped, lambda name, layer=layer: layer_of(name) == layer)
            for layer in layers
        ],
        seconds=seconds,
    )


def gap_over(exact: Gradient, stopped: Gradient, is_part: Callable[[str], bool]) -> Gap:
    """The gap over the parameters whose names `is_part` takes, as if they were one vector."""
    full = difference = rest = product = 0.0
    for name in filter(is_part, exact):
        a, b = exact[name].double(), stopped[name].double()
        full += float(a.square().sum())
        rest += float(b.square().sum())
        difference += float((a - b).square().sum())
        product += float((a * b).sum())
    if full == 0.0 or rest == 0.0:
        raise ValueError("a gradient that is zero has no direction to compare.")
    return Gap(
        cosine=product / (full * rest) ** 0.5,
        relative_error=(difference / full) ** 0.5,
        norm_ratio=(rest / full) ** 0.5,
    )


def layer_of(name: str) -> int | None:
    """The layer that a parameter belongs to; None for embedding, last norm and head."""
    found = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
    return int(found[1]) if found else None


def projection_of(name: str) -> str | None:
    """The projection that a weight is: `q_proj`, ..., `down_proj`."""
    found = re.search(r"\.(\w+_proj)\.weight$", name)
    return found[1] if found else None


# --- reports -----------------------------------------------------------------------------------


def by_length(found: Sequence[PromptGaps]) -> list[list[PromptGaps]]:
    """Prompts of one length together; their lengths differ by less than `needles.MARGIN`."""
    groups: list[list[PromptGaps]] = []
    for gaps in sorted(found, key=lambda gaps: gaps.prompt_tokens):
        if groups and gaps.prompt_tokens - groups[-1][0].prompt_tokens < MARGIN:
            groups[-1].append(gaps)
        else:
            groups.append([gaps])
    return groups


def length_of(group: Sequence[PromptGaps]) -> str:
    """Mean tokens of prompts of one length, as text."""
    return f"{round(mean(gaps.prompt_tokens for gaps in group)):,}"


def thirds(by_layer: Sequence[Gap]) -> dict[str, float]:
    """Mean cosine of the layers of each third, lowest first, by a name such as "layers 0-9"."""
    return {
        f"layers {part.start}-{part.stop - 1}": mean(gap.cosine for gap in by_layer[part])
        for part in cut(len(by_layer), 3)
    }


def parts_of(gaps: PromptGaps) -> dict[str, float]:
    """The cosine of each part of the model, by name."""
    projections = {part: gap.cosine for part, gap in gaps.by_projection.items()}
    return {**projections, **thirds(gaps.by_layer)}


def make_table(found: Sequence[PromptGaps]) -> str:
    """Markdown: the whole gradient by prompt length, then its cosine by part."""
    names = list(parts_of(found[0]))
    whole = [["prompt tokens", "prompts", "cosine", "relative error", "norm ratio"]]
    parts = [["prompt tokens", *names]]
    for group in by_length(found):
        length = length_of(group)
        numbers = [
            [getattr(gaps.whole, name) for gaps in group]
            for name in ("cosine", "relative_error", "norm_ratio")
        ]
        whole.append([length, str(len(group)), *(str(Spread.of(values)) for values in numbers)])
        cosines = [[parts_of(gaps)[name] for gaps in group] for name in names]
        parts.append([length, *(str(Spread.of(values)) for values in cosines)])
    first = "Stopped against exact, mean +- standard deviation over prompts:"
    return "\n".join(
        [first, "", *to_markdown(whole), "", "Cosine by part:", "", *to_markdown(parts)]
    )


def to_markdown(lines: list[list[str]]) -> list[str]:
    """The lines of a table, the first one being its head."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return ["| " + " | ".join(line) + " |" for line in lines]


def plot(found: Sequence[PromptGaps], model: str, path: Path) -> None:
    """Draw the cosine by layer, one line for each prompt length, and that of the whole gradient."""
    figure, (axes, side) = plt.subplots(
        1, 2, figsize=(8.5, 4.2), sharey=True, width_ratios=[3, 1], layout="constrained"
    )
    groups = by_length(found)
    shades = [0.85 * (1 - index / max(1, len(groups) - 1)) for index in range(len(groups))]
    for index, group in enumerate(groups):
        color = plt.get_cmap("viridis")(shades[index])  # the longer, the darker
        by_layer = [
            Spread.of([gap.cosine for gap in layer])
            for layer in zip(*(gaps.by_layer for gaps in group), strict=True)
        ]
        layers, label = range(len(by_layer)), f"{length_of(group)} tokens"
        axes.plot(layers, [s.mean for s in by_layer], color=color, linewidth=2, label=label)
        low, high = [s.low for s in by_layer], [s.high for s in by_layer]
        axes.fill_between(layers, low, high, color=color, alpha=0.1, linewidth=0)
        cosines = [gaps.whole.cosine for gaps in group]
        side.plot([index] * len(cosines), cosines, "o", color=color, markersize=6, alpha=0.8)
    axes.set(xlabel="layer", ylabel="cosine of stopped and exact gradient", ylim=(0, 1.02))
    axes.set_title("by layer: mean and range over prompts", fontsize="medium")
    axes.legend(loc="lower right", frameon=False)
    side.set_xticks(range(len(groups)), [length_of(group) for group in groups], rotation=30)
    side.set(xlabel="prompt tokens", xlim=(-0.6, len(groups) - 0.4))
    side.set_title("whole gradient", fontsize="medium")
    for panel in (axes, side):
        panel.axhline(1, color="black", linewidth=1)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"Gradient without the prompt's part beside the exact one (1: the same), {model}"
    )
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    main()
