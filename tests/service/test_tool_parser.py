"""What of an output is a call and what is text, however it is cut into pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from engine.service.parts import CallText, Part, Text
from engine.service.tool_parser import ToolParser
from engine.service.tool_syntax import SYNTAXES, CallSyntax, syntax_of

NAMES = frozenset({"add", "get_weather"})
BY_NAME = {syntax.name: syntax for syntax in SYNTAXES}
Found = tuple[str, list[tuple[str, str]]]
"""Text for the reader, and names and arguments of calls."""


def parsed(syntax: CallSyntax, pieces: Sequence[str], most: int | None = None) -> Found:
    parser = ToolParser(syntax, NAMES, most)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    parts += parser.finish()
    return joined(parts)


def joined(parts: Sequence[Part]) -> Found:
    """Every call's first part has an id and a name, and no other has."""
    text, calls, ids = "", list[tuple[str, str]](), set[str]()
    for part in parts:
        if isinstance(part, Text):
            text += part.text
        if isinstance(part, CallText):
            if part.index == len(calls):
                assert part.id and part.name and part.id not in ids
                ids.add(part.id)
                calls.append((part.name, ""))
            else:
                assert not part.id and not part.name and part.index == len(calls) - 1
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + part.arguments
    return text, calls


ADD, WEATHER = '{"a": 1, "b": {"c": [2, "}"]}}', '{"city": "Br\\u00fcnn \\"x\\" <tool_call>"}'
CASES: list[tuple[str, str, Found]] = [
    ("tagged", "Hello.", ("Hello.", [])),
    ("tagged", "a < b <tool", ("a < b <tool", [])),
    ("tagged", f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>', ("", [("add", ADD)])),
    ("tagged", f'<tool_call>{{"arguments": {ADD}, "name": "add"}}</tool_call>', ("", [("add", ADD)])),
    (
        "tagged",
        f'Wait.\n<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        ("Wait.\n", [("add", ADD), ("get_weather", WEATHER)]),
    ),
    ("tagged", '<tool_call>\n{"name": "add"}\n</tool_call>', ("", [("add", "{}")])),
    ("tagged", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("add", '{"a": 1}')])),
    ("tagged", "<tool_call>\nnot JSON\n</tool_call> and on", ("<tool_call>\nnot JSON\n</tool_call> and on", [])),
    ("tagged", '<tool_call>{"title": "add"}</tool_call>', ('<tool_call>{"title": "add"}</tool_call>', [])),
    ("tagged", '<tool_call>{"name": "add", "arguments": {"a": 1', ("", [("add", '{"a": 1')])),
    ("tagged", '<tool_call>{"name": "a', ('<tool_call>{"name": "a', [])),
    ("tagged", "<tool_call>", ("<tool_call>", [])),
    ("tagged", f'<tool_call>{{"name": "add", "arguments": {ADD}}}</tool_call>Done.', ("Done.", [("add", ADD)])),
    ("listed", f'[TOOL_CALLS][{{"name": "add", "arguments": {ADD}}}]', ("", [("add", ADD)])),
    (
        "listed",
        f'Wait. [TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}, '
        f'{{"name": "get_weather", "arguments": {WEATHER}}}]',
        ("Wait. ", [("add", ADD), ("get_weather", WEATHER)]),
    ),
    ("listed", "no [calls] here", ("no [calls] here", [])),
    ("bare", f'{{"name": "add", "parameters": {ADD}}}', ("", [("add", ADD)])),
    (
        "bare",
        f'{{"name": "add", "parameters": {ADD}}}; {{"name": "get_weather", "parameters": {WEATHER}}}',
        ("", [("add", ADD), ("get_weather", WEATHER)]),
    ),
    ("bare", '{"name": "Ann", "parameters": 3}', ('{"name": "Ann", "parameters": 3}', [])),
    ("bare", 'It is {"name": "add", "parameters": {}}', ('It is {"name": "add", "parameters": {}}', [])),
    ("bare", '{"type": "function", "name": "add", "parameters": {}}', ("", [("add", "{}")])),
    ("bare", "{}", ("{}", [])),
]


@pytest.mark.parametrize(("name", "text", "found"), CASES, ids=[text[:40] for _, text, _ in CASES])
def test_calls_are_found_however_the_text_is_cut(name: str, text: str, found: Found) -> None:
    syntax = BY_NAME[name]
    assert parsed(syntax, [text]) == found
    assert parsed(syntax, list(text)) == found
    for at in range(len(text) + 1):
        assert parsed(syntax, [text[:at], text[at:]]) == found, at
    draw = random.Random(1)
    for _ in range(20):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(syntax, pieces) == found, pieces


def test_arguments_are_passed_on_as_they_are_written() -> None:
    parser = ToolParser(BY_NAME["tagged"], NAMES)
    pieces = ['<tool_call>{"name": "add", "argu', 'ments": {"a"', ": 1", "2}}</tool_call>"]
    seen = [[part.arguments for part in parser.feed(piece) if isinstance(part, CallText)] for piece in pieces]
    assert seen == [[], ['{"a"'], [": 1"], ["2}"]]


def test_calls_beyond_the_most_are_left_out() -> None:
    one = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parsed(BY_NAME["tagged"], [one * 3], most=1) == ("", [("add", "{}")])


@pytest.mark.parametrize("name", BY_NAME)
def test_mutated_outputs_lose_no_text_and_cuts_change_nothing(name: str) -> None:
    """Of what is no call every character is text."""
    syntax, draw = BY_NAME[name], random.Random(7)
    texts = [text for of, text, _ in CASES if of == name]
    for _ in range(700):
        characters = list(draw.choice(texts))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(characters) + 1)
            characters[at : at + draw.randrange(3)] = draw.choice(
                ['"', "{", "}", "[", "]", "\\", ",", ":", "<", "x", ""]
            )
        text = "".join(characters)
        whole = parsed(syntax, [text])
        assert parsed(syntax, list(text)) == whole, text
        if not whole[1]:
            assert whole[0] == text


def test_the_syntax_is_told_by_the_template() -> None:
    assert syntax_of("{{ '<tool_call>' }}") is BY_NAME["tagged"]
    assert syntax_of("[TOOL_CALLS]") is BY_NAME["listed"]
    assert syntax_of('{"name": x, "parameters": y}') is BY_NAME["bare"]
    assert syntax_of("{{ messages }}") is None
    assert json.loads(ADD) and json.loads(WEATHER)
