"""What `examples/glm52` says of GLM-5.2 is the arithmetic of real tensors.

GLM-5.2 itself is built on the meta device: its shapes are real and nothing else is. On a tiny model
of its family the same functions are held against bytes that were counted.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel

from examples.dry_run import meta_run
from examples.dry_run.launch import Run, launch_words
from examples.dry_run.table import Plan
from examples.dry_run.terms import GIB, Term, total
from examples.glm52 import dry_run, train
from examples.glm52.terms import (
    ROUTED,
    adapter_terms,
    expert_bytes_per_row,
    kept_terms,
    shape_of,
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

LORA = LoraConfig(
    r=4,
    target_modules=[*train.ATTENTION, "lm_head"],  # the engine trains one, TRL's trainer refuses it
    target_parameters=train.FEED_FORWARD,
    init_lora_weights=False,
)
ENGINE = EngineConfig(chunk_size=64, page_size=16, attention="reference")
FULL, SHARED = "full", "shared"
ASK_THE_MODEL = ("--longstraw_allow_extrapolation", "--lora_target_parameters")


@pytest.fixture(scope="module")
def run() -> Run:
    """What `run.sh` runs."""
    return dry_run.read_run([])


@pytest.fixture(scope="module")
def the_decoder(run: Run) -> Decoder:
    """GLM-5.2 on the meta device, accepted by the engine."""
    return dry_run.build(run, the_config(), dry_run.PROMPT_TOKENS)


def the_config() -> Any:
    return AutoConfig.from_pretrained(dry_run.FOLDER)


def by_name(terms: list[Term]) -> dict[str, int]:
    return {term.name: term.num_bytes for term in terms}


def tiny_glm(**changes: Any) -> PreTrainedModel:
    """Experts by the operators that the meta device has too."""
    model = tiny_model("glm_moe_dsa", **changes).bfloat16()
    model.config._experts_implementation = "grouped_mm"
    return model


# -------------------------------------------------------------------- GLM-5.2


def test_the_base_weights_are_those_of_the_shapes(the_decoder: Decoder) -> None:
    """743,377,000,704: 78 layers of latent attention, 21 indexers, 3 dense and 75 sparse layers."""
    attention = 6144 * 2048 + 2048 + 2048 * 64 * 256  # queries
    attention += 6144 * (512 + 64) + 512 + 512 * 64 * (192 + 256)  # keys and values
    attention += 64 * 256 * 6144
    indexer = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32
    expert, norms = 3 * 6144 * 2048, 2 * 6144
    sparse = 256 * 6144 + 257 * expert
    layers = 78 * (attention + norms) + 21 * indexer + 3 * 3 * 6144 * 12288 + 75 * sparse
    expected = layers + 6144 + 2 * 154_880 * 6144
    frozen = [p for p in the_decoder.model.parameters() if not p.requires_grad]
    assert sum(p.numel() for p in frozen) == expected == 743_377_000_704


def test_adapters_are_on_all_that_is_said(the_decoder: Decoder) -> None:
    """69,147,648 at rank 8: A and B of every projection of attention, of dense layers and of shared
    experts; none on indexers and routers."""
    attention = (6144 + 2048) + (2048 + 64 * 256) + (6144 + 576)
    attention += (512 + 64 * 448) + (64 * 256 + 6144)
    dense, shared = 3 * (6144 + 12288), 3 * (6144 + 2048)
    expected = 8 * (78 * attention + 3 * dense + 75 * shared)
    trained = {n: p for n, p in the_decoder.model.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == expected == 69_147_648
    assert len(trained) == 2 * (78 * 5 + 78 * 3)
    assert not any(part in name for name in trained for part in ("indexer", ".gate.", ROUTED))


def test_adapters_of_routed_experts_are_counted_where_experts_are(run: Run) -> None:
    """At rank 8 on both weights of an expert: 2,831,155,200 in 75 layers, a 32nd on each rank."""
    targets = [*train.FEED_FORWARD, *train.ROUTED_EXPERTS]
    lora = LoraConfig(r=8, target_modules=train.ATTENTION, target_parameters=targets)
    config = slice_of(the_config(), [FULL], 256)
    one, without = (meta_run.decoder_on_meta(config, x, ENGINE).model for x in (lora, run.lora))
    routed = 8 * 256 * ((6144 + 4096) + (2048 + 6144))
    assert 75 * routed == 2_831_155_200
    said, rest = (adapter_terms(x, 32) for x in (one, without))
    assert [a.num_bytes - b.num_bytes for a, b in zip(said, rest, strict=True)] == [
        routed // 32 * size for size in (2, 4, 12)
    ]


def test_the_state_of_the_prompt_to_the_byte(run: Run, the_decoder: Decoder) -> None:
    """The paper's numbers: on each of 32 ranks 5.8125 GiB, 186 GiB in all; in fp32 the cotangents
    of latents are twice their bytes, and index keys have none."""
    assert shape_of(the_decoder).index_layers == (0, 1, 2, *range(6, 78, 4))
    assert len(the_decoder.index_layers) == 21
    assert the_decoder.state_bytes(1, with_cotangents=False) == 95_232
    exact = state_terms(the_decoder, run.engine, 2**21)
    stopped = state_terms(the_decoder, replace(run.engine, prompt_gradient="stopped"), 2**21)
    assert total(stopped) / GIB == 5.8125 and 32 * total(stopped) == 186 * GIB
    assert by_name(exact)["index keys"] == 2**16 * 21 * 128 * 2
    assert total(exact) - total(stopped) == 2**16 * 78 * 576 * 4


def test_routed_experts_are_divided_and_the_rest_is_not(the_decoder: Decoder) -> None:
    """32 ranks hold 8 experts of each layer; the router stays in fp32, as the model asks."""
    said = by_name(weight_terms(the_decoder.model, ep_size=32))
    expert, router = 3 * 6144 * 2048, 256 * 6144
    assert said["routed experts"] == 75 * 8 * expert * 2
    rest = 743_377_000_704 - 75 * 256 * expert
    assert said["other weights"] == pytest.approx(2 * (rest + 75 * router), rel=1e-5)  # and buffers


# -------------------------------------------------------------------- the command


def test_the_command_prints_every_term_and_whether_it_fits(
    the_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of passes that are said to take 3 GiB and 5 GiB: counting them takes minutes, and how they
    are counted is claimed below. 80 GiB of a GPU are too few for the weights alone."""
    monkeypatch.setattr(dry_run, "build", lambda *args: the_decoder)
    monkeypatch.setattr(dry_run, "count_passes", lambda *args: (3 * GIB, 5 * GIB))
    plans: dict[str, Plan] = {}
    make_plans = dry_run.make_plans
    monkeypatch.setattr(dry_run, "make_plans", lambda *x: plans.update(make_plans(*x)) or plans)
    assert dry_run.main([]) == 0
    printed = capsys.readouterr().out
    for plan in plans.values():
        for term in [*plan.fixed, *plan.state, *plan.kept, *plan.work, *plan.others]:
            assert term.name in printed and term.arithmetic in printed
        for page_device in ("model", "host"):
            assert f"{plan.device_bytes(page_device) / 1e9:.1f} GB" in printed
    assert "fits: exact, pages on model" in printed
    assert "4,096 when tokens choose evenly, 131,072 fit, 131,072 if all" in printed
    assert dry_run.main(["--device_gib", "80"]) == 1
    assert "--longstraw_page_device host" in capsys.readouterr().out


