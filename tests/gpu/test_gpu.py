"""What can only be seen on a GPU: devices and allocator peaks. Host pages: `test_host_pages.py`."""

import pytest
import torch

from longstraw import Engine, EngineConfig, generate
from tests.engine.compare import (
    RandomLoss,
    engine_gradients,
    full_sequence_gradients,
    random_groups,
    worst_error,
)
from tests.models import tiny_model

pytestmark = pytest.mark.gpu


def on_gpu(groups):
    """The same groups with their tokens on the GPU."""
    return [type(g)(g.prompt_ids.cuda(), [ids.cuda() for ids in g.completion_ids]) for g in groups]


@pytest.mark.parametrize("page_device", ["model", "host"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_gradient_on_the_gpu_is_the_definitions_on_the_cpu(family: str, page_device: str) -> None:
    """fp64 on both: other kernels and orders of summation, so 1e-9 again."""
    groups = random_groups([(53, (9, 4)), (24, (17,))])
    expected = full_sequence_gradients(tiny_model(family).double(), groups)
    config = EngineConfig(chunk_size=16, page_size=8, page_device=page_device)
    found = engine_gradients(tiny_model(family).double().cuda(), on_gpu(groups), config)
    error, name = worst_error({n: g.cpu() for n, g in found.items()}, expected)
    assert error <= 1e-9, name


def test_allocator_peak_is_flat_in_the_group() -> None:
    """As the byte count on the CPU: from 2 to 8 members at most 0.5 %."""
    peaks = []
    for num_members in (2, 8):
        model = tiny_model("llama", hidden_size=96, intermediate_size=256).cuda()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        engine = Engine(model, EngineConfig(chunk_size=256, page_size=128))
        (group,) = on_gpu(random_groups([(4097, (24,) * num_members)]))
        loss_of = RandomLoss([group])
        torch.cuda.reset_peak_memory_stats()
        engine.accumulate([group], loss_of)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.005 * peaks[0]


def test_greedy_decoding_on_the_gpu() -> None:
    """Tokens of `generate`, in fp64 so that no tie is broken by rounding."""
    model = tiny_model("llama").double().cuda()
    (group,) = on_gpu(random_groups([(45, (1,))]))
    options = {"max_new_tokens": 20, "do_sample": False}
    prompt = group.prompt_ids
    expected = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **options)
    found = generate(Engine(model, EngineConfig(chunk_size=16, page_size=8)), prompt, 2, **options)
    assert all(torch.equal(row, expected[0]) for row in found)
