"""In working precision the engine is as close to the truth as the full-sequence step is."""

import pytest
import torch

from longstraw import EngineConfig
from tests.engine.compare import engine_gradients, full_sequence_gradients, random_groups
from tests.models import tiny_model

SHAPES = ((70, (9, 14)),)


def relative_error(found: dict, truth: dict) -> float:
    """|found - truth| / |truth| in the L2 norm over all parameters."""
    difference = sum(((found[n].double() - g) ** 2).sum() for n, g in truth.items())
    return float((difference / sum((g**2).sum() for g in truth.values())) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_rounding_is_no_worse_than_the_definitions(family: str, dtype: torch.dtype) -> None:
    """Error against fp64 at most 1.5 times the definition's in the same precision.

    Both round in other places, so either may be ahead by chance; attention over pages is merged in
    fp32 and cotangents add up in fp32, so nothing is lost that the definition keeps. 1.5 covers the
    spread over seeds of a model this small.
    """
    groups = random_groups(SHAPES)
    truth = full_sequence_gradients(_model(family, dtype).double(), groups)
    reference = full_sequence_gradients(_model(family, dtype), groups)
    ours = engine_gradients(_model(family, dtype), groups, EngineConfig(chunk_size=16, page_size=8))
    assert relative_error(ours, truth) <= 1.5 * relative_error(reference, truth)


def _model(family: str, dtype: torch.dtype):
    """Weights that `dtype` can hold exactly, so that the truth is of the same model."""
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)  # less sharp: errors stay in the linear range in bf16
    return model.to(dtype)
