"""The measured gap between the two gradients: the numbers of the example are what they say."""

import json
import sys

import pytest
import torch

from gradient_gap import (
    Gap,
    PromptGaps,
    by_length,
    gap_over,
    gradient,
    layer_of,
    main,
    projection_of,
    thirds,
    until_end,
)
from longstraw import Engine, EngineConfig, PromptGroup
from tiny_retrieval import make_model, make_tokenizer


def test_a_gap_is_that_of_the_parts_laid_end_to_end():
    """(3, 4) against (3, 0): cosine 3/5, error 4/5, ratio 3/5. Other names do not count."""
    exact = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]]), "c": torch.tensor([7.0])}
    stopped = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0]]), "c": torch.tensor([-7.0])}
    gap = gap_over(exact, stopped, lambda name: name != "c")
    assert (gap.cosine, gap.relative_error, gap.norm_ratio) == pytest.approx((0.6, 0.8, 0.6))


def test_names_tell_layer_and_projection():
    """Also under the prefix that an adapter's wrapper puts before them."""
    weight = "base_model.model.model.layers.12.self_attn.q_proj.weight"
    assert (layer_of(weight), projection_of(weight)) == (12, "q_proj")
    assert (layer_of("model.embed_tokens.weight"), projection_of("model.norm.weight")) == (
        None,
        None,
    )


@pytest.mark.parametrize("kind", ["exact", "stopped"])
def test_both_gradients_are_those_of_plain_autograd(kind):
    """Exact: through prompt and reply as one sequence. Stopped: through the reply, on keys and
    values of the prompt that come from a pass without a graph.

    In double precision but for the norms, where Llama rounds to fp32 (6e-8) whatever it is given;
    the two gradients themselves are apart by more than half.
    """
    model = make_model(seed=0).double()
    prompt, reply = torch.arange(3, 40), torch.tensor([60, 61, 1])
    group = PromptGroup(prompt, [reply, reply.flip(0)])
    rewards = torch.tensor([1.0, 0.0])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    engine = Engine(model, EngineConfig(kind, chunk_size=16))
    found = gradient(model, engine, group, rewards.tolist())

    for advantage, ids in zip(advantages, group.completion_ids, strict=True):
        with torch.set_grad_enabled(kind == "exact"):
            cache = model(prompt[None, :-1], use_cache=True).past_key_values
        inputs = torch.cat([prompt[-1:], ids[:-1]])[None]
        logps = model(inputs, cache=cache).logits[0].log_softmax(-1).gather(-1, ids[:, None])
        (-advantage * logps.sum() / 6).backward()

    for name, parameter in model.named_parameters():
        error = (found[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-6, f"{name}: {error}"


def test_thirds_of_the_layers_are_means_and_lengths_go_together():
    """Prompts of one asked length have slightly different ones."""
    gaps = [Gap(cosine, 0.0, 1.0) for cosine in (0.0, 0.5, 1.0, 0.0, 0.25, 0.75)]
    assert thirds(gaps) == {"layers 0-1": 0.25, "layers 2-3": 0.5, "layers 4-5": 0.5}
    assert thirds(gaps[:2]) == {"layers 0-0": 0.0, "layers 1-1": 0.5}
    found = [PromptGaps(n, [], gaps[0], {}, gaps, 0.0) for n in (2050, 130, 129, 2070)]
    assert [[g.prompt_tokens for g in group] for group in by_length(found)] == [
        [129, 130],
        [2050, 2070],
    ]


def test_a_reply_ends_with_its_first_end():
    """What `generate` pads is no part of it."""
    assert until_end(torch.tensor([5, 1, 1, 7]), end=1).tolist() == [5, 1]
    assert until_end(torch.tensor([5, 6]), end=1).tolist() == [5, 6]


def test_the_script_runs_from_model_to_plot(tmp_path, monkeypatch, one_thread):
    """On a folder with a model of random weights, rewarded for what its replies differ in."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} ?{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    make_model(seed=0).save_pretrained(tmp_path / "model")

    def long_words(completions, answer):
        return [float(len(completion[-1]["content"])) for completion in completions]

    monkeypatch.setattr("gradient_gap.short_and_right", long_words)
    options = {"model": tmp_path / "model", "output_dir": tmp_path, "prompts": 2}
    command = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["gradient_gap.py", *command, "--prompt_tokens", "64", "200"])
    main()

    prompts = json.loads((tmp_path / "gradient_gap.json").read_text())["prompts"]
    assert [prompt["prompt_tokens"] // 64 for prompt in prompts] == [1, 1, 3, 3]
    assert all(len(prompt["by_layer"]) == 2 for prompt in prompts)
    assert all(0 < prompt["whole"]["cosine"] < 1 for prompt in prompts)
    assert (tmp_path / "gradient_gap.md").read_text().count("| 2 |") == 2
    assert (tmp_path / "gradient_gap.png").read_bytes().startswith(b"\x89PNG")
