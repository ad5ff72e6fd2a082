"""The tiny policy of the tests and of the comparison of gradients."""

from tiny_retrieval import retrieval_rows


def test_prompts_have_the_length_asked_for_and_the_answer_stands_behind_its_key():
    """Also at the shortest length: four entries of three words, and the question."""
    for row in retrieval_rows(20, seed=0, context=14):
        words = row["prompt"].split()
        assert len(words) == 14 and words[-2] == "?"
        assert words[words.index(words[-1]) + 1] == row["answer"]
