"""The tiny policy of the tests and of the comparison of gradients."""

import pytest
import torch

from tiny_retrieval import exact_match, measure_accuracy, retrieval_rows


def test_prompts_have_the_length_asked_for_and_the_answer_stands_behind_its_key():
    """Also at the shortest length: four entries of three words, and the question."""
    for row in retrieval_rows(20, seed=0, context=14):
        words = row["prompt"].split()
        assert len(words) == 14 and words[-2] == "?"
        assert words[words.index(words[-1]) + 1] == row["answer"]


def test_measured_accuracy_is_that_of_generated_replies(retriever):
    """Read from two rows of logits, it equals what `generate` and the reward give.

    Greedy: exactly. Sampled: 16 replies to each of 32 prompts have a standard deviation of at most
    0.5 / sqrt(512) = 0.022 around the probability; three of them are allowed.
    """
    model, tokenizer = retriever
    rows = retrieval_rows(32, seed=7)
    measured = measure_accuracy(model, rows)

    inputs = tokenizer(list(rows["prompt"]), return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    for expected, tolerance, sampling in (
        (measured.greedy, 0.0, {"do_sample": False}),
        (measured.sampled, 0.066, {"do_sample": True, "top_k": 0, "num_return_sequences": 16}),
    ):
        output = model.generate(**inputs, max_new_tokens=2, **sampling)
        texts = tokenizer.batch_decode(output[:, 256:], skip_special_tokens=True)
        answers = [answer for answer in rows["answer"] for _ in range(len(texts) // len(rows))]
        share = sum(exact_match(texts, answers)) / len(texts)
        assert share == pytest.approx(expected, abs=tolerance)
