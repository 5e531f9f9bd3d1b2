"""Syntaxes of calls: told by name, by a file, or by a template; and what their grammars are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.assembly.assemble import assemble
from engine.assembly.errors import AssemblyError
from engine.contracts.constraint import CallsGrammar
from engine.service.parts import CallText, Text, merged
from engine.service.start_check import load_tokenizer
from engine.service.tool_parser import ToolParser
from engine.service.tool_syntax import CHANNELS, SYNTAXES, CallSyntax, call_grammar, told_syntax

MADE_UP = {
    "opens": "<<", "closes": ">>", "form": "literal", "listed": True,
    "after_name": "{", "after_key": " is ", "ends": "}", "quote": "~",
}  # fmt: skip


def calls(*arguments: Any, **named: Any) -> CallsGrammar:
    return msgspec.json.decode(call_grammar(*arguments, **named).text, type=CallsGrammar)


def file(folder: Path, said: object) -> Path:
    found = folder / "syntax.json"
    found.write_text(said if isinstance(said, str) else json.dumps(said), "utf-8")
    return found


def test_a_syntax_is_told_by_its_name_or_by_a_file(tmp_path: Path) -> None:
    for syntax in SYNTAXES:
        assert told_syntax(syntax.name) is syntax
    assert told_syntax(str(file(tmp_path, MADE_UP))) == CallSyntax(**MADE_UP)
    for syntax in SYNTAXES:
        assert told_syntax(str(file(tmp_path, msgspec.to_builtins(syntax)))) == syntax


def test_a_syntax_of_a_file_is_read_however_the_text_is_cut(tmp_path: Path) -> None:
    syntax = told_syntax(str(file(tmp_path, MADE_UP)))
    text = "So. <<add{a is ~x, } y~, b is [1, True]}; now{}>> Done. <<no"
    for at in range(len(text) + 1):
        parser = ToolParser(syntax, {"add": {}, "now": {}})
        parts = merged([*parser.feed(text[:at]), *parser.feed(text[at:]), *parser.finish()])
        told = [part.text if isinstance(part, Text) else str(msgspec.structs.astuple(part)[1]) for part in parts]
        assert told == ["So. ", '{"a": "x, } y", "b": [1, true]}', "{}", "Done. <<no"], at


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("{", "not valid JSON"),
        ([], "not a JSON object"),
        ({"form": "poem"}, "Invalid enum value 'poem'"),
        (MADE_UP | {"begins": "<"}, "unknown field `begins`"),
        (MADE_UP | {"listed": "yes"}, "Expected `bool`, got `str`"),
        (MADE_UP | {"after_key": "", "ends": ""}, "form=literal needs after_key and ends"),
        (MADE_UP | {"opens": "", "brackets": False}, "form=literal needs opens"),
        ({"form": "named"}, "form=named needs opens and after_name"),
        ({"form": "marked", "opens": "<"}, "needs before_key and after_key and after_value and ends"),
    ],
)
def test_a_file_that_is_no_syntax_is_refused_with_a_reason(said: object, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        told_syntax(str(file(tmp_path, said)))


def test_a_server_is_told_with_a_setting(tmp_path: Path) -> None:
    setting = f"server.tool_syntax={file(tmp_path, MADE_UP)}"
    tokenizer = load_tokenizer(assemble([setting]))
    assert tokenizer.call_syntax == CallSyntax(**MADE_UP)
    tokenizer.close()
    for wrong, why in (("poems", "expected one of bare, "), (tmp_path / "none.json", "cannot read none.json")):
        with pytest.raises(AssemblyError, match=f"server.tool_syntax={wrong}: .*{why}"):
            load_tokenizer(assemble([f"server.tool_syntax={wrong}"]))


def test_special_tokens_within_a_text_are_told_by_their_ids() -> None:
    ids = {"<|channel|>": 1, "<|message|>": 2, "<|constrain|>": 3, "<|end|>": 4, "<|start|>": 5}
    found = calls(CHANNELS, [{"name": "<|end|>"}], ids)
    assert found.begins == ((1, "commentary to=functions.", "<|end|>", " ", 3, "json", 2),), "a name is text"
    assert (found.thought, found.ends_thought, found.answer) == (
        (1, "analysis", 2), (4, 5, "assistant"), (1, "final", 2)
    )  # fmt: skip
    assert not found.several and found.opens == ""
    assert calls(CHANNELS, [{"name": "f"}], {}).thought == (), "without its tokens there is no telling where it ends"


def test_of_a_call_that_is_no_json_the_name_alone_is_described() -> None:
    by_name = {syntax.name: syntax for syntax in SYNTAXES}
    for name, begins in {"pythonic": ("[", "f", "("), "lines": ("f", "("), "quoted": ("call:", "f", "{")}.items():
        found = calls(by_name[name], [{"name": "f"}], {'<|"|>': 7, "<|tool_call>": 8})
        assert (found.begins, found.is_free, found.listed) == ((begins,), True, False)
        assert found.free_tokens == ((8, 7) if name == "quoted" else ())


def test_the_example_in_the_documentation_is_a_syntax(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    example = page.partition("this is that of LFM 2.5:")[2].partition("```json")[2].partition("```")[0]
    parser = ToolParser(told_syntax(str(file(tmp_path, example))), {"add": {}})
    parts = merged([*parser.feed("<|tool_call_start|>[add(a='x', b=1)]<|tool_call_end|>Wait."), *parser.finish()])
    (call, text) = parts
    assert isinstance(call, CallText) and (call.name, call.arguments) == ("add", '{"a": "x", "b": 1}')
    assert text == Text("Wait.")


@pytest.mark.parametrize(
    ("parameters", "others"),
    [
        ({"type": "object", "properties": {"a": {}}}, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object"}, None),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, {"type": "integer"}),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, None),
    ],
)
def test_a_function_takes_no_arguments_but_those_it_names(parameters: dict[str, Any], others: Any) -> None:
    function = {"name": "f", "parameters": parameters}
    (tagged,) = calls(told_syntax("tagged"), [function], {}).schemas
    (named,) = calls(told_syntax("named"), [function], {}).schemas
    assert tagged["properties"]["arguments"].get("additionalProperties") == others
    assert named.get("additionalProperties") == others
