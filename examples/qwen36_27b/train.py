"""`examples/train_grpo.py` for a checkpoint with a vision tower: its text model alone is loaded.

TRL loads the class that the checkpoint names. That of Qwen3.6 includes the vision tower, to which
`all-linear` would add adapters that no text ever reaches, and its processor takes images. Options
are those of `train_grpo.py`; `run.sh` gives them.
"""

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from examples.train_grpo import ScriptArguments, load_reward, load_split
from trl_integration import LongStrawGRPOConfig, LongStrawGRPOTrainer


def make_parser() -> TrlParser:
    """The parser of the run's options."""
    parser = TrlParser((ScriptArguments, LongStrawGRPOConfig, ModelConfig))
    parser.set_defaults(lora_dropout=0.0)  # TRL's 0.05 is refused: a replay would draw a new mask
    return parser


def load_model(model_args: ModelConfig) -> PreTrainedModel:
    """The text model, quantized as the options say, on this process's device."""
    return AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        dtype=model_args.dtype,
        quantization_config=get_quantization_config(model_args),
    )


def main(
    script_args: ScriptArguments, training_args: LongStrawGRPOConfig, model_args: ModelConfig
) -> None:
    """Build the trainer, train, save the adapter."""
    source = (script_args.dataset_name, script_args.dataset_config)
    eval_split = script_args.eval_split
    trainer = LongStrawGRPOTrainer(
        model=load_model(model_args),
        processing_class=AutoTokenizer.from_pretrained(
            model_args.model_name_or_path,
            revision=model_args.model_revision,
            truncation_side="left",
            padding_side="left",
        ),
        reward_funcs=[load_reward(path) for path in script_args.reward_funcs],
        args=training_args,
        train_dataset=load_split(*source, script_args.dataset_split, script_args.dataset_streaming),
        eval_dataset=load_split(*source, eval_split) if eval_split else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
