"""Arguments of calls, as JSON for clients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.service.call_readers import LONGEST_NAME, CallReader, MarkedReader, NamedReader, reader_of
from engine.service.tool_syntax import SYNTAXES, CallSyntax

BY_NAME = {syntax.name: syntax for syntax in SYNTAXES}
TYPES = {"s": {"type": "string"}, "n": {"type": "integer"}, "any": {}}


def marked(pieces: Sequence[str]) -> tuple[list[str], MarkedReader]:
    reader = reader_of(BY_NAME["functions"], {"f": {"properties": TYPES}})
    assert isinstance(reader, MarkedReader)
    found = []
    for piece in pieces:
        for part in reader.feed(piece):
            reader.index = 0
            found.append(part)
    return found, reader


def call(**values: str) -> str:
    return "<function=f>" + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items()) + "</function>"


plain = st.none() | st.booleans() | st.integers() | st.text(st.sampled_from("'\"\\\n ,)}]=ux0ü😀"), max_size=8)
json_values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text("a'\""), inner), max_leaves=6)
values = st.text(st.sampled_from('<>/"\\\n ax{}[]1,ü😀'), max_size=12)


@given(values, values, st.data())
def test_a_string_is_the_text_between_its_marks(first: str, second: str, data: Any) -> None:
    text = call(s=first, any=second)
    at, to = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    found, reader = marked([text[:at], text[at:to], text[to:]])
    arguments = json.loads("".join(found))
    assert reader.ended and not reader.rest and arguments["s"] == first
    try:
        assert arguments["any"] == json.loads(second)
    except ValueError:
        assert arguments["any"] == second
    assert "".join(marked(list(text))[0]) == "".join(found)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "01", "[1", "", "True", "nul"])
def test_what_is_no_json_is_a_string(value: str) -> None:
    found, _ = marked([call(n=value)])
    assert json.loads("".join(found)) == {"n": value}


def test_a_string_is_passed_on_while_it_is_written() -> None:
    text = call(s="one two three")
    assert [piece for piece in marked(list(text))[0] if piece][:4] == ['{"s": "', "o", "n", "e"]


@pytest.mark.parametrize("text", ["x" * LONGEST_NAME, "a b[ARGS]{}", "[ARGS]{}", "f[ARGS]x"])
def test_what_has_no_name_is_no_call_and_all_of_it_is_given_back(text: str) -> None:
    for pieces in ([text], list(text)):
        reader, rest = NamedReader("", "[ARGS]"), ""
        for piece in pieces:
            if reader.failed:
                rest += piece
            else:
                assert not [*reader.feed(piece)]
        assert reader.failed and reader.raw + reader.rest + rest == text


def literal(pieces: Sequence[str], name: str = "pythonic") -> tuple[list[str], CallReader]:
    reader, found = reader_of(BY_NAME[name], {"f": {}}), []
    for piece in pieces:
        for part in reader.feed(piece):
            reader.index = 0
            found.append(part)
    return found, reader


def test_a_string_among_literals_is_passed_on_while_it_is_written_and_other_values_when_they_are_complete() -> None:
    text = "f(s='one \\n two', n=[12, 3])"
    assert literal(list(text))[0][:6] == ['{"s": ', '"', "o", "n", "e", " "]
    assert literal(list(text))[0][-3:] == [', "n": ', "[12, 3]", "}"]


@given(st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), json_values, max_size=3), st.data())
def test_keywords_are_the_properties_of_an_object(arguments: dict[str, Any], data: Any) -> None:
    """As Python and as JSON write their values."""
    for written in (repr, json.dumps):
        text = f"f({', '.join(f'{key}={written(value)}' for key, value in arguments.items())})"
        at, to = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        found, reader = literal([text[:at], text[at:to], text[to:]])
        assert reader.ended and not reader.rest and json.loads("".join(found)) == arguments


def test_a_quote_that_begins_with_another_one_is_told_from_it_however_it_is_cut() -> None:
    syntax = CallSyntax(opens="<", form="literal", after_name="(", after_key="=", ends=")", quote="''")
    for values in ("s='', '')", "s=['', ''])"):
        text, found = "f(" + values, set()
        for pieces in ([text], text):
            reader = reader_of(syntax, {"f": {}})
            parts = []
            for piece in pieces:
                for part in reader.feed(piece):
                    reader.index = 0
                    parts.append(part)
            found.add("".join(parts))
        assert len(found) == 1 and ", " in found.pop()
