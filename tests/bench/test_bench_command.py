"""`longstraw bench`: every case runs, and a record holds what a reader needs."""

import json

import torch

from longstraw.bench import CASES, Measurement
from longstraw.cli import main

SMALL = ["--prompt-tokens", "70", "--group-size", "2", "--response-tokens", "5", "--repeats", "2"]


def test_every_case_runs_on_the_tiny_model(capsys):
    """A record each: seconds, bytes, tokens, versions, commit and the command."""
    assert main(["bench", "run", *SMALL, "--chunk-size", "32", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["case"] for record in records] == list(CASES)
    for record in records:
        assert 0 < record["seconds"]["p20"] <= record["seconds"]["median"]
        assert len(record["seconds"]["all"]) == 2
        assert record["peak_bytes"] > 0 and record["tokens_per_second"] > 0
        assert record["made_by"]["versions"]["torch"] == torch.__version__
        assert "commit" in record["made_by"] and "is_dirty" in record["made_by"]
        assert record["command"].startswith("longstraw bench run --prompt-tokens 70")
    by_case = {record["case"]: record for record in records}
    assert by_case["capture"]["tokens"] == 69
    assert by_case["capture"]["peak_bytes"] < by_case["full_sequence_step"]["peak_bytes"]


def test_one_case_as_text_and_the_list(capsys):
    """Without a word it lists; a run of one case prints one line for it."""
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == list(CASES)
    assert main(["bench", "run", "capture", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "\ncapture" in out and "replay_step" not in out


def test_an_unknown_case_is_a_mistake_of_usage(capsys):
    """With the nearest known one."""
    assert main(["bench", "run", "replay"]) == 2
    assert "Did you mean replay_step?" in capsys.readouterr().err


def test_percentiles_of_few_repeats():
    """Between the least and the most; one repeat is all three."""
    assert Measurement("x", [1.0], 0, 1).percentiles == (1.0, 1.0)
    assert Measurement("x", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0, 1).percentiles == (2.0, 5.0)
