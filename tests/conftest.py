"""What holds for every test: one thread, no network, GPU tests only where there is a GPU, and which
tests launch ranks."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402  (after the environment that its users read when imported)
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

# Operators on tiny tensors spend their time in barriers when they are spread over threads.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs GPUs where there are not enough of them; mark what launches ranks."""
    num_devices = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and num_devices < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s)"))
        if item.path.parent.name in RANKS or item.path.name in RANKS:
            item.add_marker(pytest.mark.ranks)


RANKS = (
    "deepspeed",
    "distributed",
    "sequence",
    "test_audit_ranks.py",
    "test_data_parallel.py",
    "test_ds_configs.py",
    "test_resume_ranks.py",
    "test_sequence_parallel.py",
)
"""Folders and modules whose tests launch ranks. These take both cores: two launches at a time wait
for each other at every collective, and take longer than one after the other."""
