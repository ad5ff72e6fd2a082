"""What `examples/qwen36_27b` says of the 27B is the arithmetic of real tensors.

The 27B itself is built on the meta device: its shapes are real and nothing else is. On a tiny
hybrid the same functions are held against bytes that were counted.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from bitsandbytes.nn import Params4bit
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel
from trl import ModelConfig

from examples.dry_run import meta_run
from examples.dry_run.launch import Run, launch_words
from examples.dry_run.table import Plan
from examples.dry_run.terms import GIB, Term, adapter_terms, total
from examples.qwen36_27b import dry_run, train
from examples.qwen36_27b.terms import (
    kept_terms,
    quantized_weights,
    slice_of,
    state_terms,
    unkept_bytes,
    weight_terms,
)
from longstraw import Engine, EngineConfig
from longstraw.models import Decoder
from tests.engine.compare import RandomLoss, random_groups
from tests.models import tiny_model
from tests.trl.parity import prompts_dataset, word_tokenizer

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
ENGINE = EngineConfig(chunk_size=64, page_size=16, attention="reference")
ATTENTION, RECURRENT = "full_attention", "linear_attention"


@pytest.fixture(scope="module")
def run() -> Run:
    """What `run.sh` runs."""
    return dry_run.read_run([])


@pytest.fixture(scope="module")
def the_decoder(run: Run) -> Decoder:
    """The 27B on the meta device, accepted by the engine."""
    return dry_run.build(run, the_config(), dry_run.PROMPT_TOKENS)


@pytest.fixture(scope="module")
def plans(run: Run, the_decoder: Decoder) -> dict[str, Plan]:
    """Of both gradients."""
    return dry_run.make_plans(run, the_decoder, dry_run.PROMPT_TOKENS)


@pytest.fixture
def counted(
    plans: dict[str, Plan], the_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Plan]:
    """The same; commands print these, and do not take the seconds to count them anew."""
    monkeypatch.setattr(dry_run, "build", lambda *args: the_decoder)
    monkeypatch.setattr(dry_run, "make_plans", lambda *args: plans)
    return plans


def the_config() -> Any:
    return AutoConfig.from_pretrained(dry_run.FOLDER)


def by_name(terms: list[Term]) -> dict[str, int]:
    return {term.name: term.num_bytes for term in terms}


# -------------------------------------------------------------------- the 27B


def test_every_text_projection_has_an_adapter_as_in_the_paper(the_decoder: Decoder) -> None:
    """116,727,808 trained parameters: A and B of 496 projections, and none of the head."""
    assert sum(p.numel() for p in the_decoder.trainable_parameters()) == 116_727_808
    assert len(list(quantized_weights(the_decoder.model))) == 496
    names = [name for name, p in the_decoder.model.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 496 and not any("lm_head" in name for name in names)
    assert the_decoder.state_bytes(1, with_cotangents=False) == 65_536


def test_the_state_of_the_prompt_to_the_byte(plans: dict[str, Plan]) -> None:
    """On each of 8 ranks, of 2,097,152 tokens in 64 chunks: 16 GiB of keys and values, twice that
    of cotangents in fp32, and 64 snapshots: 144 MiB for all ranks, and inputs of convolutions."""
    exact, stopped = (by_name(plans[gradient].state) for gradient in ("exact", "stopped"))
    assert 48 * 48 * 128 * 128 * 4 == 144 * 2**20
    snapshot = 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)
    assert exact["keys and values"] == stopped["keys and values"] == 2**21 * 65_536 // 8 == 16 * GIB
    assert exact["their cotangents"] == 32 * GIB and "their cotangents" not in stopped
    assert exact["Gated DeltaNet snapshots"] == 64 * snapshot // 8
    assert stopped["Gated DeltaNet snapshots"] == snapshot // 8


def test_the_command_prints_every_term_and_that_it_fits(
    counted: dict[str, Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    """Both gradients, and both places for pages."""
    assert dry_run.main([]) == 0
    printed = capsys.readouterr().out
    for plan in counted.values():
        for term in [*plan.fixed, *plan.state, *plan.kept, *plan.work, *plan.others]:
            assert term.name in printed and term.arithmetic in printed
        for page_device in ("model", "host"):
            assert f"{plan.device_bytes(page_device) / 1e9:.1f} GB" in printed
    assert "fits: exact, pages on model" in printed


def test_what_does_not_fit_is_an_exit_status_with_a_way_out(
    counted: dict[str, Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    """80 GiB are too few for the pages, and enough without them, as the message says."""
    assert dry_run.main(["--device_gib", "80"]) == 1
    assert "--longstraw_page_device host" in capsys.readouterr().out
    assert dry_run.main(["--device_gib", "80", "--longstraw_page_device", "host"]) == 0
    exact = counted["exact"]
    saved = exact.device_bytes("model") - exact.device_bytes("host")
    assert saved == total(exact.state) - exact.staged.num_bytes > 48 * GIB


# -------------------------------------------------------------------- the options


def test_the_options_of_the_command_are_the_runs_own(run: Run) -> None:
    """`run.sh` is read, not repeated, and what stands behind it wins as it does there."""
    engine = run.engine
    assert (engine.sp_size, engine.chunk_size, engine.page_device) == (8, 32_768, "model")
    assert engine.prompt_gradient == "exact" and engine.allow_extrapolation
    assert run.args.bf16 and run.args.gradient_checkpointing and run.world_size == 8
    assert run.lora.r == 16 and run.lora.target_modules == "all-linear"
    changed = dry_run.read_run(["--longstraw_prompt_gradient", "stopped"])
    assert changed.engine == replace(engine, prompt_gradient="stopped")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--longstraw_sp_size", "3"], "Set it to one of 1, 2, 4, 8, 16."),
        (["--longstraw_sp_size", "16"], "--num_processes 8"),
        (["--longstraw_chunk_sise", "4096"], "--longstraw_chunk_sise"),
        (["--longstraw_chunk_size", "4194304"], "Lower it to"),
        (["--per_device_train_batch_size", "3"], "divisible by num_generations (8)"),
        (["--longstraw_allow_extrapolation", "false"], "max_position_embeddings=262,144"),
        (["--load_in_4bit", "false"], "--load_in_4bit --use_bnb_nested_quant"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_option_is_refused_with_what_to_change(
    options: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is counted, by the checks of the trainer and of the engine."""
    monkeypatch.setattr(dry_run, "Work", lambda *args: pytest.fail("it was counted"))
    if "extrapolation" in options[0]:  # asks the model, of which a small one says the same
        config = slice_of(the_config(), [RECURRENT, ATTENTION])
        monkeypatch.setattr(dry_run.AutoConfig, "from_pretrained", lambda folder: config)
    assert dry_run.main(options) == 2
    assert reason in capsys.readouterr().err


