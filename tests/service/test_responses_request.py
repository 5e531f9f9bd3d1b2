"""The chat that a body of ``/v1/responses`` asks for."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from engine.service.errors import ApiError
from engine.service.grammars import grammar_of
from engine.service.parsing import Limits, ParsedResponses, parse
from engine.service.tools import functions_of
from engine.service.turns import FunctionCall, TextPart, ToolCall, Turn

LIMITS = Limits("tiny", 4, 256, 300, 1000)
SCHEMA = {"type": "object", "properties": {"a": {"type": ["string", "null"], "default": None}}}
ADD = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}


def asked(input: Any = "hi", **fields: Any) -> ParsedResponses:
    return parse(ParsedResponses, json.dumps({"input": input} | fields).encode(), LIMITS)


def turns(input: Any, **fields: Any) -> tuple[Turn, ...]:
    return asked(input, **fields).conversation.turns


def refused(input: Any = "hi", **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        asked(input, **fields)
    assert error.value.kind == "invalid"
    return error.value


def test_an_input_of_text_is_what_the_user_says() -> None:
    assert turns("hi") == (Turn("user", "hi"),)
    assert turns("hi", instructions="Be.") == (Turn("system", "Be."), Turn("user", "hi"))


def test_what_the_system_and_developers_say_first_is_one_turn() -> None:
    said = [
        {"role": "developer", "content": "A"},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_text", "text": "you"}]},
        {"role": "developer", "content": "C"},
    ]
    first, user, later = turns(said, instructions="I")
    assert first == Turn("system", "I\n\nA\n\nB") and later == Turn("system", "C")
    assert user.content == [TextPart("hi"), TextPart("you")]


def test_reasoning_text_and_calls_that_follow_each_other_are_one_turn() -> None:
    said = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "why"}], "content": None},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": null}'},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "add", "arguments": "{"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]  # fmt: skip
    _, called, one, two, last = turns(said)
    assert called.reasoning_content == "why" and called.content == [TextPart("Well.")]
    assert called.tool_calls == [
        ToolCall("c1", FunctionCall("add", {"a": None})), ToolCall("c2", FunctionCall("add", {})),
    ]  # fmt: skip
    assert (one.role, one.text, one.tool_call_id) == ("tool", "3", "c1")
    assert (two.role, two.text, two.tool_call_id) == ("tool", "4", "c2")
    assert (last.role, last.text) == ("assistant", "No.")


def test_two_answers_after_each_other_stay_two_turns() -> None:
    said = [{"role": "user", "content": "hi"}, *[{"role": "assistant", "content": text} for text in "ab"]]
    assert [turn.text for turn in turns(said)] == ["hi", "a", "b"]


def test_functions_are_tools_and_what_other_services_run_is_left_out() -> None:
    hosted: list[Any] = [{"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}, {"type": "custom"}]
    found = asked(tools=[ADD, *hosted], tool_choice="required")
    assert functions_of(found.options) == [{"name": "add", "parameters": SCHEMA, "strict": True}]
    (shown,) = found.conversation.tools or ()
    assert shown["function"]["parameters"] == SCHEMA, "null stays null in a schema"
    assert [tool["type"] for tool in found.options.echoed["tools"]] == ["function", "web_search", "namespace", "custom"]
    assert asked(tools=hosted).conversation.tools is None


@pytest.mark.parametrize(
    ("choice", "names", "chosen"),
    [
        ({"type": "function", "name": "add"}, ["add", "now"], "add"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
         ["now"], "required"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, ["add"], "auto"),
        ({"type": "allowed_tools", "mode": "auto",
          "tools": [{"type": "mcp", "server_label": "x"}, {"type": "function", "name": "add"}]}, ["add"], "auto"),
        ("auto", ["add", "now"], "auto"),
    ],
)  # fmt: skip
def test_a_choice_says_which_functions_may_be_called(choice: Any, names: list[str], chosen: str) -> None:
    options = asked(tools=[ADD, {"type": "function", "name": "now"}], tool_choice=choice).options
    assert [function["name"] for function in functions_of(options)] == names
    assert getattr(options.tool_choice, "chosen", options.tool_choice) == chosen


def test_a_text_format_is_a_grammar() -> None:
    described = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    name, grammar = grammar_of(asked(text=described).options) or ("", None)
    assert name == "text.format" and grammar is not None and json.loads(grammar.text) == SCHEMA
    _, any_json = grammar_of(asked(text={"format": {"type": "json_object"}}).options) or ("", None)
    assert any_json is not None and any_json.kind == "json_object"
    assert grammar_of(asked(text={"format": {"type": "text"}, "verbosity": "low"}).options) is None


def test_reasoning_and_sampling_reach_the_chat() -> None:
    found = asked(reasoning={"effort": "none", "summary": "auto"}, temperature=0, top_p=0.5, seed=3, stop=["x"])
    assert found.conversation.variables == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    options = found.options
    assert (options.temperature, options.top_p, options.seed, options.stop) == (0, 0.5, 3, ["x"])
    assert options.num_logprobs() is None
    logged = asked(include=["message.output_text.logprobs", "reasoning.encrypted_content"], top_logprobs=2)
    assert logged.options.num_logprobs() == 2


def test_fields_of_bookkeeping_are_taken() -> None:
    asked(
        store=False, include=["reasoning.encrypted_content"], metadata={"a": "b"}, truncation="auto", user="u",
        prompt_cache_key="k", service_tier="auto", safety_identifier="s", stream_options={"include_obfuscation": False},
        client_metadata={}, max_tool_calls=3, parallel_tool_calls=True, previous_response_id=None, background=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "messages[0].content[0]"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}},
         "tool_choice"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"surprise": 1}, "surprise"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_items_of_other_services_are_passed_over_and_of_a_custom_call_its_input_is_kept() -> None:
    others = [{"type": kind} for kind in ("local_shell_call", "mcp_list_tools", "tool_search_output", "compaction")]
    others += [
        {"type": "shell_call_output", "call_id": "c", "output": "x"},
        {"type": "tool_search_call", "arguments": {}},
    ]
    assert turns([{"role": "user", "content": "hi"}, *others]) == (Turn("user", "hi"),)
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"}
    (called,) = turns([custom])
    assert called.tool_calls == [ToolCall("c", FunctionCall("apply_patch", {"input": "*** Begin"}))]


def test_a_function_without_a_name_is_named() -> None:
    nested = {"type": "function", "function": {"name": "f"}}
    assert refused(tools=[ADD, nested]).param == "tools[1].name"
    assert refused(tools=[ADD], tool_choice=nested).param == "tool_choice.name"
    assert refused(tools=[ADD, ADD | {"name": "a b"}]).param == "tools[1]"


def test_many_calls_are_one_turn_in_a_moment() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    limits = Limits("tiny", 4, 10**6, 300, 1000)
    body = json.dumps({"input": [call] * 20_000}).encode()
    (called,) = parse(ParsedResponses, body, limits).conversation.turns
    assert len(called.tool_calls) == 20_000


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**40])
def test_a_number_that_nothing_here_can_pass_on_is_refused(number: int) -> None:
    schema = {"type": "object", "properties": {"a": {"maximum": number}}}
    refused(tools=[ADD | {"parameters": schema}])
    refused(metadata={"a": number})
    asked(f"{number} in a text")
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": number})}
    (called,) = turns([call])
    assert called.tool_calls[0].function.arguments == {"a": float(number)}


@pytest.mark.parametrize("depth", [300, 480, 700, 970, 3000])
def test_what_is_nested_too_deeply_is_refused_or_taken_and_nothing_else(depth: int) -> None:
    body = b'{"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": %s}], "user": null}'
    with contextlib.suppress(ApiError):
        parse(ParsedResponses, body % (b'{"a":' * depth + b"1" + b"}" * depth), LIMITS)
