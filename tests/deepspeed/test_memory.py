"""What each rank holds under ZeRO follows from the stage, and replays do not change it.

Counted on tiny models, exactly: elements of weights between passes, and of gradients at every
moment of every backward.
"""

import pytest

from tests.deepspeed.conftest import Launched
from tests.deepspeed.groups import NUM_STEPS
from tests.deepspeed.jobs import BUCKET, MEMORY, STAGES, WORLD_SIZE
from tests.models import VOCAB

LARGEST_PARAMETER = VOCAB * 48
NUM_TENSORS = 21
"""Of the tiny Llama: 9 per layer, embedding, final norm, head. Each is padded to the ranks."""


def test_zero_3_holds_its_share_of_the_weights_and_no_more(launched: Launched) -> None:
    """After each update: 1/N of every parameter, and none left whole by a replay.

    A parameter that stays gathered would be of old weights, and with every one of them the memory
    that ZeRO-3 is used for would be gone.
    """
    ranks = launched("memory")["ZeRO-3, full"]
    num_parameters = ranks[0]["found"]["num_parameters"]
    padding = NUM_TENSORS * (WORLD_SIZE - 1)
    for step in range(NUM_STEPS):
        shares = [rank["found"]["partitions"][step] for rank in ranks]
        assert num_parameters <= sum(shares) <= num_parameters + padding
        assert max(shares) - min(shares) == 0
        assert [rank["found"]["whole"][step] for rank in ranks] == [0, 0]


def test_the_peak_of_zero_3_is_its_share_and_the_module_at_work(launched: Launched) -> None:
    """weights / N + the largest module, at every moment of captures, replays and prompt backwards.

    The second term does not grow with the number of layers, so the whole follows 1/N. Two modules:
    the one at work, and the embedding or head beside it while a gradient arrives.
    """
    for rank in launched("memory")["ZeRO-3, full"]:
        found = rank["found"]
        assert 0 < found["standing_weights"] <= 2 * LARGEST_PARAMETER
        assert found["standing_weights"] < found["num_parameters"] / 4


@pytest.mark.parametrize("stage", [2, 3])
def test_partitioned_gradients_never_stand_whole(stage: int, launched: Launched) -> None:
    """At no moment of any backward is more in `.grad` than a bucket and two parameters: the one
    that no longer fits into the bucket, and the one that has just been added to.

    ZeRO-2 lets the rank's own share stand there as well, between backwards too; under ZeRO-3 it is
    kept elsewhere.
    """
    for rank in launched("memory")[f"ZeRO-{stage}, full"]:
        found = rank["found"]
        own = found["num_trained"] / WORLD_SIZE if stage == 2 else 0
        assert 0 < found["standing_gradients"] <= own + BUCKET + 2 * LARGEST_PARAMETER
        assert found["standing_gradients"] < 0.75 * found["num_trained"]
        # A parameter that lies across two shares stands whole.
        assert max(found["kept_gradients"]) <= 4 * (own + LARGEST_PARAMETER * (stage == 2))


@pytest.mark.parametrize("stage", STAGES)
def test_local_gradients_are_fp32_and_of_trained_parameters_only(
    stage: int, launched: Launched
) -> None:
    """4 bytes for each element of an adapter, though the model computes in bf16: hundreds of
    chunks add to each. A rank that replayed nothing has none before the reduction."""
    for rank in launched("memory")[f"ZeRO-{stage}, LoRA, bf16"]:
        found = rank["found"]
        assert found["num_trained"] < found["num_parameters"]
        assert set(found["kept_gradients"]) <= {0, 4 * found["num_trained"]}
        assert 4 * found["num_trained"] in found["kept_gradients"]


def test_every_memory_job_is_looked_at() -> None:
    """Their names are built in two places."""
    assert set(MEMORY) == {"ZeRO-2, full", "ZeRO-3, full"} | {
        f"ZeRO-{stage}, LoRA, bf16" for stage in STAGES
    }
