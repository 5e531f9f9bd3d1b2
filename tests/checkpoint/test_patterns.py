"""Patterns that come with checkpoints: those that are published are read, those that never end are not."""

import pytest

from engine.checkpoint.limits import MAX_PATTERN_CHARS
from engine.checkpoint.patterns import why_endless

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
POSSESSIVE = r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = r"\d{1,3}(?=(?:\d{3})*\b)"
NESTED_CLASS = r" ?[^(\s|[.,!?…。，、।۔،])]+"
NAMES = (
    r".*lm_head",
    r".*mlp.gate$",
    r"model\.layers\.\d+\.self_attn\..*",
    r"^(?!.*self_attn).*",
    r".*\.(q|k|v)_proj$",
    r".*layers\.(?:[0-9]|[1-5][0-9])\.mlp\.(gate|up|down)_proj$",
    r"^model\.(?:.*\.)?experts",
)
ENDLESS = ("(a+)+b", "(a*)*", "((a+)b?)+", "(?:a?){1,50}", "(x+x+)+y", "(?P<n>a+)+", r"(\w+\.?)+!", "(a{1,9}){1,9}")


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3, POSSESSIVE, GPT4O, DIGITS, NESTED_CLASS])
def test_patterns_of_published_tokenizers_are_read(pattern: str) -> None:
    assert why_endless(pattern, by_python=False) == ""


@pytest.mark.parametrize("pattern", NAMES)
def test_patterns_over_names_of_modules_are_read(pattern: str) -> None:
    assert why_endless(pattern, by_python=True) == ""


@pytest.mark.parametrize("by_python", [False, True])
@pytest.mark.parametrize("pattern", ENDLESS)
def test_what_repeats_a_repetition_is_refused(pattern: str, by_python: bool) -> None:
    assert "exponential" in why_endless(pattern, by_python=by_python)


def test_python_also_tries_choices_and_lengths_again() -> None:
    assert "exponential" in why_endless("(a|a)*b", by_python=True)
    assert "MAX_REPEATS" in why_endless(".*.*.*.*.*.*x", by_python=True)
    assert why_endless("(?:[^a]|b)+", by_python=False) == ""


@pytest.mark.parametrize("begin", ["[", "(?", "[\\", "{1", "(?<a", "[:a:", "\\"])
def test_a_pattern_that_is_none_is_read_in_time_by_its_length(begin: str) -> None:
    """Reading must not try again itself: the first of these took eight seconds when it did."""
    pattern = (begin * MAX_PATTERN_CHARS)[:MAX_PATTERN_CHARS]
    assert isinstance(why_endless(pattern, by_python=True), str)
