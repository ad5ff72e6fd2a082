"""`longstraw audit`: it passes on a right gradient, and names the family of a wrong one."""

import json

import pytest
import torch

from longstraw.audit.closeness import ALL, compare, family_of
from longstraw.audit.levels import Finding, Level
from longstraw.audit.receipt import Receipt
from longstraw.cli import main
from longstraw.errors import DataError
from longstraw.state import PageStore

SMALL = ["--prompt-tokens", "70", "--group-size", "2", "--response-tokens", "5"]
SMALL += ["--chunk-size", "32", "--page-size", "16"]
NUM_LAYERS = 4  # of the tiny model


@pytest.fixture
def receipt_path(tmp_path):
    return tmp_path / "receipt.json"


def audit(receipt_path, *words: str) -> int:
    return main(["audit", *SMALL, "--receipt", str(receipt_path), *words])


def test_the_tiny_model_is_within_every_budget(receipt_path, capsys):
    """In float64: 1, 2 and 4 pass, level 3 says what it takes, the gap is there by family."""
    assert audit(receipt_path) == 0
    out = capsys.readouterr().out
    assert "add --ranks 2" in out and "k_proj" in out and "shown:     level 4" in out
    receipt = Receipt.read(receipt_path)
    [length] = receipt.lengths
    assert [level.status for level in length.levels] == ["ok", "ok", "not run", "ok"]
    assert length.gap["lm_head"].relative < 1e-9  # nothing of the prompt flows through the head
    assert length.gap["v_proj"].relative > 0.1


@pytest.mark.parametrize("lost", ["key", "value"])
def test_a_lost_cotangent_of_one_layer_is_found_and_named(receipt_path, capsys, monkeypatch, lost):
    """Layer 1's prompt keys (or values) give nothing to their projection, and nothing to layer 0.

    The loss, the log-probs and the stopped gradient are untouched: levels 1 and 2 pass.
    """
    join, calls = PageStore.join_cotangents, []

    def join_but_one(self, pages, key, value):
        calls.append(None)
        of_keys, of_values = join(self, pages, key, value)
        if len(calls) % NUM_LAYERS == 2:
            (of_keys if lost == "key" else of_values).zero_()
        return of_keys, of_values

    monkeypatch.setattr(PageStore, "join_cotangents", join_but_one)
    assert audit(receipt_path) == 1
    assert calls
    levels = Receipt.read(receipt_path).lengths[0].levels
    assert [level.status for level in levels] == ["ok", "ok", "not run", "fail"]
    projection = f"{lost[0]}_proj"
    named = {finding.what: finding.worst for finding in levels[3].findings if not finding.is_ok}
    assert named[projection] in [
        f"model.layers.{layer}.self_attn.{projection}.weight" for layer in (0, 1)
    ]
    out = capsys.readouterr().out
    assert f"{projection}: " in out and "level 4, full gradient: FAILED" in out


def test_a_receipt_is_read_as_it_was_written(receipt_path, capsys):
    """The same object, its verdict made anew from the numbers; `--json` prints the same."""
    assert audit(receipt_path, "--json", "--lora-rank", "2") == 0
    receipt = Receipt.read(receipt_path)
    assert json.loads(capsys.readouterr().out) == json.loads(receipt_path.read_text())
    assert Receipt.from_json(receipt.to_json()) == receipt
    assert receipt.is_ok and "--lora-rank 2" in receipt.command
    assert receipt.made_by["versions"]["torch"] == torch.__version__
    assert "k_proj lora" in receipt.lengths[0].gap
    content = json.loads(receipt_path.read_text())
    content["lengths"][0]["levels"][3]["findings"][0]["error"] = 1.0
    assert not Receipt.from_json(json.dumps(content)).is_ok
    with pytest.raises(DataError, match="longstraw audit 1"):
        Receipt.from_json("{}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision_has_a_budget_of_the_full_sequence_steps_own_rounding(receipt_path, dtype):
    """Twice its error against float64 and one rounding, so wider than float64's."""
    assert audit(receipt_path, "--dtype", dtype) == 0
    full = Receipt.read(receipt_path).lengths[0].levels[3]
    assert all(finding.budget > 1e-7 for finding in full.findings)


def test_a_length_without_the_full_sequence_step_shows_the_gap_alone(receipt_path, capsys):
    """Nothing was compared, which is no success."""
    assert audit(receipt_path, "--definition-tokens", "8") == 1
    [length] = Receipt.read(receipt_path).lengths
    assert {level.status for level in length.levels} == {"not run"}
    assert 0 < length.gap[ALL].cosine < 1
    assert "--definition-tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "3"], "--group-size 2"),
        (["--group-size", "1"], "at least 2 replies"),
        (["--truth", "float32"], "Leave --truth out"),
        (["--model", "no/such/folder"], "no/such/folder"),
    ],
)
def test_what_cannot_be_done_is_a_mistake_of_usage(receipt_path, capsys, words, message):
    """Exit code 2, and what to change."""
    assert audit(receipt_path, *words) == 2
    assert message in capsys.readouterr().err
    assert not receipt_path.exists()


def test_families_and_closeness():
    """By the last part of a name; a family whose gradient vanishes is measured against the rest."""
    assert family_of("model.layers.0.self_attn.q_proj.weight") == "q_proj"
    assert family_of("base.layers.0.mlp.up_proj.lora_A.default.weight") == "up_proj lora"
    assert family_of("model.layers.0.self_attn.q_norm.weight") == "norm"
    assert family_of("model.embed_tokens.weight") == "embed"
    found = compare(
        {"a.q_proj.weight": torch.tensor([3.0, 4.0]), "a.k_proj.bias": torch.tensor([1e-12])},
        {"a.q_proj.weight": torch.tensor([3.0, 0.0]), "a.k_proj.bias": torch.tensor([0.0])},
    )
    assert found["q_proj"].relative == pytest.approx(4 / 3)
    assert found["q_proj"].cosine == pytest.approx(0.6)
    assert found["k_proj"].relative < 1e-3 and found["k_proj"].cosine is None


def test_nan_is_within_no_budget():
    level = Level(4, [Finding("q_proj", 0.0, 1.0), Finding("k_proj", float("nan"), 1.0)])
    assert level.status == "fail"
