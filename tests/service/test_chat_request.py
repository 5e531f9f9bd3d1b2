"""What chats say of tools in older and newer notations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.service.errors import ApiError
from engine.service.parsing import Limits, ParsedChat, parse, parse_messages
from engine.service.tools import functions_of
from engine.service.turns import FunctionCall, ToolCall

LIMITS = Limits("tiny", 4, 256, 300, 1000)
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "add", "parameters": {"type": "object", "properties": {"a": {"default": None}}}},
    {"name": "now"},
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


def asked(**fields: Any) -> ParsedChat:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return parse(ParsedChat, json.dumps(body).encode(), LIMITS)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_shown_and_called(mode: str) -> None:
    found = asked(tools=TOOLS, tool_choice=allowed(mode, "now"))
    assert [function["name"] for function in functions_of(found.options)] == ["now"]
    assert [tool["function"]["name"] for tool in found.conversation.tools or ()] == ["now"]
    assert found.options.tool_choice == mode


def test_functions_are_tools_and_a_function_call_is_the_choice_among_them() -> None:
    found = asked(functions=FUNCTIONS)
    assert found.options.tools == asked(tools=TOOLS).options.tools
    assert found.conversation.tools == asked(tools=TOOLS).conversation.tools, "null stays null in a schema"
    assert found.options.parallel_tool_calls is False and found.options.tool_choice is None
    named = asked(functions=FUNCTIONS, function_call={"name": "now"}).options.tool_choice
    assert getattr(named, "chosen", None) == "now"
    assert asked(functions=FUNCTIONS, function_call="none").options.tool_choice == "none"
    assert asked(functions=[], function_call="auto").options.tools is None


def test_a_function_message_says_what_the_call_before_it_came_to() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "3"},
    ]
    _, called, came_to = parse_messages(messages).turns
    assert called.tool_calls == [ToolCall("add", FunctionCall("add", {"a": 1}))]
    assert (came_to.role, came_to.text, came_to.tool_call_id) == ("tool", "3", "add")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "functions": FUNCTIONS}, "functions"),
        ({"function_call": {"name": "add"}}, "function_call"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "other")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("none", "add")}, "tool_choice.allowed_tools.mode"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type"),
        ({"messages": [{"role": "function", "content": "3"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call.name"),
        ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        asked(**fields)
    assert (error.value.kind, error.value.param) == ("invalid", param)
