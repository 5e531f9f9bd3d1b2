"""Prompt caching in the words of other services: what a request says of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.service.cache_words import OTHERWISE, going_on_otherwise, whole_prompt_s, written
from engine.service.errors import ApiError
from engine.service.parsing import Limits, ParsedChat, ParsedCompletion, ParsedMessages, ParsedResponses, parse
from engine.service.turns import Breakpoint, TextPart, Turn

LIMITS = Limits("tiny", 4, 256, 300, 1000)
CONTROL = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
POINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t", "name": "add", "input": {}}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | fields


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def of_messages(*turns: Any, **fields: Any) -> tuple[tuple[int, int | None, float], ...]:
    found = parse(ParsedMessages, body(messages=turns, max_tokens=5, **fields), LIMITS)
    return tuple((each.turn, each.chars, each.seconds) for each in found.conversation.breakpoints)


def of_chat(*parts: Any, **fields: Any) -> tuple[tuple[int, int | None, float], ...]:
    found = parse(ParsedChat, body(messages=[user(*parts)], **fields), LIMITS)
    return tuple((each.turn, each.chars, each.seconds) for each in found.conversation.breakpoints)


def test_breakpoints_are_found_wherever_a_conversation_has_them() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("3", **CONTROL)]}
    turns = [
        user(text("a"), text("bc", **CONTROL)),
        {"role": "assistant", "content": [text("de"), CALL | CONTROL]},
        user(result, text("f")),
    ]
    assert of_messages(*turns) == ((0, 3, 300.0), (1, None, 300.0), (2, None, 300.0))
    system = [text("one", **HOUR), text("two", **CONTROL)]
    found = of_messages(user(text("a")), system=system, tools=[TOOL | HOUR], **CONTROL)
    assert found == ((-1, None, 3600.0), (0, 3, 3600.0), (0, 8, 300.0), (1, None, 300.0))
    assert of_messages(user(text("a"))) == ()
    tools = [{"type": "function", "function": {"name": "add"}} | CONTROL]
    assert of_chat(text("a", **CONTROL), text("b"), tools=tools, **CONTROL) == (
        (-1, None, 300.0), (0, 1, 300.0), (0, None, 300.0),
    )  # fmt: skip


def test_the_other_notation_has_one_at_the_end_unless_it_says_otherwise() -> None:
    parts = [text(word, **POINT) for word in "abcdef"]
    assert of_chat(*parts) == tuple([(0, end, 1800.0) for end in (4, 5, 6, None)])
    explicit = {"mode": "explicit", "ttl": "12h"}
    assert of_chat(*parts, prompt_cache_options=explicit) == tuple([(0, end, 43200.0) for end in (3, 4, 5, 6)])
    own = text("x", prompt_cache_breakpoint={"mode": "explicit", "ttl": "30m"})
    assert of_chat(own, prompt_cache_options=explicit) == ((0, 1, 1800.0),)
    assert of_chat(text("a"), prompt_cache_options=explicit) == of_chat(text("a"), prompt_cache_key="k") == ()
    assert of_chat(text("a"), prompt_cache_options={"ttl": "30m"}) == ((0, None, 1800.0),)
    assert of_chat(text("a"), prompt_cache_retention="24h", prompt_cache_options={}) == ((0, None, 86400.0),)
    asked = body(input=[user({"type": "input_text", "text": "a"} | POINT)], prompt_cache_options=explicit)
    found = parse(ParsedResponses, asked, LIMITS).conversation.breakpoints
    assert found == (Breakpoint(0, 1, 43200.0),)
    completion = parse(ParsedCompletion, body(prompt="a", prompt_cache_retention="in_memory"), LIMITS)
    assert whole_prompt_s(completion.options) == 300.0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"system": [text("x", **CONTROL) for _ in range(4)]}, "5 times; at most 4"),
        ({"tools": [TOOL | CONTROL], "system": [text("x", **HOUR)]}, "'1h' after '5m'"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control"),
        ({"cache_control": {"type": "persistent"}}, "cache_control"),
    ],
)
def test_what_breaks_the_rules_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        of_messages(user(text("a", **CONTROL)), **fields)


def test_a_tool_is_told_to_the_template_without_such_words() -> None:
    plain, marked = (
        parse(ParsedMessages, body(messages=[user(text("a"))], max_tokens=5, tools=[tool]), LIMITS).conversation.tools
        for tool in (TOOL, TOOL | CONTROL)
    )
    assert plain == marked


def test_another_continuation_has_the_same_beginning_and_nothing_of_the_rest() -> None:
    asked = body(messages=[user(text("ab"), text("cd")), {"role": "assistant", "content": "e"}, user(text("f"))])
    conversation = parse(ParsedChat, asked, LIMITS).conversation
    first, second, _ = conversation.turns
    other, later = TextPart(OTHERWISE), Turn("assistant", OTHERWISE)
    within = going_on_otherwise(conversation, Breakpoint(0, 2, 1.0))
    assert within.turns == (Turn("user", [TextPart("ab"), other]), later)
    assert going_on_otherwise(conversation, Breakpoint(0, 4, 1.0)).turns == (first, later)
    assert going_on_otherwise(conversation, Breakpoint(1, None, 1.0)).turns == (first, second, Turn("user", OTHERWISE))
    assert going_on_otherwise(conversation, Breakpoint(-1, None, 1.0)).turns == (Turn("user", OTHERWISE),)
    calls = [user(text("a")), {"role": "assistant", "content": [text("de", **CONTROL), CALL]}, user(text("f"))]
    called = parse(ParsedMessages, body(messages=calls, max_tokens=5), LIMITS).conversation
    said = going_on_otherwise(called, called.breakpoints[0]).turns[1]
    assert (said.content, said.tool_calls) == ("de" + OTHERWISE, []), "the call comes after the breakpoint"
    whole = going_on_otherwise(conversation, Breakpoint(2, None, 1.0))
    assert whole.turns == conversation.turns and not whole.add_generation_prompt


def test_what_is_written_is_what_the_cache_did_not_have() -> None:
    kept = ((100, 3600.0), (160, 300.0))
    assert written(kept, 0) == {3600.0: 100, 300.0: 60}
    assert written(kept, 130) == {300.0: 30} and written(kept, 170) == {} == written((), 0)