def test_the_options_of_the_command_are_the_runs_own(run: Run) -> None:
    """`run.sh` is read, not repeated, and what stands behind it wins as it does there."""
    engine = run.engine
    assert (engine.sp_size, engine.chunk_size, engine.page_device) == (32, 16_384, "model")
    assert run.world_size == dry_run.expert_parallel_size(run) == 32 and run.zero_stage == 0
    assert run.args.bf16 and run.args.gradient_checkpointing and run.lora.r == 8
    assert run.lora.target_parameters == train.FEED_FORWARD
    options = ["--lora_target_parameters", *train.ROUTED_EXPERTS]
    changed = dry_run.read_run([*options, "--longstraw_prompt_gradient", "stopped"])
    assert changed.engine == replace(engine, prompt_gradient="stopped")
    assert changed.lora.target_parameters == train.ROUTED_EXPERTS


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--longstraw_sp_size", "5"], "--num_processes 32"),
        (["--longstraw_sp_size", "16"], "autoep_size=32"),
        (["--lora_target_parameters", *train.ROUTED_EXPERTS], ".mlp.experts has an adapter"),
        (["--longstraw_chunk_sise", "4096"], "--longstraw_chunk_sise"),
        (["--load_in_4bit", "true"], "--dtype bfloat16"),
        (["--longstraw_allow_extrapolation", "false"], "max_position_embeddings=1,048,576"),
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
    if options[0] in ASK_THE_MODEL:  # of which a small one says the same
        config = slice_of(the_config(), [FULL], 32)
        monkeypatch.setattr(dry_run.AutoConfig, "from_pretrained", lambda folder: config)
    assert dry_run.main(options) == 2
    assert reason in capsys.readouterr().err


# -------------------------------------------------------------------- against real tensors


