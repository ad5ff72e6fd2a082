"""What holds for every test: one thread, no network, GPU tests only where there is a GPU, and how
`pytest -n 2 --dist loadfile` shares the tests out."""

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402  (after the environment that its users read when imported)
import torch  # noqa: E402

# Operators on tiny tensors spend their time in barriers when they are spread over threads.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs GPUs where there are not enough of them; order what workers are given."""
    num_devices = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and num_devices < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s)"))
        if item.path.parent.name in RANKS or item.path.name in RANKS:
            item.add_marker(pytest.mark.ranks)
    if hasattr(config, "workerinput"):  # this process is a worker of pytest-xdist
        places = {folder: place for place, folder in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))


RANKS = (
    "deepspeed",
    "distributed",
    "sequence",
    "test_data_parallel.py",
    "test_ds_configs.py",
    "test_resume_ranks.py",
    "test_sequence_parallel.py",
)
"""Folders and modules whose tests launch ranks. These take both cores: two launches at a time wait
for each other at every collective, and take longer than one after the other."""

# ---------------------------------------------------------------- two workers

SHARED = {
    "retriever": ("tests/learning/test_learning.py", "tests/learning/test_tiny_retrieval.py"),
}
"""Fixtures that train for several modules: one worker runs these, so that it is done once."""

LONGEST = ("trl", "learning", "engine", "packaging")
"""Folders, those whose modules take longest first: a module of minutes that is begun last would
leave the other worker idle."""


def group_of(nodeid: str) -> str:
    """What one worker runs: a module, whose fixtures and caches hold launches, trainings and
    references, or the modules of a shared fixture."""
    module = nodeid.split("::")[0]
    return next((fixture for fixture, modules in SHARED.items() if module in modules), module)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail in modules that would do again, on another worker, what `SHARED` fixtures do."""
    for fixture in SHARED.keys() & set(getattr(item, "fixturenames", ())):
        if group_of(item.nodeid) != fixture:
            module = item.nodeid.split("::")[0]
            pytest.fail(
                f"{module} uses the fixture {fixture!r}, which is made once for several modules on"
                f" one worker: add {module!r} to SHARED[{fixture!r}] in tests/conftest.py.",
                pytrace=False,
            )


@pytest.hookimpl(optionalhook=True)  # xdist's, which need not be installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` with `SHARED` modules on one worker, in the order of collection.

    Not `--dist loadgroup`: pytest-xdist 3.8 hands the groups over in `Item._nodeid`, which
    pytest 9.2 no longer reads, so every test would be a group of its own.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # else by number of tests, which says little of time
    return GroupScheduling(config, log)
