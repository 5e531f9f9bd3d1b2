"""From the fields of a request to the grammar of its output; grammars that are refused before they are queued."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from engine.contracts.config import ConstraintConfig
from engine.contracts.constraint import Grammar, GrammarKind
from engine.service.errors import ApiError
from engine.service.grammar_child import Verdict
from engine.service.grammars import MOST_WAITING, GrammarChecks, grammar_of, too_large
from engine.service.messages_request import MessagesOptions
from engine.service.ollama_request import OllamaOptions
from engine.service.parsing import Limits, ParsedMessages, parse
from engine.service.protocol import ChatOptions, ChatRequest, JsonSchemaFormat, ResponseFormat, decode
from engine.service.responses_request import ResponsesOptions
from engine.service.sandbox.process import SandboxEnded

from .fakes import in_loop

SCHEMA = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
JSON, ANY = Grammar("json_schema", TEXT), Grammar("json_object")


def asked(**fields: Any) -> tuple[str, Grammar] | None:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return grammar_of(decode(json.dumps(body).encode(), ChatRequest))


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert caught.value.kind == "invalid"
    return caught.value


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, ANY),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, JSON),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True}}}, ANY),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, Grammar("regex", "a+")),
        ({"response_format": {"type": "grammar", "grammar": "start: /a/"}}, Grammar("lark", "start: /a/")),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json": TEXT}}, JSON),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("gbnf", 'root ::= "a"')),
        ({"structured_outputs": {"json_object": True}}, ANY),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a","b"]')),
        ({"guided_grammar": "start: /a/"}, Grammar("lark", "start: /a/")),
        ({"json_schema": SCHEMA}, JSON),
        ({"grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
        ({"guided_json": True}, Grammar("json_schema", "true")),
    ],
)
def test_every_spelling_is_understood(fields: dict[str, Any], grammar: Grammar) -> None:
    for others in ({}, {"stop": None, "anything": None, "logit_bias": {"5": None}}):
        found = asked(**fields, **others)
        assert found is not None and found[1] == grammar and found[0].startswith(next(iter(fields)))


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": {}}, {"grammar": ""}],
)
def test_most_requests_say_nothing_of_their_output(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "grammar": "x"}, "grammar"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
    ],
)
def test_what_makes_no_grammar_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("grammar", "limit"),
    [
        (Grammar("regex", "a" * 101), "max_bytes"),
        (Grammar("json_schema", json.dumps({"properties": {str(i): {} for i in range(6)}})), "max_properties"),
        (Grammar("json_schema", json.dumps([{"properties": {"a": {}}}] * 6)), "max_properties"),
        (Grammar("json_schema", json.dumps({"enum": [*range(8)]})), "max_enum"),
        (Grammar("json_schema", nested(9)), "max_depth"),
        (Grammar("regex", "a" * 41), "max_text"),
        (Grammar("choice", json.dumps(["a", "b" * 41])), "max_text"),
        (Grammar("json_schema", json.dumps({"items": {"const": "a" * 41}})), "max_text"),
        (Grammar("json_schema", json.dumps({"enum": [1, "a" * 41]})), "max_text"),
        (Grammar("json_schema", json.dumps({"pattern": "a" * 41})), "max_text"),
        (Grammar("json_schema", json.dumps({"properties": {"a" * 41: {}}})), "max_text"),
        (Grammar("json_schema", json.dumps({"patternProperties": {"a" * 41: {}}})), "max_text"),
        (Grammar("json_schema", json.dumps({"required": ["a" * 41]})), "max_text"),
        (Grammar("json_schema", json.dumps({"const": {"x": ["a" * 41]}})), "max_text"),
        (Grammar("json_schema", json.dumps({"enum": [1, [{"a" * 41: 1}]]})), "max_text"),
        (Grammar("lark", f'start: "a" /x/ "{"a" * 41}"'), "max_text"),
        (Grammar("lark", f'start: /["]/ /{"ab" * 21}/'), "max_text"),
        (Grammar("gbnf", f'root ::= ["] "{"a" * 41}"'), "max_text"),
    ],
)
def test_a_grammar_beyond_a_limit_is_named_with_the_limit(grammar: Grammar, limit: str) -> None:
    small = ConstraintConfig(max_bytes=100, max_properties=5, max_enum=7, max_depth=8, max_text=40)
    assert f"(constraint.{limit})" in too_large(grammar, small if limit == "max_bytes" else _roomy(small))
    assert too_large(grammar, ConstraintConfig()) == ""


def _roomy(config: ConstraintConfig) -> ConstraintConfig:
    return replace(config, max_bytes=10**6)


def test_what_a_schema_says_of_itself_may_be_long() -> None:
    schema = {"description": "a" * 9000, "properties": {"enum": {"type": "string"}, "const": {"title": "a" * 9000}}}
    assert too_large(Grammar("json_schema", json.dumps(schema)), ConstraintConfig()) == ""


def test_a_long_grammar_of_short_texts_has_no_long_text() -> None:
    many = " ".join(f'"{i}" /[0-9]+/' for i in range(2000))
    assert too_large(Grammar("lark", f"start: {many}"), ConstraintConfig()) == ""


@pytest.mark.parametrize("text", ['"\\', '["', '"', '/"', "[\n", '"\\\n'])
@pytest.mark.parametrize("kind", ["lark", "gbnf"])
def test_long_texts_are_looked_for_once(text: str, kind: GrammarKind) -> None:
    """What does not end is not looked at again: looking at every rest would take minutes here."""
    too_large(Grammar(kind, text * 200_000), ConstraintConfig(max_bytes=10**9))


class Compiler:
    """Refuses what says so, breaks where it says so, and ends where it says so."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.proceed = asyncio.Event()

    async def verdict(self, grammar: Grammar, cpu_s: float) -> Verdict:
        self.compiled.append(grammar.text)
        match grammar.text:
            case "wrong":
                return Verdict("it is wrong")
            case "broken":
                return Verdict("a bug", is_fault=True)
            case "ended":
                raise SandboxEnded("could not be started: a bug")
            case "slow":
                await self.proceed.wait()
        return Verdict()

    def close(self) -> None: ...


