"""The engine with Triton's attention: the definition's gradients, pages read all at once."""

import pytest
import torch

from longstraw import EngineConfig
from longstraw.attention import paged
from longstraw.models import scoring
from longstraw.state import PageStore
from longstraw_kernels.availability import is_triton_installed
from tests.engine.compare import (
    engine_gradients,
    full_sequence_gradients,
    random_groups,
    worst_error,
)
from tests.models import tiny_model

pytestmark = pytest.mark.skipif(
    not is_triton_installed() or torch.cuda.is_available(),
    reason="needs Triton's interpreter; tests/gpu has the same on a GPU",
)
SIZES = {"page_size": 8, "chunk_size": 16, "replay_batch": 2}


def errors(family: str, **options) -> tuple[float, float]:
    """Of Triton's and of the plain implementation in fp32, against the definition in fp64."""
    groups = random_groups([(25, (5, 4))])
    truth = full_sequence_gradients(tiny_model(family).double(), groups)
    found = {}
    for impl in ("triton", "reference"):
        config = EngineConfig(attention=impl, **{**SIZES, **options})
        ours = engine_gradients(tiny_model(family), groups, config)
        found[impl], _ = worst_error({n: g.double() for n, g in ours.items()}, truth)
    return found["triton"], found["reference"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "glm_moe_dsa"])
def test_gradients_are_as_close_to_the_definition_as_plain_attention(family: str) -> None:
    """Per parameter, with softcap and window (gemma2), sinks (gpt_oss), latents (deepseek_v3) and a
    selection of tokens (glm_moe_dsa)."""
    triton, reference = errors(family)
    assert triton <= 2 * (reference + torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("cotangent_dtype", ["float32", "bfloat16"])
def test_pages_on_the_device_are_read_and_added_to_in_one_call(
    cotangent_dtype: str, monkeypatch
) -> None:
    """One launch for the history, and no gradient of it beside the pages' own sums; unless these
    are in bf16, which kernels do not add up in: then a page at a time."""
    num_pages, added = [], []
    backward, add = paged.page_attention_backward, PageStore.add_cotangent

    def counted_backward(*args, into, **options):
        num_pages.append(len(into))
        return backward(*args, into=into, **options)

    def counted_add(*args):
        added.append(args)
        return add(*args)

    monkeypatch.setattr(paged, "page_attention_backward", counted_backward)
    monkeypatch.setattr(PageStore, "add_cotangent", counted_add)
    (group,) = groups = random_groups([(25, (5,))])
    config = EngineConfig(
        attention="triton", cotangent_dtype=cotangent_dtype, page_size=8, chunk_size=16
    )
    ours = engine_gradients(tiny_model("llama"), groups, config)
    truth = full_sequence_gradients(tiny_model("llama").double(), groups)
    error, name = worst_error({n: g.double() for n, g in ours.items()}, truth)
    # Those of the first chunk's pages pass through bf16 three times.
    assert error <= (1e-3 if cotangent_dtype == "float32" else 3e-2), name
    num_history = group.prompt_ids.numel() - 1  # the last token is run with the responses
    is_in_place = cotangent_dtype == "float32"
    assert max(num_pages) == (num_history // 8 if is_in_place else 1)
    assert bool(added) == (not is_in_place)


def test_a_plain_head_meets_a_run_of_the_vocabulary_at_a_time(monkeypatch) -> None:
    """Of all tokens together; a head with a softcap (gemma2) is left to `logits`."""
    calls = []

    def counted(*args, **options):
        calls.append(options["temperature"])
        return backward(*args, **options)

    backward = scoring.selective_logprob_backward
    monkeypatch.setattr(scoring, "selective_logprob_backward", counted)
    groups = random_groups([(9, (5, 4))])
    gradients = {}
    for impl in ("triton", "reference"):
        config = EngineConfig(attention=impl, temperature=0.7, **SIZES)
        gradients[impl] = engine_gradients(tiny_model("llama"), groups, config)
        assert calls == ([0.7] * len(calls) if impl == "triton" else [])
        assert bool(calls) == (impl == "triton")
        calls.clear()
    error, name = worst_error(gradients["triton"], gradients["reference"])
    assert error <= 1e-3, name
    engine_gradients(tiny_model("gemma2"), groups, EngineConfig(attention="triton", **SIZES))
    assert not calls
