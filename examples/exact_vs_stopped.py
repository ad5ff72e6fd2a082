"""Does the gradient through the prompt matter? Train the same policy with it and without it.

    python examples/exact_vs_stopped.py
    python examples/exact_vs_stopped.py --model Qwen/Qwen3-0.6B --prompt_tokens 8192 --steps 40

One checkpoint, and for each seed two runs with the same prompts, sampling and settings;
`longstraw_prompt_gradient` is "exact" in one and "stopped" in the other. By default the checkpoint
is a tiny retriever that is trained first, and all of it takes about 20 minutes on one CPU core.

In the output folder: `exact_vs_stopped.png`, `.md` (the table) and `.json` (everything), the
checkpoint, and one file for each run, which is not run again when the script is. After a change to
the code, name another folder.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from transformers import HfArgumentParser, PrinterCallback, TrainerCallback

from comparison import MAX_GRAD_NORM, Comparison, HeldOut, Run, make_table, plot, write_json
from tasks import HELD_OUT_SEED, Needles, Task, TinyRetrieval
from tiny_retrieval import LONG_CONTEXTS
from trl_integration import LongStrawGRPOConfig, LongStrawGRPOTrainer

Reward = Callable[..., list[float]]


@dataclass
class Arguments:
    """What can be chosen on the command line."""

    output_dir: str = field(
        default="out/exact_vs_stopped", metadata={"help": "Folder of all results."}
    )
    model: str | None = field(
        default=None,
        metadata={
            "help": "Hub id or folder of a chat model: trains LoRA on a fact hidden in documents. "
            "Default: a tiny retriever, trained here."
        },
    )
    dtype: str = field(
        default="bfloat16",
        metadata={"help": "Of --model.", "choices": ["float32", "bfloat16"]},
    )
    prompt_tokens: list[int] = field(
        default_factory=lambda: [1024, 4096], metadata={"help": "Prompt lengths to compare at."}
    )
    steps: list[int] = field(
        default_factory=lambda: [40],
        metadata={"help": "Optimizer steps of a run: one number, or one for each prompt length."},
    )
    seeds: int = field(default=5, metadata={"help": "Pairs of runs at each length."})
    controls: list[str] = field(
        default_factory=list,
        metadata={
            "help": "More runs at each length, GRADIENT:RATE:STEPS. stopped:2:1 is the "
            "stopped gradient at twice the learning rate, stopped:1:2 with twice the steps, "
            "exact:0:1 no training."
        },
    )
    control_seeds: int = field(default=3, metadata={"help": "Seeds of each control."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Of both gradients. Default: the task's."}
    )
    num_prompts: int = field(default=4, metadata={"help": "Prompts in a step."})
    num_generations: int = field(default=8, metadata={"help": "Replies sampled for each prompt."})
    held_out: int | None = field(
        default=None, metadata={"help": "Prompts that measure a policy. Default: the task's."}
    )


@dataclass(frozen=True)
class Plan:
    """One run that is to be made. Equal plans give equal runs, on one machine.

    Attributes:
        policy: the checkpoint's name.
        versions: of what decides the numbers besides this repository.
    """

    policy: str
    prompt_gradient: str
    lr_scale: float
    steps_scale: float
    prompt_tokens: int
    seed: int
    steps: int
    learning_rate: float
    num_prompts: int
    num_generations: int
    num_held_out: int
    versions: tuple[str, ...] = (torch.__version__, transformers.__version__, trl.__version__)

    @property
    def file_name(self) -> str:
        """Of the result: what differs between the runs of one comparison."""
        kind = f"{self.prompt_gradient}-rate{self.lr_scale:g}-steps{self.steps_scale:g}"
        return f"{self.prompt_tokens}-seed{self.seed}-{kind}.json"


def main() -> None:
    """Read the command line, make or load the checkpoint, compare."""
    parser = HfArgumentParser(Arguments)
    (options,) = parser.parse_args_into_dataclasses()
    compare(options, make_task(options))


def compare(options: Arguments, task: Task) -> list[Comparison]:
    """Make all runs, or read those that are there, and report."""
    folder = Path(options.output_dir)
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    plans = make_plans(options, task)
    print(f"{len(plans)} runs", flush=True)
    runs = [find_or_train(task, plan, folder / "runs") for plan in plans]
    comparisons = [
        Comparison([run for run in runs if run.prompt_tokens == prompt_tokens])
        for prompt_tokens in options.prompt_tokens
    ]
    table = "\n\n".join(map(make_table, comparisons)) + "\n"
    print("\n" + table)
    (folder / "exact_vs_stopped.md").write_text(table)
    write_json(asdict(options), comparisons, folder / "exact_vs_stopped.json")
    plot(comparisons, folder / "exact_vs_stopped.png")
    return comparisons


def make_task(options: Arguments) -> Task:
    """The task that the options name; the tiny one's checkpoint is trained if it is missing."""
    if options.model is not None:
        return Needles(options.model, getattr(torch, options.dtype))
    longest = max(options.prompt_tokens)
    recipe = replace(LONG_CONTEXTS, context=max(longest, LONG_CONTEXTS.context))
    return TinyRetrieval(recipe, Path(options.output_dir, "checkpoint"))


