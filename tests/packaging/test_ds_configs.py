"""The launch configurations are what accelerate understands, and the table lists each of them."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

FOLDER = Path(__file__).parents[2] / "ds_configs"
FILES = sorted(FOLDER.rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_reads_it_and_the_table_names_it(file: Path) -> None:
    """accelerate raises on unknown keys, so a typo fails here and not at a launch."""
    config = load_config_from_file(str(file))
    assert config.num_machines == 1
    assert f"`{file.relative_to(FOLDER)}`" in (FOLDER / "README.md").read_text()
