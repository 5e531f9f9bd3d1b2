"""Calls of tools on the wire, as the official client reads them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.service.chat_template import TemplateSource
from engine.service.tool_syntax import told_syntax
from tests.selection import few

from ..service.fakes import MODEL, TEMPLATE, SharedTemplate, ids, in_loop, says
from .fakes import Running, chat, events_of, running
from .test_openai_client import HI, api

SHOWN = "{% for tool in tools or [] %}{{ tool.function.name }}<tool_call>{% endfor %}"
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "now")]
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": "}\\"ü"}}\n</tool_call>'
TWO = f'Wait. {ONE}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


@functools.cache
def template(marker: str) -> SharedTemplate:
    return SharedTemplate(TemplateSource(SHOWN.replace("<tool_call>", marker) + TEMPLATE, {}))


def with_tools(server: Running, marker: str = "<tool_call>") -> Running:
    """The model's template shows tools, and has ``marker`` in it."""
    server.server.state.engine.tokenizer.template = template(marker)
    return server


@in_loop
async def test_calls_are_answered_whole_and_streamed_alike() -> None:
    async with running(says(TWO)) as server, api(with_tools(server)) as client:
        whole = (await client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)).choices[0]
        async with client.chat.completions.stream(model=MODEL, messages=HI, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        calls = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Wait. "
        assert [(call.type, call.function.name) for call in calls] == [("function", "add"), ("function", "now")]
        assert [json.loads(call.function.arguments) for call in calls] == [{"a": '}"ü'}, {}]
        assert len({call.id for call in calls}) == 2 and all(len(call.id) == 9 for call in calls)
    assert kinds.count("tool_calls.function.arguments.done") == 2


@pytest.mark.parametrize(
    ("stop", "reason"), [('"a"', "stop"), ("ü", "stop"), ("}}", "stop"), ("</tool_call>", "tool_calls")]
)
@in_loop
async def test_a_call_that_a_stop_string_cuts_is_none_to_be_run(stop: str, reason: str) -> None:
    asked: Any = {"model": MODEL, "messages": HI, "tools": TOOLS, "stop": stop}
    async with running(says(ONE)) as server, api(with_tools(server)) as client:
        whole = (await client.chat.completions.create(**asked)).choices[0]
        chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**asked, stream=True)]
    (call,) = whole.message.tool_calls or []
    assert whole.finish_reason == chunks[-1].finish_reason == reason
    assert ('{"a": "}\\"ü"}'.startswith(call.function.arguments)) and call.function.name == "add"


CHANNELS = (
    "<|channel|>analysis<|message|>Why?<|end|>"
    '<|start|>assistant to=functions.add<|channel|>commentary<|message|>{"a": "}\\"ü"}'
)
WRITTEN = [
    ("[func_name1(", """[add(a='}\\"ü')]"""),
    ("<function_calls>", 'Wait. <function_calls>add(a="}\\"ü")</function_calls>'),
    ("<|tool_call>call:", 'Wait. <|tool_call>call:add{a:<|"|>}"ü<|"|>}<tool_call|>'),
    ("<|channel|>", CHANNELS),
]


@few(2)
@pytest.mark.parametrize(("marker", "text"), WRITTEN, ids=[marker for marker, _ in WRITTEN])
@in_loop
async def test_calls_in_other_syntaxes_reach_clients_the_same(marker: str, text: str) -> None:
    async with running(says(text)) as server, api(with_tools(server, marker)) as client:
        whole = (await client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)).choices[0]
        async with client.chat.completions.stream(model=MODEL, messages=HI, tools=TOOLS) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        (call,) = choice.message.tool_calls or []
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "add")
        assert json.loads(call.function.arguments) == {"a": '}"ü'}
        assert (choice.message.content or "") == "Wait. " * ("Wait. " in text)
    thought: Any = whole.message
    assert getattr(thought, "reasoning", "") == "Why?" * (text is CHANNELS)


@in_loop
async def test_a_syntax_that_nobody_else_has_is_told_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"form": "named", "opens": "please ", "after_name": " with ", "closes": "."}', "utf-8")
    async with running(says('please add with {"a": 1}. Thanks!')) as server, api(with_tools(server)) as client:
        server.server.state.engine.tokenizer.told_syntax = told_syntax(str(file))
        answer = (await client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)).choices[0].message
    (call,) = answer.tool_calls or []
    assert (call.function.name, call.function.arguments, answer.content) == ("add", '{"a": 1}', "Thanks!")


@in_loop
async def test_the_first_part_of_a_call_has_its_name_and_the_others_its_arguments() -> None:
    async with running(says(ONE)) as server:
        _, _, data = await with_tools(server).post("/v1/chat/completions", chat(tools=TOOLS, stream=True))
    choices = [event["choices"][0] for event in events_of(data) if event["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert calls[0] | {"id": "x"} == {
        "index": 0, "id": "x", "type": "function", "function": {"name": "add", "arguments": "{"},
    }  # fmt: skip
    assert all(call.keys() == {"index", "function"} and call["index"] == 0 for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": "}\\"ü"}'
    assert len(calls) > 5, "arguments are streamed as they come"
    assert choices[-1]["finish_reason"] == "tool_calls" and not any(
        choice["delta"].get("content") for choice in choices
    )


@in_loop
async def test_every_token_is_in_one_chunk() -> None:
    async with running(says(TWO)) as server:
        body = chat(tools=TOOLS, stream=True, return_token_ids=True, logprobs=True)
        _, _, data = await with_tools(server).post("/v1/chat/completions", body)
    found = [token for event in events_of(data) for token in event["choices"][0].get("token_ids", ())]
    assert found[:-1] == list(ids(TWO))


@pytest.mark.parametrize(
    ("text", "fields", "reason", "names"),
    [
        ("Hello.", {}, "stop", []),
        (TWO, {"parallel_tool_calls": False}, "tool_calls", ["add"]),
        (ONE, {"max_tokens": 50}, "length", ["add"]),
        (TWO, {"tool_choice": "none"}, "stop", []),
    ],
)
@in_loop
async def test_an_answer_ends_as_it_should(text: str, fields: Any, reason: str, names: list[str]) -> None:
    async with running(says(text)) as server, api(with_tools(server)) as client:
        asked: Any = {"model": MODEL, "messages": HI, "tools": TOOLS} | fields
        choice = (await client.chat.completions.create(**asked)).choices[0]
    assert choice.finish_reason == reason
    assert [call.function.name for call in choice.message.tool_calls or ()] == names
    if not names:
        assert choice.message.content == text


@in_loop
async def test_a_model_whose_template_shows_no_tools_refuses_them() -> None:
    async with running() as server, api(server) as client:
        with pytest.raises(openai.BadRequestError, match="chat template leaves out tools: 'add'"):
            await client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)
        assert server.client.requests == []


@in_loop
async def test_who_offers_functions_is_answered_with_a_function_call() -> None:
    functions: Any = [{"name": name, "parameters": {}} for name in ("add", "now")]
    async with running(says(TWO)) as server, api(with_tools(server)) as client:
        whole = (await client.chat.completions.create(model=MODEL, messages=HI, functions=functions)).choices[0]
        stream = await client.chat.completions.create(model=MODEL, messages=HI, functions=functions, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    called = whole.message.function_call
    assert called is not None and whole.message.tool_calls is None
    assert (called.name, json.loads(called.arguments)) == ("add", {"a": '}"ü'})
    pieces = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert [piece.name for piece in pieces if piece.name] == ["add"]
    assert "".join([piece.arguments or "" for piece in pieces]) == called.arguments
    assert whole.finish_reason == chunks[-1].finish_reason == "function_call"
