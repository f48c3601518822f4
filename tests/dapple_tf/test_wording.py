"""Counts agree with their nouns, and a misspelt name brings up the one that was meant."""

from __future__ import annotations

import pytest

from dapple_tf.wording import format_count, suggest


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "stage", "0 stages"),
        (1, "micro-batch", "1 micro-batch"),
        (2, "micro-batch", "2 micro-batches"),
        (1, "entry", "1 entry"),
        (3, "entry", "3 entries"),
        (2, "day", "2 days"),
        (2, "stash", "2 stashes"),
        (1, "more step", "1 more step"),
    ],
)
def test_a_count_agrees_with_its_noun(count: int, noun: str, text: str) -> None:
    assert format_count(count, noun) == text


def test_only_another_name_is_suggested() -> None:
    known = ("gpipe", "dapple-a", "dapple-b")
    assert suggest("gipe", known) == " (did you mean 'gpipe'?)"
    assert suggest("GPipe", known) == " (did you mean 'gpipe'?)"
    assert suggest("zigzag", known) == ""
    assert suggest("dapple-a", known) == ""