# -------------------------------------------------------------------- against real tensors


def save_with_vision(folder: Path) -> Path:
    """A tiny checkpoint as that of Qwen3.6: the text model in one with a vision tower."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = hf.Qwen3_5Config(
        text_config=tiny_model("qwen3_5").config.to_dict(),
        vision_config={**vision, "out_hidden_size": 48, "num_position_embeddings": 16},
    )
    hf.Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def load_tiny(folder: Path) -> PreTrainedModel:
    model_args = ModelConfig(
        str(save_with_vision(folder)),
        dtype="bfloat16",
        load_in_4bit=True,
        use_bnb_nested_quant=True,
    )
    return train.load_model(model_args)


def test_weights_take_what_bitsandbytes_makes_of_them(tmp_path: Path) -> None:
    """Packed weights with their constants and tables, and all others, to the byte."""
    model = load_tiny(tmp_path)
    packed, others = 0, sum(buffer.nbytes for buffer in model.buffers())
    for parameter in model.parameters():
        if not isinstance(parameter, Params4bit):
            others += parameter.nbytes
            continue
        state: Any = parameter.quant_state
        tensors = [parameter, state.absmax, state.code, state.offset]
        packed += sum(x.nbytes for x in [*tensors, state.state2.absmax, state.state2.code])
    meta = meta_run.decoder_on_meta(model.config, LORA, ENGINE).model
    found = by_name(weight_terms(meta))
    assert found == {"NF4 weights": packed, "other weights": others}


def test_adapters_gradients_and_state_take_what_is_said(tmp_path: Path) -> None:
    """Of an exact update on NF4 weights: adapters in bf16, gradients in fp32, and of a prompt of
    three chunks what is captured and what is held at most."""
    model = get_peft_model(load_tiny(tmp_path), LORA)
    decoder = meta_run.as_trained(model, ENGINE)
    trained = decoder.trainable_parameters()
    said = by_name(adapter_terms(sum(p.numel() for p in trained), world_size=1))
    engine = Engine(model, ENGINE)
    (group,) = random_groups([(3 * 64 + 1, (5, 9))])
    engine.capture(group.prompt_ids)
    captured = engine.store.bytes_in_use
    engine.accumulate([group], RandomLoss([group]))
    assert said["adapters"] == sum(p.nbytes for p in trained)
    gradients = [p.grad for p in trained if p.grad is not None and bool(p.grad.any())]
    assert len(gradients) == len(trained), "neither A nor B is zero, so all were reached"
    assert said["their gradients"] == sum(gradient.nbytes for gradient in gradients)
    state = by_name(state_terms(decoder, ENGINE, 3 * 64))
    held = state["keys and values"] + state["Gated DeltaNet snapshots"]
    assert captured == held
    assert engine.store.peak_bytes == total(state_terms(decoder, ENGINE, 3 * 64))


@pytest.mark.parametrize("layers", [[ATTENTION, ATTENTION], [RECURRENT, ATTENTION]])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_counting_on_the_meta_device_is_counting(layers: list[str], num_rows: int) -> None:
    """The same passes over real tensors take the same bytes, in a capture and in a backward."""
    model = tiny_model("qwen3_5", layer_types=layers, num_hidden_layers=2).bfloat16()
    real = meta_run.as_trained(get_peft_model(model, LORA), ENGINE)
    meta = meta_run.decoder_on_meta(real.config, LORA, ENGINE)
    counts = [meta_run.count_passes(decoder, ENGINE, num_rows, 64) for decoder in (real, meta)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("layers", [[ATTENTION, ATTENTION], [RECURRENT, ATTENTION]])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_one_more_layer_keeps_what_is_said(layers: list[str], num_rows: int) -> None:
    """One more of the first layer, on the first of two ranks, to the byte: what it keeps for its
    backward, and what a capture holds of it until it is in pages."""
    engine = replace(ENGINE, sp_size=2)
    counts, said = [], []
    for some in ([layers[0], *layers], [layers[0], layers[0], *layers]):
        config = slice_of(tiny_model("qwen3_5").config, some)
        decoder = meta_run.decoder_on_meta(config, LORA, engine)
        counts.append(meta_run.count_passes(decoder, engine, num_rows, 64))
        chunk = decoder, engine, num_rows, 64
        said.append((unkept_bytes(*chunk), total(kept_terms(*chunk))))
    for before, behind, said_before, said_behind in zip(*counts, *said, strict=True):
        assert behind - before == said_behind - said_before


def test_the_options_train_the_text_model_of_a_checkpoint_with_vision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of `run.sh`, on one process: adapters on text alone, one step, the adapter saved."""
    folder = save_with_vision(tmp_path / "model")
    # Of this model type transformers would make Qwen's own tokenizer, which knows no such words.
    monkeypatch.setattr(train.AutoTokenizer, "from_pretrained", lambda *_, **__: word_tokenizer())
    prompts_dataset().to_json(tmp_path / "data.jsonl")
    _, own = launch_words(dry_run.FOLDER)
    options = f"""
        --model_name_or_path {folder} --dataset_name {tmp_path / "data.jsonl"}
        --reward_funcs tests.trl.parity.modular_reward --output_dir {tmp_path / "out"}
        --longstraw_sp_size 1 --use_cpu --bf16 false --max_completion_length 4 --max_steps 1
        --report_to none --save_strategy no
    """
    train.main(*train.make_parser().parse_args_and_config([*own, *options.split()]))
    saved = tmp_path / "out" / "adapter_model.safetensors"
    with safe_open(saved, "pt") as adapter:
        names = list(adapter.keys())
    assert len(names) == 2 * 2 * (5 + 4 + 2 * 3), "A and B; two layers of each kind, with MLPs"
    assert not any("visual" in name for name in names)
