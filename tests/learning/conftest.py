"""What the learning tests share: one trained policy, copied for each test, and one thread."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# Examples are scripts and no package: they find each other because Python puts a script's folder
# on the path.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from tiny_retrieval import Recipe, noisy_retriever  # noqa: E402

SEED = 2
"""Of the policy; the tests say what other seeds gave."""


@pytest.fixture(scope="session")
def retriever_cache(pytestconfig: pytest.Config) -> Path:
    """A folder that outlives the run; `pytest --cache-clear` empties it."""
    return pytestconfig.cache.mkdir("noisy-retriever")


@pytest.fixture
def retriever(
    retriever_cache: Path, one_thread: None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The policy to improve, fresh for each test; the first use of all trains it (1 minute)."""
    return noisy_retriever(Recipe(seed=SEED), retriever_cache)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on two threads, and the sums differ with their number."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
