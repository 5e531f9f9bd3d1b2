"""Null means absent; harmless fields turn nobody away; what changes the text is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.service.errors import ApiError
from engine.service.parsing import Limits, ParsedChat, ParsedCompletion, ParsedTokenize, parse
from engine.service.turns import Turn
from engine.service.validation import output_limit, sampling_params

LIMITS = Limits("tiny", 8, 100, 100, 1000)
HI = {"role": "user", "content": "hi"}
FIELDS_OF_OTHERS = {
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "u",
    "verbosity": "low",
    "web_search_options": {},
    "prediction": {"type": "content", "content": "x"},
    "cache_prompt": True,
    "keep_alive": "5m",
    "num_ctx": 4096,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "reasoning_effort": "low",
    "enable_thinking": False,
    "think": True,
    "parallel_tool_calls": False,
    "tool_choice": "auto",
    "response_format": {"type": "text", "json_schema": None},
    "stream_options": {"include_usage": True, "unheard_of": None},
    "logit_bias": {"5": None},
}


def chat(**fields: Any) -> ParsedChat:
    return parse(ParsedChat, json.dumps({"messages": [HI]} | fields).encode(), LIMITS)


def completion(**fields: Any) -> ParsedCompletion:
    return parse(ParsedCompletion, json.dumps({"prompt": "hi"} | fields).encode(), LIMITS)


def refused(ask: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert caught.value.kind == "invalid"
    return caught.value


def test_null_means_absent_at_every_depth() -> None:
    part = {"type": "text", "text": "hi", "cache_control": None, "annotations": None}
    turn = {"role": "user", "content": [part], "name": None, "tool_call_id": None, "anything": {"a": None}.get("a")}
    answer = {"role": "assistant", "content": None, "tool_calls": None, "reasoning": None, "id": None, "audio": None}
    asked = chat(
        messages=[turn, answer, HI],
        stream_options={"include_usage": None, "anything": None},
        logit_bias={"5": None},
        response_format={"type": "text", "schema": None},
        chat_template_kwargs={"a": None, "b": 1},
        temperature=None,
        anything=None,
    )
    content = [{"type": "text", "text": "hi"}]
    said = asked.conversation.plain().messages
    assert said == [{"role": "user", "content": content}, {"role": "assistant", "content": ""}, HI]
    assert asked.conversation.variables == {"b": 1}
    assert sampling_params(asked.options, 5, 100) == sampling_params(chat().options, 5, 100)


def test_with_nulls_what_is_wrong_is_still_named() -> None:
    assert refused(chat, temperature=9, logit_bias={"5": None}).param == "temperature"
    turns = [HI, {"role": "user", "content": "x", "tool_call_id": None, "tool_cal_id": "x"}]
    error = refused(chat, messages=turns)
    assert (error.param, error.code) == ("messages[1].tool_cal_id", "unknown_parameter")
    body = b'{"messages": [{"role": "user", "content": "x", "a": null}], "temperature": 1e999}'
    with pytest.raises(ApiError, match="'temperature'"):
        parse(ParsedChat, body, LIMITS)
    assert refused(completion, chat_template_kwargs={"a": 1}).param == "chat_template_kwargs"
    assert refused(chat, messages=[{"role": None, "content": "x"}]).param == "messages[0].role"


@pytest.mark.parametrize("ask", [chat, completion])
def test_fields_of_other_services_turn_nobody_away(ask: Any) -> None:
    assert sampling_params(ask(**FIELDS_OF_OTHERS).options, 5, 100) == sampling_params(ask().options, 5, 100)


def test_fields_of_messages_turn_nobody_away() -> None:
    turn = {"role": "assistant", "content": "b", "reasoning": "why", "id": "msg_1", "refusal": None, "annotations": []}
    assert chat(messages=[turn, HI]).conversation.turns[0] == Turn("assistant", "b", reasoning="why")


@pytest.mark.parametrize(
    "fields",
    [
        {"temprature": 1},
        {"typical_p": 0.5},
        {"dry_multiplier": 0.8},
        {"continue_final_message": True},
        {"reasoning": {"effort": "low"}},
    ],
)
@pytest.mark.parametrize("ask", [chat, completion])
def test_a_field_that_would_change_the_text_is_refused_by_name(ask: Any, fields: dict[str, Any]) -> None:
    (name,) = fields
    error = refused(ask, **fields)
    assert error.param == name and name in error.message


def test_an_output_limit_of_minus_one_is_all_the_room() -> None:
    for asked in (
        chat(max_tokens=-1).options.max_tokens,
        chat(max_completion_tokens=-1).options.max_completion_tokens,  # type: ignore[attr-defined]
        completion(max_tokens=-1).options.max_tokens,
    ):
        assert output_limit(asked, 30, 100, 16, "max_tokens") == 70
    for name in ("max_tokens", "max_completion_tokens"):
        assert refused(chat, **{name: -2}).param == refused(chat, **{name: 0}).param == name
    assert refused(completion, max_tokens=-2).param == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"think": True}, {"enable_thinking": True, "thinking": True}),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"enable_thinking": True, "think": False}, {"enable_thinking": True, "thinking": True}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False, "x": [1, {"y": "z"}]}},
            {"enable_thinking": False, "thinking": True, "x": [1, {"y": "z"}]},
        ),
    ],
)
def test_what_a_request_says_of_reasoning_reaches_the_chat_template(
    fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert chat(**fields).conversation.variables == variables
    body = json.dumps({"messages": [HI]} | fields).encode()
    tokenize = parse(ParsedTokenize, body, LIMITS).conversation
    assert tokenize is not None and tokenize.variables == variables


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": nested(17)}, "chat_template_kwargs"),
        ({"chat_template_kwargs": nested(400)}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs"),
    ],
)
def test_variables_that_a_request_cannot_set_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param
