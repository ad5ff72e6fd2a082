"""`examples/train_grpo.py` with adapters where the paper has them in GLM-5.2; `run.sh` starts it.

Options are those of `train_grpo.py`. What they leave open is LoRA's targets: attention's
projections, dense layers and shared experts. Base weights, embeddings, norms, routers and indexers
stay as they are. The paper has adapters on routed experts and on the output head too: AutoEP
divides experts without adapters, and TRL refuses one on `lm_head`.

Feed-forward weights are named as parameters, and not as modules: in this family PEFT 0.21 takes a
module called `gate_proj`, `up_proj` or `down_proj` for the routed experts' weight, wherever it is,
and would leave dense layers and shared experts without adapters. That is why the launch is ZeRO-0:
under ZeRO-3 PEFT adds to a weight that is not there yet, and under ZeRO-1 and 2 DeepSpeed asks for
trained experts.
"""

from trl import ModelConfig, TrlParser

from examples.train_grpo import ScriptArguments, main
from trl_integration import LongStrawGRPOConfig

ATTENTION = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
FEED_FORWARD = [
    f"{owner}.{name}_proj.weight"
    for owner in ("mlp", "mlp.shared_experts")
    for name in ("gate", "up", "down")
]
ROUTED_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
"""For `--lora_target_parameters`, where each process has all experts."""


def make_parser() -> TrlParser:
    """The parser of the run's options."""
    parser = TrlParser((ScriptArguments, LongStrawGRPOConfig, ModelConfig))
    parser.set_defaults(
        lora_dropout=0.0,  # TRL's 0.05 is refused: a replay would draw a new mask
        lora_target_modules=ATTENTION,
        lora_target_parameters=FEED_FORWARD,
    )
    return parser


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
