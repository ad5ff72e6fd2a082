"""Level 3 of the audit, which launches ranks."""

from longstraw.audit.receipt import Receipt
from longstraw.cli import main


def test_two_ranks_make_the_update_of_one(tmp_path):
    """Sharing the prompt, and with members of their own; float64, so a difference is a mistake."""
    path = tmp_path / "receipt.json"
    words = ["--prompt-tokens", "70", "--group-size", "3", "--chunk-size", "32", "--ranks", "2"]
    assert main(["audit", *words, "--receipt", str(path)]) == 0
    level = Receipt.read(path).lengths[0].levels[2]
    found = {finding.what: finding for finding in level.findings}
    for launch in ("one prompt shared", "members divided"):
        assert found[f"{launch}: k_proj"].error <= 1e-9
        assert f"{launch}: AdamW step" in found
        assert found[f"{launch}: ranks with other bits"].error == 0
