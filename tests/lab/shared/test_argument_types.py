"""Types of argparse."""

from __future__ import annotations

import argparse

import pytest

from engine_lab.shared.argument_types import number, share, whole


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (whole(1), "0", "'0': expected a whole number of at least 1"),
        (whole(1), "1.5", "'1.5': expected a whole number of at least 1"),
        (number(0.5), "nan", "'nan': expected a number of at least 0.5"),
        (share, "1.5", "'1.5': expected a share from 0 to 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(parse, text, expected) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=expected):
        parse(text)
