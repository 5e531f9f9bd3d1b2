"""Literals of Python and JSON, as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.service.literals import MOST_NESTED, content_length, literal_as_json, unescaped

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.text("\\\"'ux0aé\n", max_size=8)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=9)


def in_pythons_notation(value: Any) -> str:
    """As ``repr``, which has escapes that JSON does not have."""
    text = repr(value)
    return text if text.isprintable() and "\\U" not in text else json.dumps(value)


@given(values)
def test_a_value_is_the_same_in_both_notations(value: Any) -> None:
    for text in (in_pythons_notation(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        found = literal_as_json(text)
        assert found is not None and json.loads(found) == value, text


@given(texts, st.data())
def test_a_string_is_the_same_in_pieces(value: str, data: Any) -> None:
    text = json.dumps(value)
    at, to = sorted(data.draw(st.tuples(*[st.integers(1, len(text))] * 2)))
    held, found = "", ""
    for piece in (text[1:at], text[at:to], text[to:]):
        held += piece
        certain = content_length(held, '"')
        found, held = found + unescaped(held[:certain]), held[certain:]
    assert held == '"' and json.loads(f'"{found}"') == value


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("'it\\'s'", '"it\'s"'),
        ("'\\x41\\q\\\n'", '"\\u0041\\\\q\\\\\\n"'),
        ("'\\ud83d\\ude00'", '"\\ud83d\\ude00"'),
        ('{a: 1, "b": [1,],}', '{"a": 1, "b": [1]}'),
        ("{<|q|>a b<|q|>:<|q|>\\n \"x\"<|q|>}", '{"a b": "\\\\n \\"x\\""}'),
        ("-0.5E+7", "-0.5E+7"),
    ],
)  # fmt: skip
def test_what_json_has_no_form_for_is_said_in_its_own(text: str, found: str) -> None:
    assert literal_as_json(text, "<|q|>") == found
    json.loads(found)


@pytest.mark.parametrize(
    "text",
    [
        "", "name", "f()", "__import__('os')", "1 + 1", "1_000", "007", "0x10", "1.", "nan", "inf", "1j", "(1, 2)",
        "{1, 2}", "[1 2]", "[1", "1]", "'a' 'b'", "'a", "f'a'", "b'a'", "{'a'}", "{1: }", "[,]", "{**a}", "<|q|>a",
    ],
)  # fmt: skip
def test_anything_else_is_no_literal(text: str) -> None:
    assert literal_as_json(text, "<|q|>") is None


def test_what_is_nested_too_deep_is_no_literal() -> None:
    assert literal_as_json("[" * MOST_NESTED + "]" * MOST_NESTED) is not None
    assert literal_as_json("[" * 10**5 + "]" * 10**5) is None
