"""Experts divided over ranks by DeepSpeed's AutoEP end where undivided ones on one process end.

An optimizer step sees the same two groups however they are run, so truth is one process with both:
stock TRL, or LongStraw for glm_moe_dsa, of whose tied index scores stock TRL takes others, by the
length of the padded row. SGD shows what becomes of a scale, and norms of 1 to 5 against
`max_grad_norm` 1 what becomes of the norm. The tolerance is that of `test_zero`: 1e-4 of each
parameter's movement.

Six experts on two ranks, two per token. Prompts have 1 to 30 tokens in chunks of 8, so ranks send
each other different numbers of tokens, and one that is done makes passes of one token.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from longstraw import ConfigError
from longstraw.backends.expert_parallel import check_expert_layers
from tests.deepspeed.compare import Record, assert_same, error_of, reference_of
from tests.deepspeed.expert_parallel import (
    FEW,
    FOUR,
    LAUNCHES,
    MANY,
    attention_lora,
    run_launch,
)
from tests.deepspeed.jobs import lora
from tests.deepspeed.test_every_backward import LOST
from tests.models import tiny_model
from tests.trl.parity import TOLERANCE, ModelPath, Outcome, log_row, train, worst_parameter
from tests.trl.test_deepspeed_checks import arguments
from trl_integration.deepspeed_checks import (
    check_deepspeed_config,
    check_divided_experts,
    refuse_generation_by_each_rank,
)

TIMEOUT = 600
LAUNCH = {name: launch for launch, jobs in LAUNCHES.items() for name in jobs}
JOBS = {name: job for jobs in LAUNCHES.values() for name, job in jobs.items()}
RIGHT = [name for name, job in JOBS.items() if job.fault is None]
WRONG = [name for name, job in JOBS.items() if job.fault is not None]

Ranks = Callable[[str], list[Record]]
Truth = Callable[[str], Outcome]


def slow_unless_few(names: Any) -> list[Any]:
    """Launches but the first go to `make test-slow`."""
    return [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.fixture(scope="module")
def ranks(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """`ranks(name)`: what each rank left of a job. A launch runs when first asked for, once."""
    done: dict[str, Any] = {}

    def of(name: str) -> list[Record]:
        launch = LAUNCH[name]
        if launch not in done:
            folder = tmp_path_factory.mktemp("experts")
            try:
                done[launch] = run_launch(launch, model_path, folder, timeout=TIMEOUT)
            except AssertionError as error:
                done[launch] = error
            else:
                done[launch]["saved"] = folder / "saved"
        if isinstance(done[launch], AssertionError):
            raise done[launch]  # also for those who ask later, instead of hanging again
        return done[launch][name]

    of.done = done  # type: ignore[attr-defined]
    return of


@pytest.fixture(scope="module")
def truth(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """`truth(name)`: one process that sees in each step what the ranks of a job see."""
    found: dict[str, Outcome] = {}

    def of(name: str) -> Outcome:
        setting = reference_of(JOBS[name])
        kind = (setting.family, setting.trainer, setting.rollout is None, setting.config)
        if (key := str(kind)) not in found:
            path = model_path(setting.family, **setting.variant)
            out = tmp_path_factory.mktemp("truth")
            is_ours = setting.family == "glm_moe_dsa"
            found[key] = train(setting, path, out, longstraw=is_ours)
        return found[key]

    return of


def parameters_of(record: Record, right: Outcome) -> Record:
    """The record with parameters alone. Buffers (a router's correction bias) are as they were."""
    buffers = dict(right.trainer.accelerator.unwrap_model(right.trainer.model).named_buffers())
    for name, value in record["after"].items():
        if name in buffers:
            assert torch.equal(value, buffers[name]), name
    assert record["after"].keys() >= right.after.keys()
    return {**record, "after": {name: record["after"][name] for name in right.after}}


@pytest.mark.parametrize("name", slow_unless_few(RIGHT))
def test_divided_experts_end_where_one_process_ends(name: str, ranks: Ranks, truth: Truth) -> None:
    """Parameters, gradient norms, losses, after three steps."""
    right = truth(name)
    assert_same(name, parameters_of(ranks(name)[0], right), right)


def test_divided_experts_end_where_undivided_ones_end(ranks: Ranks, truth: Truth) -> None:
    """On the same two ranks under the same stage, whether or not the ranks share prompts."""
    right = truth("ZeRO-2, undivided")
    (undivided, *_), (divided, *_) = ranks("ZeRO-2, undivided"), ranks("ZeRO-2, sp 2")
    undivided_end = Outcome(right.before, undivided["after"], [], [], right.trainer)
    worst = worst_parameter(divided["after"], undivided_end)
    log_row("divided against undivided", worst, (0.0, ""))
    assert worst[0] <= TOLERANCE, worst


@pytest.mark.parametrize("name", slow_unless_few(RIGHT))
def test_ranks_hold_their_share_and_end_with_the_same_weights(name: str, ranks: Ranks) -> None:
    """Six experts' three weights in two layers of qwen3_moe, divided by `ep_size`; and what ranks
    hold together is the same for all, to the last bit."""
    first, *others = ranks(name)
    if JOBS[name].setting.family == "qwen3_moe":
        held = {record["experts_held"] for record in (first, *others)}
        assert held == {6 * 3 * 2 // JOBS[name].ep_size}
    for other in others:
        for parameter, value in first["after"].items():
            assert torch.equal(value, other["after"][parameter]), parameter


def test_a_rank_with_less_to_do_makes_passes_in_step(ranks: Ranks) -> None:
    """A forward sends tokens to the other rank's experts, so it waits for the other rank."""
    assert all(record["num_idle"] > 0 for record in ranks("ZeRO-0"))
    assert all(record["num_idle"] == 0 for record in ranks("ZeRO-2, sp 2"))  # they share passes


@pytest.mark.parametrize("name", slow_unless_few(WRONG))
def test_mistakes_are_seen(name: str, ranks: Ranks, truth: Truth) -> None:
    """Half an expert's gradient, and a norm that is the mean of the ranks', which is
    below the right one: both are off by more than 100 times what is accepted as equal."""
    right = truth(name)
    _, worst = error_of(parameters_of(ranks(name)[0], right), right)
    log_row(f"planted: {name}", worst, (0.0, ""))
    assert worst[0] > 100 * TOLERANCE, worst
    if JOBS[name].fault == "halved_experts":
        assert worst[0] > LOST and "experts" in worst[1], worst


def test_a_saved_model_has_all_experts(ranks: Ranks) -> None:
    """transformers loads what the trainer saved, and it is what the ranks have together."""
    (record, *_) = ranks("ZeRO-2, sp 2")
    saved: Path = ranks.done[LAUNCH["ZeRO-2, sp 2"]]["saved"]  # type: ignore[attr-defined]
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert dict(loaded.named_parameters()).keys() == record["after"].keys()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, record["after"][name]), name


# ---------------------------------------------------------------- refusals

_ADAMW = {"type": "AdamW", "params": {"torch_adam": True, "lr": "auto"}}


@pytest.mark.parametrize(
    ("stage", "changes", "words"),
    [
        (2, {"optimizer": None}, '"optimizer" is missing'),
        (1, {"optimizer": None}, '"optimizer" is missing'),
        (2, {"zero_optimization": {"stage": 2, "contiguous_gradients": False}}, "contiguous"),
        (3, {"expert_parallel": {"enabled": True, "comm_backend": "deepep"}}, "comm_backend"),
        (3, {"expert_parallel": {"enabled": True, "expert_tensor_parallel_size": 2}}, "each exp"),
        (3, {"use_data_before_expert_parallelism": True}, "use_data_before"),
    ],
)
def test_a_config_that_deepspeed_would_stumble_over_is_refused(
    stage: int, changes: dict[str, Any], words: str
) -> None:
    config = {
        "zero_optimization": {
            "stage": stage,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": _ADAMW,
        "expert_parallel": {"enabled": True, "autoep_size": 2},
    }
    check_deepspeed_config(config, arguments())
    with pytest.raises(ConfigError, match=words):
        check_deepspeed_config({**config, **changes}, arguments())


def test_generation_by_each_rank_is_refused() -> None:
    refuse_generation_by_each_rank({"expert_parallel": {"enabled": False}}, "use_cache=False")
    with pytest.raises(ConfigError, match="use_cache=False with expert_parallel"):
        refuse_generation_by_each_rank({"expert_parallel": {"enabled": True}}, "use_cache=False")


def _engine(model: nn.Module, stage: int, *, bf16: bool, is_enabled: bool = True) -> Any:
    for layer in model.modules():
        layer._is_autoep_layer = layer is not model  # type: ignore[assignment]
    return SimpleNamespace(
        module=model,
        zero_optimization_stage=lambda: stage,
        bfloat16_enabled=lambda: bf16,
        _config=SimpleNamespace(expert_parallel_config=SimpleNamespace(enabled=is_enabled)),
    )


def test_bf16_at_stage_0_is_refused_where_experts_are_trained() -> None:
    """DeepSpeed's optimizer of that stage knows nothing of experts, and clips ranks differently."""
    model = nn.Sequential(nn.Linear(2, 2))
    check_expert_layers(_engine(model, 0, bf16=True))
    model[0].weight.allreduce = False  # type: ignore[assignment]
    check_expert_layers(_engine(model, 1, bf16=True))
    with pytest.raises(ConfigError, match="Use stage 1, 2 or 3"):
        check_expert_layers(_engine(model, 0, bf16=True))
    model.requires_grad_(False)
    check_expert_layers(_engine(model, 0, bf16=True))


def test_trained_copies_of_experts_are_refused() -> None:
    """PEFT's `modules_to_save`: AutoEP takes what is inside the wrapper."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.peft_config = {"default": SimpleNamespace(modules_to_save=["lm_head"])}  # type: ignore
    check_expert_layers(_engine(model, 2, bf16=False))
    for saved in ("experts", "mlp.gate"):
        model.peft_config["default"].modules_to_save = [saved]  # type: ignore
        with pytest.raises(ConfigError, match="modules_to_save"):
            check_expert_layers(_engine(model, 2, bf16=False))
        check_expert_layers(_engine(model, 2, bf16=False, is_enabled=False))


def test_models_without_experts_that_autoep_divides_are_refused() -> None:
    """DeepSpeed only logs it, and every rank would hold all of them."""
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="no experts that it can divide in a Linear"):
        check_expert_layers(_engine(model, 2, bf16=False))
    check_expert_layers(_engine(model, 2, bf16=False, is_enabled=False))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"top_k": 1}, "how tokens are routed is the model's"),
        ({"autoep_sise": 2}, "Did you mean 'autoep_size'"),
        ({"autoep_size": 0}, "over how many processes"),
        ({"autoep_size": None}, "over how many processes"),
    ],
    ids=str,
)
def test_other_routing_than_the_models_is_refused(section: dict[str, Any], says: str) -> None:
    """AutoEP would take it, or ignore it, without a word."""
    config: dict[str, Any] = {
        "expert_parallel": {"enabled": True, "autoep_size": 2, **section},
        "zero_optimization": {"stage": 3},
        "gradient_clipping": "auto",
    }
    with pytest.raises(ConfigError, match=says):
        check_deepspeed_config(config, arguments())


def test_a_reference_model_in_bf16_is_refused_below_stage_3() -> None:
    """DeepSpeed takes none without an optimizer there, and stumbles with an assertion."""
    config: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    at_stage = {n: {**config, "zero_optimization": {"stage": n}} for n in (2, 3)}
    check_divided_experts(at_stage[3], model, arguments(beta=0.1))
    check_divided_experts(at_stage[2], model, arguments(beta=0.1, bf16=False))
    with pytest.raises(ConfigError, match="Use stage 3, beta=0, or adapters"):
        check_divided_experts(at_stage[2], model, arguments(beta=0.1))


def test_adapters_that_autoep_does_not_carry_are_refused() -> None:
    """With one on experts it finds no layer to divide; stages 1 and 2 want experts to train."""
    config: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    at_stage = {n: {**config, "zero_optimization": {"stage": n}} for n in range(4)}
    options = {"num_hidden_layers": 1}
    args = arguments(save_strategy="no", save_only_model=False)
    for stage in at_stage:
        check_divided_experts(at_stage[stage], tiny_model("qwen3_moe", **options), arguments())
    all_linear = get_peft_model(tiny_model("qwen3_moe", **options), lora()["peft_config"])
    check_divided_experts({"zero_optimization": {"stage": 2}}, all_linear, args)
    with pytest.raises(ConfigError, match="q_proj"):
        check_divided_experts(at_stage[3], all_linear, args)
    attention = get_peft_model(tiny_model("qwen3_moe", **options), attention_lora()["peft_config"])
    for stage in (0, 3):
        check_divided_experts(at_stage[stage], attention, args)
    with pytest.raises(ConfigError, match="Use stage 3"):
        check_divided_experts(at_stage[2], attention, args)
    with pytest.raises(ConfigError, match="save_only_model=True"):
        check_divided_experts(
            at_stage[3], attention, arguments(save_strategy="steps", save_only_model=False)
        )
    check_divided_experts(
        at_stage[3], attention, arguments(save_strategy="steps", save_only_model=True)
    )


def test_every_stage_is_trained_with_and_without_shared_prompts() -> None:
    """The jobs are no product of options: this says that nothing has fallen out of them."""
    jobs = [JOBS[name] for name in RIGHT if JOBS[name].setting.family == "qwen3_moe"]
    pairs = {(job.stage, job.sp_size) for job in jobs if job.ep_size == 2}
    assert pairs == {(stage, sp_size) for stage in range(4) for sp_size in (1, 2)}
    assert {job.stage for job in FOUR.values()} == {0, 1, 2, 3} and MANY
