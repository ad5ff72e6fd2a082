"""Fixtures of the tests under DeepSpeed."""

from collections.abc import Callable

import pytest

from tests.deepspeed.compare import is_stopped, reference_of
from tests.deepspeed.jobs import LOW_STAGES, STAGES
from tests.deepspeed.launch import Records, run_launch
from tests.deepspeed.launches import LAUNCHES
from tests.trl.conftest import model_path
from tests.trl.parity import ModelPath, Outcome, train

__all__ = ["launched", "model_path", "truth"]

# Launches take 10 to 90 s on two idle cores. A test that hangs is reported with the rank that does.
TIMEOUT = 600

SLOW_BY_NAME = ("sharing, two ranks", "sharing, four ranks", "ragged")
SLOW = {
    *(f"stage {stage}" for stage in STAGES),
    *("options", LOW_STAGES, "families", "experts"),
    *SLOW_BY_NAME,
}
"""Launches that `make test` leaves to `make test-slow`; they have most of the jobs.

What stays is every stage once, with ranks that have rows of their own and with ranks that share
prompts, two families, NF4 at stages 0 and 3, planted mistakes and memory.
"""

Launched = Callable[[str], Records]
Truth = Callable[[str, str], Outcome]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that read a slow launch."""
    here = [item for item in items if item.path.parent.name == "deepspeed"]  # all are given
    for item in here:
        params = getattr(getattr(item, "callspec", None), "params", {})
        launches = {params.get("launch"), f"stage {params.get('stage')}"}
        by_name = any(params.get("name") in LAUNCHES[launch] for launch in SLOW_BY_NAME)
        if launches & SLOW or by_name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def launched(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """`launched(name)`: what the ranks of that launch left. Run when first asked for, once."""
    results: dict[str, Records | AssertionError] = {}

    def records(name: str) -> Records:
        if name not in results:
            folder = tmp_path_factory.mktemp(name.replace(" ", "_").replace(",", ""))
            try:
                results[name] = run_launch(name, model_path, folder, timeout=TIMEOUT)
            except AssertionError as error:
                results[name] = error
        result = results[name]
        if isinstance(result, AssertionError):
            raise result  # also for those who ask later, instead of hanging again
        return result

    return records


@pytest.fixture(scope="session")
def truth(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """`truth(launch, job)`: the one-process run that a job is compared with.

    Stock TRL; LongStraw without DeepSpeed where the gradient is the stopped one. The same for all
    stages, so the name of a job without its stage is the key.
    """
    found: dict[str, Outcome] = {}

    def run(launch: str, name: str) -> Outcome:
        job = LAUNCHES[launch][name]
        if job.same_as is not None:
            return run(*job.same_as)
        key = f"{launch.rstrip('0123')}: {name.removeprefix(f'ZeRO-{job.stage}, ')}"
        if key not in found:
            setting = reference_of(job)
            path = model_path(setting.family, **setting.variant)
            out = tmp_path_factory.mktemp("truth")
            found[key] = train(setting, path, out, longstraw=is_stopped(job))
        return found[key]

    return run
