"""Answers that say the same."""

from __future__ import annotations

import pytest

from engine.service.agreement import agree, f1, words_of


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        ("Paris.", "paris", True),
        ("It is Paris.", "It is Rome.", False),
        ("not a cat", "a cat, not", False),  # short: the order counts
        ("", " \n", True),
        ("", "x", False),
        ("one two three four five six", "six five four three two one", True),
        ("one two three four five six seven eight", "one two three four five six seven nine", True),  # F1 7/8
        ("one two three four five six", "one two three four x y", False),  # 4/6
        ("ab cd ef gh", "ab cd ef gh and so on and so on", False),
    ],
)
def test_short_answers_are_equal_and_longer_ones_alike(text: str, other: str, same: bool) -> None:
    assert agree(text, other) == agree(other, text) == same


def test_f1_is_that_of_words_whatever_their_case() -> None:
    assert f1("The cat, the dog", "the DOG") == pytest.approx(2 * 2 / 6)
    assert f1("", "") == 1.0 and f1("a", "") == 0.0 and words_of("Don't!") == ["don", "t"]
