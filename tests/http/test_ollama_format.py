"""Ollama's API on the wire."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ..service.fakes import MODEL, in_loop, says
from .fakes import Running, running
from .test_reasoning import SAID, thinks
from .test_tool_calls import TOOLS, TWO, with_tools

CHAT, GENERATE = "/api/chat", "/api/generate"
ASK: dict[str, Any] = {"model": f"{MODEL}:latest", "messages": [{"role": "user", "content": "hi"}]}
COUNTS = ("total_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")


async def lines(server: Running, path: str, body: Any) -> list[dict[str, Any]]:
    status, headers, data = await server.post(path, body)
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    return [json.loads(line) for line in data.splitlines()]


async def whole(server: Running, path: str, body: Any) -> dict[str, Any]:
    status, headers, data = await server.post(path, body | {"stream": False})
    assert status == 200 and headers["content-type"].startswith("application/json")
    return dict(json.loads(data))


@in_loop
async def test_a_chat_is_a_stream_of_lines_that_join_to_the_whole_answer() -> None:
    async with running() as server:
        found, answer = await lines(server, CHAT, ASK), await whole(server, CHAT, ASK)
    assert "".join(line["message"]["content"] for line in found) == answer["message"]["content"] == "Hello world"
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    for last in (found[-1], answer):
        assert last["done_reason"] == "stop" and last["model"] == MODEL
        assert all(isinstance(last[name], int) for name in COUNTS) and last["eval_count"] == len("Hello world") + 1


@in_loop
async def test_a_generation_is_the_same_in_its_own_field() -> None:
    async with running() as server:
        ask = {"model": MODEL, "prompt": "hi", "options": {"num_predict": 5}}
        found, answer = await lines(server, GENERATE, ask), await whole(server, GENERATE, ask)
    assert "".join(line["response"] for line in found) == answer["response"] == "Hello"
    assert found[-1]["done_reason"] == answer["done_reason"] == "length"


@in_loop
async def test_calls_have_their_arguments_as_objects() -> None:
    async with running(says(TWO)) as server:
        with_tools(server)
        found, answer = (
            await lines(server, CHAT, ASK | {"tools": TOOLS}),
            await whole(server, CHAT, ASK | {"tools": TOOLS}),
        )
    streamed = [call for line in found for call in line["message"].get("tool_calls", ())]
    assert streamed == answer["message"]["tool_calls"]
    assert [call["function"] for call in streamed] == [
        {"name": "add", "arguments": {"a": '}"ü'}}, {"name": "now", "arguments": {}},
    ]  # fmt: skip
    assert "".join(line["message"]["content"] for line in found) == answer["message"]["content"] == "Wait. "


@in_loop
async def test_thoughts_are_apart() -> None:
    async with running(says(SAID)) as server:
        thinks(server)
        found, answer = await lines(server, CHAT, ASK), await whole(server, CHAT, ASK)
        said = await whole(server, GENERATE, {"model": MODEL, "prompt": "hi"})
    assert "".join(line["message"].get("thinking", "") for line in found) == answer["message"]["thinking"] == "Why? ü"
    assert answer["message"]["content"] == "Yes." and (said["thinking"], said["response"]) == ("Why? ü", "Yes.")


@in_loop
async def test_errors_are_one_field() -> None:
    async with running() as server:
        for body in (ASK | {"model": "other"}, ASK | {"messages": 1}):
            status, _, data = await server.post(CHAT, body)
            assert status in (400, 404) and json.loads(data).keys() == {"error"}
        server.client.hold_before = 2
        server.client.holding.clear()
        task = asyncio.create_task(lines(server, CHAT, ASK))
        await server.client.holding.wait()
        server.client.die()
        assert "engine" in (await task)[-1]["error"]


@pytest.mark.parametrize("path", ["/api/embed", "/api/pull"])
@in_loop
async def test_what_there_is_not_is_an_error_of_the_same_form(path: str) -> None:
    async with running() as server:
        status, _, data = await server.post(path, {})
        assert (status, json.loads(data).keys()) == (404, {"error"})


@in_loop
async def test_a_request_that_loads_the_model_is_answered_at_once() -> None:
    async with running() as server:
        for path, said in ((CHAT, {"message": {"role": "assistant", "content": ""}}), (GENERATE, {"response": ""})):
            for fields, reason in (({}, "load"), ({"keep_alive": 0}, "unload")):
                status, headers, data = await server.post(path, {"model": MODEL} | fields)
                assert status == 200 and headers["content-type"].startswith("application/json")
                answer = json.loads(data)
                assert answer.pop("created_at")
                assert answer == {"model": MODEL, **said, "done": True, "done_reason": reason}
        assert server.client.requests == []
        server.client.die()
        status, _, _ = await server.post(CHAT, {"model": MODEL})
        assert status == 503, "the model is not there"
