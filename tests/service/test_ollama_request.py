"""The chats that bodies of Ollama's API ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.service.errors import ApiError
from engine.service.grammars import grammar_of
from engine.service.parsing import Limits, ParsedOllamaChat, ParsedOllamaGenerate, parse
from engine.service.tools import functions_of
from engine.service.turns import FunctionCall, ToolCall, Turn

LIMITS = Limits("tiny", 4, 256, 300, 1000)
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"default": None}}}


def chat(**fields: Any) -> ParsedOllamaChat:
    return parse(ParsedOllamaChat, json.dumps({"model": "tiny", "messages": HI} | fields).encode(), LIMITS)


def generate(**fields: Any) -> ParsedOllamaGenerate:
    return parse(ParsedOllamaGenerate, json.dumps({"model": "tiny", "prompt": "hi"} | fields).encode(), LIMITS)


def test_a_stream_is_what_happens_unless_it_is_refused() -> None:
    assert chat().options.stream and generate().options.stream and not chat(stream=False).options.stream


def test_a_prompt_is_what_a_user_says() -> None:
    assert generate(system="Be.").conversation.turns == (Turn("system", "Be."), Turn("user", "hi"))


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", None])
def test_a_name_may_have_the_tag_that_says_nothing(name: str | None) -> None:
    chat(model=name)
    with pytest.raises(ApiError) as error:
        chat(model="other:latest")
    assert error.value.kind == "not_found"


def test_options_are_sampling_and_what_else_there_is_has_no_effect() -> None:
    asked = {"temperature": 0.5, "top_k": 3, "seed": 1, "num_predict": 7, "stop": ["x"], "repeat_penalty": 1.1}
    options = chat(options=asked | {"num_ctx": 4096, "num_gpu": 1, "mirostat": 0}, keep_alive="5m").options
    assert (options.temperature, options.top_k, options.seed, options.stop) == (0.5, 3, 1, ["x"])
    assert (options.max_tokens, options.repetition_penalty) == (7, 1.1)
    for unlimited in (-1, -2, 0):
        assert chat(options={"num_predict": unlimited}).options.max_tokens is None


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [(None, "load"), ("5m", "load"), (-1, "load"), ("1h0m", "load"), (0, "unload"), (0.0, "unload"), ("0", "unload"),
     ("0s", "unload"), ("0h0m", "unload")],
)  # fmt: skip
def test_without_a_prompt_the_model_is_to_be_loaded_or_unloaded(keep_alive: Any, reason: str) -> None:
    for nothing in (chat(messages=[], keep_alive=keep_alive), generate(prompt="", system="x", keep_alive=keep_alive)):
        assert nothing.options.done_reason == reason
    assert chat(keep_alive=keep_alive).options.done_reason == generate(keep_alive=0).options.done_reason == ""


def test_a_format_is_a_grammar() -> None:
    name, grammar = grammar_of(chat(format=SCHEMA).options) or ("", None)
    assert name == "format" and grammar is not None and json.loads(grammar.text) == SCHEMA
    _, anything = grammar_of(generate(format="json").options) or ("", None)
    assert anything is not None and anything.kind == "json_object"
    assert grammar_of(chat(format="").options) is None


def test_calls_and_what_tools_came_to_are_turns() -> None:
    called = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": None}}}],
        "thinking": "w",
    }
    messages = [*HI, called, {"role": "tool", "content": "3", "tool_name": "add"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    found = chat(messages=messages, tools=tools)
    _, answer, result = found.conversation.turns
    assert (
        answer.tool_calls == [ToolCall("call_0", FunctionCall("add", {"a": None}))] and answer.reasoning_content == "w"
    )
    assert (result.role, result.text) == ("tool", "3") and functions_of(found.options)[0]["parameters"] == SCHEMA


def test_thinking_is_a_switch_of_the_template() -> None:
    off, level = chat(think=False), chat(think="low")
    assert off.conversation.variables == {"enable_thinking": False, "thinking": False}
    assert not off.options.include_reasoning and level.options.include_reasoning
    assert level.conversation.variables == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"keep_alive": []}, "keep_alive"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ({"format": "yaml"}, "format"),
        ({"logprobs": True}, "logprobs"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        chat(**fields)
    assert error.value.param == param


@pytest.mark.parametrize("name", ["images", "suffix", "template", "context", "raw"])
def test_what_would_be_no_chat_is_refused_by_name(name: str) -> None:
    with pytest.raises(ApiError) as error:
        generate(**{name: True if name == "raw" else [1] if name in ("images", "context") else "x"})
    assert error.value.param == name