def test_state_and_gradients_take_what_is_said() -> None:
    """Of an exact update with 12 tokens selected of up to 207, and a prompt of three chunks: what
    is captured, what is held at most, and gradients in fp32 of adapters that were all reached."""
    model = get_peft_model(tiny_glm(num_hidden_layers=3, index_topk_pattern="FSF"), LORA)
    decoder = meta_run.as_trained(model, ENGINE)
    trained = decoder.trainable_parameters()
    engine = Engine(model, ENGINE)
    (group,) = random_groups([(3 * 64 + 1, (5, 9))])
    engine.capture(group.prompt_ids)
    captured = engine.store.bytes_in_use
    engine.accumulate([group], RandomLoss([group]))
    stopped = replace(ENGINE, prompt_gradient="stopped")
    assert captured == total(state_terms(decoder, stopped, 3 * 64))
    assert engine.store.peak_bytes == total(state_terms(decoder, ENGINE, 3 * 64))
    said = by_name(adapter_terms(model, 1))
    gradients = [p.grad for p in trained if p.grad is not None and bool(p.grad.any())]
    assert len(gradients) == len(trained), "neither A nor B is zero, so all were reached"
    assert said["adapters"] == sum(p.nbytes for p in trained)
    assert said["their gradients"] == sum(gradient.nbytes for gradient in gradients)


def test_counting_on_the_meta_device_is_counting() -> None:
    """The same passes over real tensors take the same bytes, in a capture and in a backward of two
    rows, behind a history of three chunks. As many tokens are selected as there are, so that no
    number says how many of a page are among the best: the meta device has all, the most there can
    be."""
    layers = {"num_hidden_layers": 2, "mlp_layer_types": ["sparse"] * 2}
    model = tiny_glm(index_topk=256, index_topk_pattern="FS", **layers)
    real = meta_run.as_trained(get_peft_model(model, LORA), ENGINE)
    meta = meta_run.decoder_on_meta(real.config, LORA, ENGINE)
    counts = [meta_run.count_passes(x, ENGINE, 2, 64, 3 * 64) for x in (real, meta)]
    assert counts[0] == counts[1]


def count_and_said(*kinds: str) -> tuple[list[int], list[int]]:
    """Bytes of a capture and of a backward of two rows, on the first of two ranks, and what the
    terms say that these layers have of them."""
    engine = replace(ENGINE, sp_size=2)
    config = slice_of(tiny_glm().config, kinds, 6)
    chunk = meta_run.decoder_on_meta(config, LORA, engine), engine, 2, 64
    return [*meta_run.count_passes(*chunk)], [unkept_bytes(*chunk), total(kept_terms(*chunk))]


@pytest.fixture(scope="module")
def three_layers() -> tuple[list[int], list[int]]:
    """The last one leaves out what nobody reads, so that two run in full."""
    return count_and_said(FULL, FULL, SHARED)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_choosers"), [(FULL, 2), (SHARED, 1)])
def test_one_more_layer_keeps_what_is_said(
    kind: str, num_choosers: int, three_layers: tuple[list[int], list[int]]
) -> None:
    """To the byte, what one more layer keeps for its backward, and what a capture holds of it until
    it is in pages. And a number of 8 bytes for what a router and an indexer chose, which the table
    leaves out."""
    for before, said_before, behind, said in zip(
        *three_layers, *count_and_said(FULL, kind, FULL, SHARED), strict=True
    ):
        assert behind - before == said - said_before + 8 * num_choosers


def test_a_token_at_an_expert_takes_what_is_said() -> None:
    """Bytes per row, counted on the meta device, are those of real rows."""
    config = slice_of(tiny_glm().config, [FULL], 6)
    model = tiny_glm(num_hidden_layers=1, index_topk_pattern="F", mlp_layer_types=["sparse"])
    real = meta_run.as_trained(get_peft_model(model, LORA), ENGINE)
    meta = meta_run.decoder_on_meta(config, LORA, ENGINE)
    assert expert_bytes_per_row(real) == expert_bytes_per_row(meta) > 48 * 2 * 4


def test_the_options_train_a_checkpoint(tmp_path: Path) -> None:
    """Those of `run.sh`, on one process with all experts: one step, and the adapter is saved."""
    model = tiny_model("glm_moe_dsa", num_hidden_layers=2, index_topk_pattern="FS")
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    prompts_dataset().to_json(tmp_path / "data.jsonl")
    _, own = launch_words(dry_run.FOLDER)
    options = f"""
        --model_name_or_path {tmp_path / "model"} --dataset_name {tmp_path / "data.jsonl"}
        --reward_funcs tests.trl.parity.modular_reward --output_dir {tmp_path / "out"}
        --longstraw_sp_size 1 --use_cpu --bf16 false --max_completion_length 4 --max_steps 1
        --report_to none --save_strategy no
    """
    train.main(*train.make_parser().parse_args_and_config([*own, *options.split()]))
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as adapter:
        names = list(adapter.keys())
    assert len(names) == 2 * (2 * 5 + 2 * 3), "A and B; two layers, one of them dense"