async def failure(checks: GrammarChecks, text: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await checks.check(Grammar("regex", text), "guided_regex")
    return caught.value


@in_loop
async def test_a_grammar_is_compiled_once_and_refused_for_its_reason_every_time() -> None:
    compiler = Compiler()
    checks = GrammarChecks(compiler)
    for _ in range(2):
        error = await failure(checks, "wrong")
        assert (error.kind, error.param, error.code) == ("invalid", "guided_regex", "invalid_grammar")
        assert error.message == "guided_regex: It is wrong."
        await checks.check(Grammar("regex", "right"), "guided_regex")
    assert compiler.compiled == ["wrong", "right"]


@in_loop
async def test_a_plugin_that_breaks_fails_the_request_and_nothing_else() -> None:
    checks = GrammarChecks(Compiler())
    for text in ("broken", "ended"):
        error = await failure(checks, text)
        assert error.kind == "failed" and "bug" not in error.message
    await checks.check(Grammar("regex", "right"), "guided_regex")


@in_loop
async def test_grammars_beyond_those_that_may_wait_are_refused_at_once() -> None:
    compiler = Compiler()
    checks = GrammarChecks(compiler)
    waiting = [asyncio.create_task(checks.check(Grammar("regex", "slow"), "x")) for _ in range(MOST_WAITING)]
    await asyncio.sleep(0)
    assert (await failure(checks, "right")).kind == "overloaded"
    compiler.proceed.set()
    await asyncio.gather(*waiting)
    await checks.check(Grammar("regex", "right"), "x")


DEEP: Any = {"type": "object"}
for _ in range(600):
    DEEP = {"allOf": [DEEP]}


@pytest.mark.parametrize(
    ("options", "field", "schema_field"),
    [
        (ChatOptions(), "response_format", "response_format.json_schema.schema"),
        (ResponsesOptions(), "text.format", "text.format.schema"),
        (MessagesOptions(), "output_config.format", "output_config.format.schema"),
        (MessagesOptions(uses_output_format=True), "output_format", "output_format.schema"),
        (OllamaOptions(), "format", "format"),
    ],
)
def test_errors_name_the_field_that_the_client_sent(options: ChatOptions, field: str, schema_field: str) -> None:
    options.response_format = ResponseFormat("json_schema", JsonSchemaFormat(SCHEMA))
    name, _ = grammar_of(options) or ("", None)
    assert name == field
    options.response_format = ResponseFormat("json_schema", JsonSchemaFormat(DEEP))
    with pytest.raises(ApiError) as caught:
        grammar_of(options)
    assert caught.value.param == schema_field and caught.value.message.startswith(schema_field)


def test_a_format_by_its_older_name_is_named_so() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields, name in (({"output_format": form}, "output_format"),
                         ({"output_config": {"format": form}}, "output_config.format")):  # fmt: skip
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5} | fields
        parsed = parse(ParsedMessages, json.dumps(body).encode(), Limits("tiny", 4, 256, 300, 1000))
        found, _ = grammar_of(parsed.options) or ("", None)
        assert found == name
