"""The chat that a body of ``/v1/messages`` asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.service.errors import ApiError
from engine.service.grammars import grammar_of
from engine.service.messages_request import BILLING
from engine.service.parsing import Limits, ParsedCount, ParsedMessages, parse
from engine.service.tools import functions_of
from engine.service.turns import FunctionCall, TextPart, ToolCall, Turn

LIMITS = Limits("tiny", 4, 256, 300, 1000)
SCHEMA = {"type": "object", "properties": {"a": {"type": ["string", "null"], "default": None}}}
ADD = {"name": "add", "description": "x", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def asked(messages: Any = HI, **fields: Any) -> ParsedMessages:
    return parse(ParsedMessages, json.dumps({"messages": messages, "max_tokens": 5} | fields).encode(), LIMITS)


def turns(messages: Any = HI, **fields: Any) -> tuple[Turn, ...]:
    return asked(messages, **fields).conversation.turns


def refused(messages: Any = HI, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        asked(messages, **fields)
    assert error.value.kind == "invalid"
    return error.value


def test_the_system_is_one_turn_without_the_line_of_bookkeeping() -> None:
    blocks: list[Any] = [{"type": "text", "text": f"{BILLING} cc_version=1; cch={{}}"}]
    blocks += [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in "ab"]
    assert turns(system=blocks) == (Turn("system", "a\n\nb"), Turn("user", "hi"))
    assert turns(system=blocks[:1]) == turns(system="") == turns() == (Turn("user", "hi"),)
    among = [{"role": "system", "content": "c"}, *HI, {"role": "system", "content": "d"}]
    assert turns(among, system="a") == (Turn("system", "a\n\nc"), Turn("user", "hi"), Turn("system", "d"))


def test_thoughts_calls_and_what_tools_came_to_are_turns() -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "why", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": None}},
            {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "3"},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True,
             "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "5"}]},
            {"type": "text", "text": "So?"},
        ]},
    ]  # fmt: skip
    _, called, one, two, last = turns(messages)
    assert (called.text, called.reasoning_content) == ("Well.", "why")
    assert called.tool_calls == [
        ToolCall("t1", FunctionCall("add", {"a": None})), ToolCall("t2", FunctionCall("now", {})),
    ]  # fmt: skip
    assert (one.role, one.text, one.tool_call_id) == ("tool", "3", "t1")
    assert (two.role, two.text, two.tool_call_id) == ("tool", "4\n5", "t2")
    assert last == Turn("user", [TextPart("So?")])


def test_functions_are_tools_and_what_other_services_run_is_left_out() -> None:
    found = asked(tools=[ADD, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}])
    assert functions_of(found.options) == [{"name": "add", "description": "x", "parameters": SCHEMA}]
    (shown,) = found.conversation.tools or ()
    assert shown["function"]["parameters"] == SCHEMA, "null stays null in a schema"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "tool", "name": "add"}, "add"),
        ({"type": "none"}, "none"),
    ],
)
def test_a_choice_says_what_must_be_called(choice: dict[str, Any], expected: str) -> None:
    options = asked(tools=[ADD], tool_choice=choice).options
    assert getattr(options.tool_choice, "chosen", options.tool_choice) == expected
    assert (options.parallel_tool_calls is False) == ("disable_parallel_tool_use" in choice)


def test_a_format_is_a_grammar() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        _, grammar = grammar_of(asked(**fields).options) or ("", None)
        assert grammar is not None and json.loads(grammar.text) == SCHEMA


def test_what_clients_send_besides_is_taken() -> None:
    found = asked(
        thinking={"type": "adaptive", "display": "summarized"}, output_config={"effort": "high"}, stop_sequences=["x"],
        context_management={"edits": []}, metadata={"user_id": "u"}, betas=[], container=None, service_tier="auto",
        temperature=0.5, top_k=3, mcp_servers=[],
    )  # fmt: skip
    assert found.conversation.variables == {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}
    options = found.options
    assert (options.user, options.stop, options.temperature, options.top_k) == ("u", ["x"], 0.5, 3)
    assert asked(thinking={"type": "disabled"}).conversation.variables == {"enable_thinking": False, "thinking": False}


def test_counting_takes_the_same_without_a_limit() -> None:
    body = json.dumps({"messages": HI, "system": "a", "tools": [ADD], "thinking": {"type": "disabled"}}).encode()
    counted = parse(ParsedCount, body, LIMITS).conversation
    assert counted == asked(system="a", tools=[ADD], thinking={"type": "disabled"}).conversation


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]}]},
         "messages[0].content[0].content[0]"),
        ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}, *HI]},
         "messages[1].content[0].name"),
        ({"messages": [*HI, {"role": "assistant", "content": [{"type": "image"}]}, *HI]}, "messages[1].content[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"name": "a b"}]}, "tools[0]"),
        ({"tools": [{"description": "x"}]}, "tools[0].name"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"surprise": 1}, "surprise"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_blocks_of_other_services_are_passed_over_and_texts_are_told() -> None:
    others: list[Any] = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}]
    others += [
        {"type": f"{kind}_tool_result", "tool_use_id": "s", "content": {"type": "error"}}
        for kind in ("web_fetch", "mcp")
    ]
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    found = {"type": "search_result", "source": "x", "title": "t", "content": [{"type": "text", "text": "F"}]}
    messages = [
        *HI,
        {"role": "assistant", "content": [*others, {"type": "text", "text": "a"}]},
        {"role": "user", "content": [document, found]},
    ]
    _, answer, user = turns(messages, tools=[{"type": "mcp_toolset", "mcp_server_name": "x"}])
    assert answer.text == "a" and user.content == [TextPart("D"), TextPart("F")]
