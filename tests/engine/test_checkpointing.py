"""Gradient checkpointing inside a chunk: what runs twice, and what does not."""

import pytest
import torch

from longstraw import EngineConfig
from longstraw.attention import paged
from longstraw.state import PageStore
from tests.engine.compare import engine_gradients, random_groups
from tests.models import tiny_model

CONFIG = EngineConfig(chunk_size=16, page_size=8)


def update(is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, int, int]:
    """Gradients of one update, pages read in it, and how often attention was computed."""
    model = tiny_model("llama").train()
    if is_checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    num_pages, num_calls = 0, 0
    read, attend = PageStore.read, paged._attend

    def counted_read(self, *args, **kwargs):
        nonlocal num_pages
        for item in read(self, *args, **kwargs):
            num_pages += 1
            yield item

    def counted_attend(*args):
        nonlocal num_calls
        num_calls += 1
        return attend(*args)

    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "read", counted_read)
        patch.setattr(paged, "_attend", counted_attend)
        gradients = engine_gradients(model, random_groups([(49, (9, 20))]), CONFIG)
    return gradients, num_pages, num_calls


def test_a_recomputed_layer_visits_no_page_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over the history grows with the prompt and the rest of a layer does not, so its
    result is handed to the recompute: as many visits as without checkpointing, and the same
    gradient to the last bit."""
    plain, plain_pages, plain_calls = update(False, monkeypatch)
    ours, num_pages, num_calls = update(True, monkeypatch)
    assert (num_pages, num_calls) == (plain_pages, plain_calls)
    assert all(torch.equal(ours[name], gradient) for name, gradient in plain.items())
