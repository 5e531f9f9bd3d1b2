"""``/v1/responses`` on the wire, as the official client reads it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.selection import few

from ..service.fakes import MODEL, in_loop, says
from .fakes import Running, running
from .test_tool_calls import ONE, TWO, with_tools

PATH = "/v1/responses"
FUNCTIONS: Any = [{"type": "function", "name": name, "parameters": {}, "strict": False} for name in ("add", "now")]


def api(server: Running) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=10)


def events(data: bytes) -> list[dict[str, Any]]:
    """Of a stream whose events have the names that they say they have."""
    found = []
    for block in data.decode().strip().split("\n\n"):
        name, body = block.split("\n")
        found.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from request to request."""
    text = json.dumps({name: value for name, value in response.items() if name not in ("timings", "created_at")})
    for item in response["output"]:
        text = text.replace(item.get("call_id") or response["id"], "call")
    return dict(json.loads(text.replace(response["id"].partition("_")[2], "id")))


@few(2)
@pytest.mark.parametrize("text", ["Hello world", TWO, ONE, ONE + " and\n" + ONE])
@in_loop
async def test_a_stream_rebuilds_the_whole_answer(text: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": FUNCTIONS, "instructions": "Be."}
    async with running(says(text)) as server, api(with_tools(server)) as client:
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            streamed = [event async for event in stream]
            final = await stream.get_final_response()
    assert whole.status == final.status == "completed" and whole.usage == final.usage
    completed: Any = streamed[-1]
    last = completed.response.to_dict(exclude_unset=True, mode="json")
    for item in last["output"]:
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    assert comparable(last) == comparable(whole.to_dict(exclude_unset=True, mode="json"))
    done = [event.item.id for event in streamed if event.type == "response.output_item.done"]
    assert done == [item.id for item in final.output] and len(set(done)) == len(done)


@in_loop
async def test_every_item_has_all_of_its_events_in_order() -> None:
    body = {"input": "hi", "tools": FUNCTIONS, "stream": True}
    async with running(says(TWO)) as server:
        _, headers, data = await with_tools(server).post(PATH, body)
    found = events(data)
    assert headers["content-type"].startswith("text/event-stream") and b"[DONE]" not in data
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    names: list[str] = []
    for event in found:
        name = event["type"].removeprefix("response.")
        if not names or names[-1] != name:
            names.append(name)
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    assert names == ["created", "in_progress", *text, "output_item.done", *call, *call, "completed"]
    for index in range(3):
        mine = [event for event in found if event.get("output_index") == index]
        (item,) = [event["item"] for event in mine if event["type"] == "response.output_item.done"]
        assert {event.get("item_id", item["id"]) for event in mine} == {item["id"]}
        pieces = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert pieces == (item["arguments"] if index else item["content"][0]["text"])


@in_loop
async def test_an_output_that_met_its_limit_is_incomplete() -> None:
    async with running(says(TWO)) as server, api(with_tools(server)) as client:
        for limit, kind in ((3, "message"), (56, "function_call")):
            asked: dict[str, Any] = {"input": "hi", "tools": FUNCTIONS, "max_output_tokens": limit}
            cut = await client.responses.create(model=MODEL, **asked)
            assert cut.status == "incomplete" and cut.incomplete_details
            assert cut.incomplete_details.reason == "max_output_tokens" and cut.usage
            last: Any = cut.output[-1]
            assert (cut.usage.output_tokens, last.type, last.status) == (limit, kind, "incomplete")
            _, _, data = await server.post(PATH, asked | {"stream": True})
            end = events(data)[-1]
            assert end["type"] == "response.incomplete" and end["response"]["output"][-1]["status"] == "incomplete"
        all_room = await client.responses.create(model=MODEL, input="hi", max_output_tokens=100_000)
        assert all_room.status == "completed" and all_room.max_output_tokens == 100_000


@in_loop
async def test_log_probabilities_are_beside_the_text_that_they_are_of() -> None:
    async with running(says("Hello")) as server, api(server) as client:
        asked: dict[str, Any] = {
            "model": MODEL, "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2
        }  # fmt: skip
        message: Any = (await client.responses.create(**asked)).output[0]
        entries = message.content[0].logprobs
        assert "".join(entry.token for entry in entries) == "Hello" and len(entries[0].top_logprobs) == 2
        stream: Any = await client.responses.create(**asked, stream=True)
        seen: list[Any] = [event async for event in stream]
        deltas = [entry.token for event in seen if event.type.endswith("text.delta") for entry in event.logprobs]
        assert "".join(deltas) == "Hello" and seen[-1].response.output[0].content[0].logprobs == entries
        plain: Any = (await client.responses.create(model=MODEL, input="hi")).output[0]
        assert plain.content[0].logprobs == []


@pytest.mark.parametrize("text", [TWO, ONE, f"{ONE} and {ONE} ü", "Hello <tool"])
@pytest.mark.parametrize("limit", [None, 5, 60])
@in_loop
async def test_beside_tools_a_text_has_the_log_probabilities_of_its_own_tokens(text: str, limit: int | None) -> None:
    include = ["message.output_text.logprobs"]
    asked: dict[str, Any] = {"input": "hi", "tools": FUNCTIONS, "include": include, "max_output_tokens": limit}
    async with running(says(text)) as server:
        _, _, data = await with_tools(server).post(PATH, asked)
        _, _, streamed = await server.post(PATH, asked | {"stream": True})
    whole, told = json.loads(data), events(streamed)
    last = told[-1]["response"]
    assert comparable(last) == comparable(whole)
    for index, item in enumerate(whole["output"]):
        if item["type"] == "message":
            (part,) = item["content"]
            sent = [each for e in told if e["type"] == "response.output_text.delta" and e["output_index"] == index
                    for each in e["logprobs"]]  # fmt: skip
            assert bytes(b for entry in part["logprobs"] for b in entry["bytes"]).decode() == part["text"]
            assert sent == part["logprobs"]


@in_loop
async def test_a_stream_that_fails_says_so_in_its_last_event() -> None:
    async with running() as server:
        server.client.hold_before = 2
        server.client.holding.clear()
        task = asyncio.create_task(server.post(PATH, {"input": "hi", "stream": True}))
        await server.client.holding.wait()
        server.client.die()
        _, _, data = await task
    last = events(data)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "engine_dead"


@in_loop
async def test_refusals_are_errors_of_this_api() -> None:
    async with running() as server, api(server) as client:
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(model=MODEL, input="hi", background=True)
        assert (error.value.code, error.value.param) == ("unsupported_parameter", "background")
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input="hi")