def make_plans(options: Arguments, task: Task) -> list[Plan]:
    """All runs in their order: the pairs of each length, then the controls of each.

    Raises:
        ValueError: the numbers of steps and of lengths do not fit, or a control is not of the form
            GRADIENT:RATE:STEPS.
    """
    lengths, steps = options.prompt_tokens, options.steps
    if len(steps) not in (1, len(lengths)):
        raise ValueError(
            f"--steps has {len(steps)} numbers for {len(lengths)} prompt lengths. Give one for "
            "all, or one for each."
        )
    plain = Plan(
        policy=task.policy,
        prompt_gradient="exact",
        lr_scale=1.0,
        steps_scale=1.0,
        prompt_tokens=lengths[0],
        seed=0,
        steps=steps[0],
        learning_rate=options.learning_rate or task.learning_rate,
        num_prompts=options.num_prompts,
        num_generations=options.num_generations,
        num_held_out=options.held_out or task.num_held_out,
    )
    firsts = [
        replace(plain, prompt_tokens=length, steps=num)
        for length, num in zip(lengths, steps * (len(lengths) // len(steps)), strict=True)
    ]
    pairs = [
        replace(first, seed=seed, prompt_gradient=gradient)
        for first in firsts
        for seed in range(options.seeds)
        for gradient in ("exact", "stopped")
    ]
    controls = [
        replace(control, seed=seed, steps=round(control.steps_scale * control.steps))
        for first in firsts
        for control in (replace(first, **parse_control(text)) for text in options.controls)
        for seed in range(options.control_seeds)
    ]
    return pairs + controls


def parse_control(text: str) -> dict[str, str | float]:
    """Read "stopped:2:1" as the fields of a plan: the gradient, scales of rate and of steps."""
    gradient, *scales = text.split(":")
    try:
        rate, steps = map(float, scales)
    except ValueError:
        rate = steps = 1.0
    if gradient not in ("exact", "stopped") or (rate, steps) == (1.0, 1.0) or steps <= 0:
        raise ValueError(
            f"--controls {text!r}: give exact or stopped, and what the learning rate and the steps "
            "are multiplied by (not both by 1: those runs are there), for example stopped:2:1."
        )
    return {"prompt_gradient": gradient, "lr_scale": rate, "steps_scale": steps}


# --- one run -----------------------------------------------------------------------------------


def find_or_train(task: Task, plan: Plan, folder: Path) -> Run:
    """The run of `plan`: read if its file is there and of the same plan, else made and written."""
    path, settings = folder / plan.file_name, json.loads(json.dumps(asdict(plan)))
    if path.is_file():
        found = json.loads(path.read_text())
        if found["plan"] == settings:
            print(f"{path.name}: found", flush=True)
            values = found["run"]
            held_out = {name: HeldOut(**values[name]) for name in ("before", "after")}
            return Run(**{**values, **held_out})
        print(f"{path.name}: of other settings, made again", flush=True)
    run = train(task, plan, folder)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps({"plan": settings, "run": asdict(run)}, indent=1) + "\n")
    unfinished.rename(path)
    print(
        f"{path.name}: reward {run.rewards[0]:.2f} -> {run.rewards[-1]:.2f}, held-out prompts "
        f"{run.before.sampled:.2f} -> {run.after.sampled:.2f} sampled, {run.before.greedy:.2f} -> "
        f"{run.after.greedy:.2f} greedy, {run.seconds:.0f} s",
        flush=True,
    )
    return run


def train(task: Task, plan: Plan, folder: Path) -> Run:
    """Load the checkpoint, train it, measure it."""
    torch.manual_seed(plan.seed)  # the adapter's weights are drawn before the trainer seeds
    model, tokenizer = task.load()
    digests: list[tuple[str, str]] = []
    trainer = LongStrawGRPOTrainer(
        model=model,
        reward_funcs=recorded(task.reward, digests),
        args=make_config(task, plan, folder),
        train_dataset=task.rows(plan.num_prompts * plan.steps, plan.prompt_tokens, plan.seed),
        processing_class=tokenizer,
        peft_config=task.peft_config,
    )
    trainer.remove_callback(PrinterCallback)  # prints every metric of every step
    trainer.add_callback(ProgressLine(plan))
    unseen = held_out_rows(task, plan.prompt_tokens, plan.num_held_out)
    before = measure_before(task, unseen)
    torch.manual_seed(plan.seed)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    return Run(
        prompt_gradient=plan.prompt_gradient,
        lr_scale=plan.lr_scale,
        steps_scale=plan.steps_scale,
        prompt_tokens=plan.prompt_tokens,
        seed=plan.seed,
        rewards=[entry["reward"] for entry in steps],
        grad_norms=[float(entry["grad_norm"]) for entry in steps],
        before=before,
        after=task.measure(trainer.model, unseen),
        prompts_digest=digest([prompts for prompts, _ in digests]),
        first_replies_digest=digests[0][1],
        seconds=seconds,
    )


def make_config(task: Task, plan: Plan, folder: Path) -> LongStrawGRPOConfig:
    """The trainer's settings: those of the plan, and else TRL's defaults."""
    return LongStrawGRPOConfig(
        output_dir=str(folder),
        longstraw_prompt_gradient=plan.prompt_gradient,
        max_steps=plan.steps,
        learning_rate=plan.lr_scale * plan.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        per_device_train_batch_size=plan.num_prompts * plan.num_generations,
        num_generations=plan.num_generations,
        max_completion_length=task.max_reply_tokens,
        gradient_checkpointing=False,
        bf16=task.is_bf16,
        use_cpu=task.is_on_cpu,
        longstraw_chunk_size=task.chunk_size,
        longstraw_replay_batch=plan.num_generations,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=plan.seed,
    )


@functools.cache
def held_out_rows(task: Task, prompt_tokens: int, num_rows: int) -> Dataset:
    """The prompts that measure a policy, the same for every run of a length."""
    return task.rows(num_rows, prompt_tokens, HELD_OUT_SEED)


@functools.cache
def measure_before(task: Task, unseen: Dataset) -> HeldOut:
    """The checkpoint on the held-out prompts."""
    model, _ = task.load()
    return task.measure(model, unseen)


def recorded(reward: Reward, digests: list[tuple[str, str]]) -> Reward:
    """`reward`, which also notes what it was shown: a digest of prompts and of replies per call.

    One call is one step, and two runs that were shown the same give the same digests.
    """

    @functools.wraps(reward)
    def record(**columns: object) -> list[float]:
        digests.append((digest(columns["prompts"]), digest(columns["completion_ids"])))
        return reward(**columns)

    return record


def digest(values: object) -> str:
    """A short name for plain values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


class ProgressLine(TrainerCallback):
    """Prints a line for every ten steps."""

    def __init__(self, plan: Plan) -> None:
        self.name = plan.file_name.removesuffix(".json")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs and state.global_step % 10 == 0:
            print(
                f"  {self.name}: step {state.global_step}/{state.max_steps}, reward "
                f"{logs['reward']:.2f}, {logs['step_time']:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
