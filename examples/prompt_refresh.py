"""Eight optimizer steps on one long prompt, under each policy of refreshing its captured state.

    python examples/prompt_refresh.py
    python examples/prompt_refresh.py --model ~/.cache/longstraw/smollm2-135m-instruct

Same weights, prompt, sampling and settings; what differs is `longstraw_prompt_refresh`. For each
policy: how often the prompt was captured, seconds of its capture and of the whole update, the mean
reward of the first and the last step, and for each step the drift: how far the loss and the
log-probs of the replies are from those on a state captured now, with the adapter on. The reward is
the share of a reply's characters that are digits. The default model is a random Llama of 391K
parameters; all five runs take about a minute on one CPU core. A new adapter adds nothing, so the
first state of "8" is that of "never", and these two runs are one.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    set_seed,
)

from tiny_retrieval import make_model, make_tokenizer, retrieval_rows
from trl_integration import LongStrawGRPOConfig, LongStrawGRPOTrainer

POLICIES = ("every_step", "2", "4", "8", "never")
NUM_STEPS = 8


@dataclass
class Arguments:
    """What can be chosen on the command line."""

    model: str | None = field(
        default=None, metadata={"help": "Hub id or folder. Default: a tiny random Llama."}
    )
    prompt_words: int = field(default=4096, metadata={"help": "Words of the prompt."})
    num_generations: int = field(default=8, metadata={"help": "Replies sampled in each step."})
    max_completion_length: int = field(default=16, metadata={"help": "Most tokens in a reply."})
    learning_rate: float = field(default=3e-3, metadata={"help": "Of the LoRA weights."})
    chunk_size: int = field(default=512, metadata={"help": "Tokens run at a time."})
    seed: int = field(default=0, metadata={"help": "Of the prompt, the adapter and the sampling."})


@dataclass(frozen=True)
class Run:
    """One policy's eight steps; lists have one number for each step."""

    policy: str
    captures: int
    capture_seconds: float
    update_seconds: float  # generation included, the measuring of the drift not
    rewards: list[float]
    loss_drift: list[float]
    logps_drift: list[float]  # mean over reply tokens


def main() -> None:
    """Run all policies and print the tables."""
    (options,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    runs = [train(policy, options) for policy in POLICIES]
    print(f"\n{'policy':12s}{'captures':>10s}{'capture s':>11s}{'update s':>10s}{'reward':>16s}")
    for run in runs:
        rewards = f"{run.rewards[0]:.3f} -> {run.rewards[-1]:.3f}"
        print(
            f"{run.policy:12s}{run.captures:10d}{run.capture_seconds:11.2f}"
            f"{run.update_seconds:10.2f}{rewards:>16s}"
        )
    print_steps("mean |drift| of a reply token's log-prob", {r.policy: r.logps_drift for r in runs})
    print_steps("drift of the loss", {r.policy: r.loss_drift for r in runs})


def train(policy: str, options: Arguments) -> Run:
    """Eight steps under one policy."""
    set_seed(options.seed)
    tokenizer, model = load(options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(policy, options, tokenizer, model, Path(folder))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    phases = {row["phase"]: float(str(row["seconds"])) for row in trainer.engine.ledger.table()}
    phases.pop("prompt_drift")
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    drift = "longstraw/prompt_drift"
    return Run(
        policy,
        trainer.engine.ledger.num_captures,
        phases["capture"],
        sum(phases.values()),
        [entry["reward"] for entry in steps],
        [entry[f"{drift}/loss"] for entry in steps],
        [entry[f"{drift}/logps_mean"] for entry in steps],
    )


def load(options: Arguments) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """The same tokenizer and weights at every call."""
    if options.model is None:
        return make_tokenizer(), make_model(options.seed)
    source = str(Path(options.model).expanduser())
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(source, padding_side="left"), model


def make_trainer(
    policy: str,
    options: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    folder: Path,
) -> LongStrawGRPOTrainer:
    """A trainer of `NUM_STEPS` steps on one prompt."""
    args = LongStrawGRPOConfig(
        output_dir=str(folder),
        max_steps=NUM_STEPS,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=options.num_generations,
        num_generations=options.num_generations,
        max_completion_length=options.max_completion_length,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        longstraw_chunk_size=options.chunk_size,
        longstraw_prompt_gradient="stopped",  # what all policies can have
        longstraw_prompt_refresh=policy,
        longstraw_log_prompt_drift=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
    )
    return LongStrawGRPOTrainer(
        model=model,
        reward_funcs=share_of_digits,
        args=args,
        train_dataset=retrieval_rows(1, options.seed, options.prompt_words),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )


def share_of_digits(completions: list[str], **kwargs: object) -> list[float]:
    """Of the characters of each reply that are no spaces, the share that are digits."""
    texts = ["".join(reply.split()) for reply in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


def print_steps(title: str, rows: dict[str, list[float]]) -> None:
    """One line of `NUM_STEPS` numbers for each policy."""
    steps = "".join(f"{step:10d}" for step in range(1, NUM_STEPS + 1))
    print(f"\n{title}\n{'step':12s}{steps}")
    for policy, values in rows.items():
        print(f"{policy:12s}" + "".join(f"{value:10.5f}" for value in values))


if __name__ == "__main__":
    main()
