"""What of an output is a call and what is text, however it is cut into pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine.service.parts import CallText, Part, Text
from engine.service.tool_parser import ToolParser
from engine.service.tool_syntax import SYNTAXES, CallSyntax, syntax_of

CITY = {"city": {"type": "string"}, "n": {"type": "integer"}, "tags": {"type": "array"}}
FUNCTIONS: dict[str, dict[str, Any]] = {"add": {}, "get_weather": {"type": "object", "properties": CITY}}
BY_NAME = {syntax.name: syntax for syntax in SYNTAXES}
Found = tuple[str, list[tuple[str, str]]]
"""Text for the reader, and names and arguments of calls."""


def parsed(syntax: CallSyntax, pieces: Sequence[str], most: int | None = None) -> Found:
    parser = ToolParser(syntax, FUNCTIONS, most)
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
    ("named", f"Wait. [TOOL_CALLS]add[ARGS]{ADD}", ("Wait. ", [("add", ADD)])),
    (
        "named",
        f"[TOOL_CALLS]add[CALL_ID]abc123[ARGS] {ADD}[TOOL_CALLS]get_weather[ARGS]{WEATHER}",
        ("", [("add", ADD), ("get_weather", WEATHER)]),
    ),
    ("named", "[TOOL_CALLS]add and no arguments", ("[TOOL_CALLS]add and no arguments", [])),
    ("named", "[TOOL_CALLS]add[ARGS]none", ("[TOOL_CALLS]add[ARGS]none", [])),
    ("named", '[TOOL_CALLS]add[ARGS]{"a": "cut', ("", [("add", '{"a": "cut')])),
    ("token_listed", f'<|tool_call|>[{{"name": "add", "arguments": {ADD}}}]', ("", [("add", ADD)])),
    (
        "separated",
        f"So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{WEATHER}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("So.", [("add", ADD), ("get_weather", WEATHER)]),
    ),
    (
        "fenced",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{ADD}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", [("add", ADD), ("add", "{}")]),
    ),
    (
        "sections",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{ADD}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        ("", [("add", ADD)]),
    ),
    (
        "functions",
        'Wait.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBrünn "x"\n\n</parameter>\n<parameter=n>\n12\n'
        '</parameter>\n<parameter=tags>\n[1, "a"]\n</parameter>\n<parameter=other>\n007\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call><function=add></function></tool_call>",
        (
            "Wait.\n",
            [
                ("get_weather", '{"city": "Brünn \\"x\\"\\n", "n": 12, "tags": [1, "a"], "other": "007"}'),
                ("add", "{}"),
            ],
        ),
    ),
    (
        "functions",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12",
        ("", [("get_weather", '{"city": "12')]),
    ),
    ("functions", "<tool_call>\n<b>no</b>", ("<tool_call>\n<b>no</b>", [])),
    (
        "functions",
        "<tool_call><function=get_weather><parameter=city>a</parameter>and on",
        ("and on", [("get_weather", '{"city": "a"}')]),
    ),
    (
        "pairs",
        "Wait.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>a < b</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>true</arg_value>\n</tool_call><tool_call>add\n</tool_call>",
        ("Wait.", [("get_weather", '{"city": "a < b", "n": true}'), ("add", "{}")]),
    ),
    ("pairs", "<tool_call>add</tool_call>", ("", [("add", "{}")])),
    ("pythonic", "[add()]", ("", [("add", "{}")])),
    (
        "pythonic",
        '\n[get_weather(city="Brünn \\"x\\" \\x41\\n", n=-12,\n tags=["a, ]", {"b": None, \'c\': [True]}]), add()]',
        (
            "",
            [
                (
                    "get_weather",
                    r'{"city": "Brünn \"x\" \u0041\n", "n": -12, "tags": ["a, ]", {"b": null, "c": [true]}]}',
                ),
                ("add", "{}"),
            ],
        ),
    ),
    ("pythonic", "<|python_start|>[add(a='x',)]<|python_end|>", ("", [("add", '{"a": "x"}')])),
    (
        "pythonic",
        "[add(a=null, b=true)]\n[add(a=c + [1, 2], b=)]",
        (
            "",
            [
                ("add", '{"a": null, "b": true}'),
                ("add", '{"a": "c + [1, 2]", "b": ""}'),
            ],
        ),
    ),
    ("pythonic", "[add(a='x' 'y')]", ("'y')]", [("add", '{"a": "x"}')])),
    ("pythonic", "[add(a=1), none]", (", none]", [("add", '{"a": 1}')])),
    ("pythonic", '[add(a="cut \\u00f', ("", [("add", '{"a": "cut ')])),
    ("pythonic", "[other(a=1)]", ("[other(a=1)]", [])),
    ("pythonic", "[1] says so, [add(a=1)]", ("[1] says so, [add(a=1)]", [])),
    ("pythonic", " [add(1)]", (" [add(1)]", [])),
    ("pythonic", "[add(a b=1)]", ("[add(a b=1)]", [])),
    ("pythonic", "[add", ("[add", [])),
    (
        "lines",
        'Wait. <function_calls>add(a={"b": [1, null]})\nget_weather(city="x")</function_calls>Done.',
        ("Wait. Done.", [("add", '{"a": {"b": [1, null]}}'), ("get_weather", '{"city": "x"}')]),
    ),
    ("lines", "<function_calls>[other.f(a=1)]</function_calls>", ("", [("other.f", '{"a": 1}')])),
    ("lines", "<function_calls></function_calls>", ("<function_calls></function_calls>", [])),
    (
        "harmony",
        f"Wait.<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ADD}",
        ("Wait.", [("add", ADD)]),
    ),
    (
        "quoted",
        'Wait.<|tool_call>call:get_weather{city:<|"|>Brünn "x", \\n\n{<|"|>,n:3,'
        'tags:[<|"|>a, }<|"|>,{<|"|>b c<|"|>:true,d:null}]}<tool_call|>'
        "<|tool_call>call:add{}<tool_call|>",
        (
            "Wait.",
            [
                ("get_weather", r'{"city": "Brünn \"x\", \\n\n{", "n": 3, "tags": ["a, }", {"b c": true, "d": null}]}'),
                ("add", "{}"),
            ],
        ),
    ),
    (
        "quoted",
        '<|tool_call>call:add{<|"|>a<|"|>:"x\\n", b:y z}<tool_call|>',
        ("", [("add", r'{"a": "x\n", "b": "y z"}')]),
    ),
    ("quoted", '<|tool_call>call:add{a:<|"|>cut <|', ("", [("add", '{"a": "cut ')])),
    ("quoted", "<|tool_call>add{a:1}<tool_call|>", ("<|tool_call>add{a:1}<tool_call|>", [])),
    ("quoted", "<|tool_call>call:add{a:1]}<tool_call|>x", ("]}<tool_call|>x", [("add", '{"a": 1}')])),
    (
        "escaped",
        "<start_function_call>call:add{a:<escape>x, y<escape>,b:[1,-2.5]}<end_function_call>",
        ("", [("add", '{"a": "x, y", "b": [1, -2.5]}')]),
    ),
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
    parser = ToolParser(BY_NAME["tagged"], FUNCTIONS)
    pieces = ['<tool_call>{"name": "add", "argu', 'ments": {"a"', ": 1", "2}}</tool_call>"]
    seen = [[part.arguments for part in parser.feed(piece) if isinstance(part, CallText)] for piece in pieces]
    assert seen == [[], ['{"a"'], [": 1"], ["2}"]]


def test_calls_beyond_the_most_are_left_out() -> None:
    one = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for pieces in ([one * 3], [*one * 3]):
        assert parsed(BY_NAME["tagged"], pieces, most=1) == ("", [("add", "{}")])


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (8, 9))])
def test_mutated_outputs_lose_no_text_and_cuts_change_nothing(seed: int, name: str) -> None:
    """Of what is no call every character is text."""
    syntax, draw = BY_NAME[name], random.Random(seed)
    texts = [text for of, text, _ in CASES if of == name]
    for _ in range(240):
        characters = list(draw.choice(texts))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(characters) + 1)
            characters[at : at + draw.randrange(3)] = draw.choice(
                ['"', "{", "}", "[", "]", "\\", ",", ":", "<", "x", "", "'", "(", ")", "=", "|", " ", '<|"|>']
            )
        text = "".join(characters)
        whole = parsed(syntax, [text])
        assert parsed(syntax, list(text)) == whole, text
        if not whole[1]:
            assert without(syntax.wraps, whole[0]) == without(syntax.wraps, text)


def without(texts: Sequence[str], found: str) -> str:
    for text in texts:
        found = found.replace(text, "")
    return found


def test_the_syntax_is_told_by_the_template() -> None:
    assert syntax_of("{{ '<tool_call>' }}") is BY_NAME["tagged"]
    assert syntax_of("[TOOL_CALLS]") is BY_NAME["listed"]
    assert syntax_of("[TOOL_CALLS][ARGS]") is BY_NAME["named"]
    assert syntax_of("<tool_call>\n<function=") is BY_NAME["functions"]
    assert syntax_of("<tool_call><arg_key>") is BY_NAME["pairs"]
    assert syntax_of("<｜tool▁sep｜>") is BY_NAME["separated"]
    assert syntax_of("<｜tool▁sep｜>\n```json") is BY_NAME["fenced"]
    assert syntax_of('{"name": x, "parameters": y}') is BY_NAME["bare"]
    assert (
        syntax_of("Respond in the format [func_name1(params_name1=params_value1), func_name2(params)]")
        is (BY_NAME["pythonic"])
    )
    assert syntax_of("'<|tool_call>call:' + function['name'] + '{'") is BY_NAME["quoted"]
    assert syntax_of("<start_function_call>call:") is BY_NAME["escaped"]
    assert syntax_of("<|tool_call|>") is BY_NAME["token_listed"]
    assert syntax_of("'<function_calls>' + name + '(' + arguments + ')'") is BY_NAME["lines"]
    assert syntax_of("{{ messages }}") is None
    assert json.loads(ADD) and json.loads(WEATHER)


def test_of_an_output_that_is_calls_alone_nothing_that_was_cut_is_text() -> None:
    for text in ('<tool_call>{"name": "a', '<tool_call>{"name": "add", "arguments": {}}</tool', "<tool_c"):
        parser = ToolParser(BY_NAME["tagged"], FUNCTIONS, calls_only=True)
        parts = [*parser.feed(text), *parser.finish()]
        assert not any(isinstance(part, Text) for part in parts)


@pytest.mark.parametrize(("text", "arguments"), [("[add(", ""), ("[add(no keyword", "{}"), ("[add(a=1", '{"a": ')])
def test_what_must_be_a_call_is_one_from_its_name_on(text: str, arguments: str) -> None:
    """A grammar of the name alone lets anything follow."""
    for pieces in ([text], list(text)):
        parser = ToolParser(BY_NAME["pythonic"], FUNCTIONS, calls_only=True)
        found = [part for piece in pieces for part in parser.feed(piece)]
        assert joined([*found, *parser.finish()]) == ("", [("add", arguments)])
