"""Sequences are cut into the runs they share, on token ids and nothing else."""

import torch

from longstraw.branches import Branch, grow_branches


def grow(texts: list[str], **options) -> tuple[Branch, ...]:
    return grow_branches(
        [torch.tensor([ord(c) for c in text], dtype=torch.long) for text in texts],
        **{"min_shared": 1, **options},
    )


def outline(branches: tuple[Branch, ...], texts: list[str]) -> list:
    """Each run as its text, members, and what follows it."""
    return [
        (texts[b.members[0]][b.start : b.stop], b.members, outline(b.children, texts))
        for b in branches
    ]


def test_one_sequence_is_one_run_without_its_last_token() -> None:
    assert outline(grow(["abcd"]), ["abcd"]) == [("abc", (0,), [])]


def test_the_last_token_is_run_when_asked_for() -> None:
    assert outline(grow(["abcd"], run_last=True), ["abcd"]) == [("abcd", (0,), [])]


def test_sequences_part_after_the_last_run_with_the_same_target() -> None:
    """What is common is abc, but c has two targets: it is run with each of what follows."""
    texts = ["abcXYZ", "abcUV"]
    assert outline(grow(texts), texts) == [("ab", (0, 1), [("cXY", (0,), []), ("cU", (1,), [])])]


def test_shared_runs_form_a_tree() -> None:
    texts = ["aabbccdd", "aabbccee", "aabbff", "aagg"]
    assert outline(grow(texts), texts) == [
        (
            "a",
            (0, 1, 2, 3),
            [
                ("ab", (0, 1, 2), [("bc", (0, 1), [("cd", (0,), []), ("ce", (1,), [])]),
                                   ("bf", (2,), [])]),
                ("ag", (3,), []),
            ],
        )
    ]  # fmt: skip


def test_equal_sequences_are_one_run_whatever_their_length() -> None:
    texts = ["abc", "abd", "abc"]
    found = outline(grow(texts, min_shared=100), texts)
    assert found == [("ab", (0, 2), []), ("ab", (1,), [])]


def test_a_sequence_that_begins_another_ends_where_the_shared_run_ends() -> None:
    texts = ["abcd", "abcdef"]
    assert outline(grow(texts), texts) == [("abc", (0, 1), [("de", (1,), [])])]


def test_its_last_token_is_a_run_of_its_own_when_it_is_run() -> None:
    texts = ["abcd", "abcdef"]
    assert outline(grow(texts, run_last=True), texts) == [
        ("abc", (0, 1), [("d", (0,), []), ("def", (1,), [])])
    ]


def test_short_runs_are_not_worth_a_segment_and_longer_ones_behind_them_are() -> None:
    """All four share one token, each pair five."""
    texts = ["abbbbbX", "abbbbbY", "accccc1", "accccc2"]
    found = outline(grow(texts, min_shared=4), texts)
    assert [(text, members) for text, members, _ in found] == [
        ("abbbb", (0, 1)),
        ("acccc", (2, 3)),
    ]
    assert [len(children) for *_, children in found] == [2, 2]


def test_what_has_no_token_to_run_is_in_no_run() -> None:
    assert grow(["a", ""]) == ()
    texts = ["a", "abc"]
    assert outline(grow(texts), texts) == [("ab", (1,), [])]


def test_only_the_asked_members_count() -> None:
    texts = ["abcX", "abcY", "abcZ"]
    assert outline(grow(texts, members=[1]), texts) == [("abc", (1,), [])]


def test_every_input_is_in_exactly_one_run() -> None:
    """Random sequences over two letters share much; each one's runs join up to it."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(50):
        lengths = torch.randint(1, 12, (6,), generator=generator).tolist()
        sequences = [torch.randint(0, 2, (n,), generator=generator) for n in lengths]
        for run_last in (False, True):
            branches = grow_branches(sequences, min_shared=1 + trial % 3, run_last=run_last)
            covered = [0] * len(sequences)
            for top in branches:
                for run in top.walk():
                    for member in run.members:
                        assert run.start == covered[member]
                        covered[member] = run.stop
                    together = {tuple(sequences[i][run.start : run.stop].tolist())
                                for i in run.members}  # fmt: skip
                    assert len(together) == 1
            assert covered == [n if run_last else n - 1 for n in lengths]
