"""Bad input raises where it enters, with what was found, what is needed and what to change."""

import pytest
import torch
import transformers as hf

from longstraw import (
    ConfigError,
    DataError,
    Engine,
    EngineConfig,
    PromptGroup,
    PromptStateError,
    ShapeError,
    UnsupportedModelError,
)
from longstraw.attention import attend_with
from tests.models import VOCAB, tiny_model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_gradient": "exakt"}, "Did you mean 'exact'"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"page_size": 2.5}, "whole number"),
        ({"temperature": 0.0}, "positive"),
        ({"page_device": "disk"}, "model, host"),
        ({"attention": "flash"}, "torch_flash"),
        ({"state_budget_bytes": -1}, "state_budget_bytes"),
    ],
    ids=str,
)
def test_a_bad_option_names_itself_and_the_way_out(options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="chunk_size"):
        EngineConfig.from_dict({"chunksize": 8})
    config = EngineConfig(chunk_size=8)
    assert EngineConfig.from_dict(config.to_dict()) == config


def test_an_unserved_family_is_refused_by_name() -> None:
    config = hf.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UnsupportedModelError, match=r"mamba.*llama"):
        Engine(hf.MambaForCausalLM(config))


def test_length_dependent_rope_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = tiny_model("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="yarn"):
        Engine(model)


def test_static_rope_scaling_is_served() -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
    }
    Engine(tiny_model("llama", rope_parameters=rope))


@pytest.mark.parametrize(
    ("family", "change"),
    [("llama", {"attention_dropout": 0.1}), ("gpt2", {"resid_pdrop": 0.1})],
)
def test_dropout_is_refused_with_the_option_that_removes_it(family: str, change) -> None:
    with pytest.raises(ConfigError, match=r"disable_dropout|attention_dropout=0\.0"):
        Engine(tiny_model(family, **change))


def test_reentrant_checkpointing_is_refused() -> None:
    model = tiny_model("llama").train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ConfigError, match="use_reentrant"):
        Engine(model).capture(torch.tensor([3, 4, 5]))


def test_gpt2_under_checkpointing_is_refused() -> None:
    model = tiny_model("gpt2").train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ConfigError, match="gradient_checkpointing=False"):
        Engine(model).capture(torch.tensor([3, 4, 5]))


def test_attention_without_our_cache_is_an_error_and_not_another_answer() -> None:
    model = tiny_model("llama")
    with attend_with(model), pytest.raises(PromptStateError, match="cannot see the prompt"):
        model(torch.tensor([[3, 4, 5]]))


def test_an_empty_prompt_says_why_one_token_is_needed() -> None:
    with pytest.raises(DataError, match="at least one token"):
        PromptGroup(torch.empty(0, dtype=torch.long), [torch.tensor([3])])


def test_padded_completions_are_refused() -> None:
    with pytest.raises(ShapeError, match="without padding"):
        PromptGroup(torch.tensor([3]), [torch.tensor([[3, 0]])])


def test_positions_beyond_the_model_are_an_error_unless_wanted() -> None:
    """Never truncation; learned positions have nothing to extrapolate."""
    group = PromptGroup(torch.arange(2, 42), [torch.arange(2, 12)])
    model = tiny_model("llama", max_position_embeddings=48)
    with pytest.raises(DataError, match="Nothing was truncated") as caught:
        Engine(model).score(group)
    assert "allow_extrapolation" in str(caught.value)
    Engine(model, EngineConfig(allow_extrapolation=True)).score(group)
    with pytest.raises(DataError, match="Nothing was truncated"):
        config = EngineConfig(allow_extrapolation=True)
        Engine(tiny_model("gpt2", n_positions=48), config).score(group)


def test_a_requested_attention_runs_or_raises() -> None:
    with pytest.raises(ValueError, match="softcap"):
        Engine(tiny_model("gemma2"), EngineConfig(attention="torch_flash")).capture(
            torch.arange(2, 12)
        )
