"""``/v1/messages`` on the wire, as the official client reads it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.selection import few

from ..service.fakes import MAX_LEN, MODEL, in_loop, says
from .fakes import Running, running
from .test_responses_format import events
from .test_tool_calls import ONE, TWO, with_tools

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

PATH = "/v1/messages"
HI: Any = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 100}
FUNCTIONS: Any = [{"name": name, "input_schema": {"type": "object"}} for name in ("add", "now")]


def api(server: Running, **options: Any) -> AsyncAnthropic:
    from anthropic import AsyncAnthropic  # takes seconds, which every worker would spend

    return AsyncAnthropic(**{"base_url": server.url, "api_key": "none", "max_retries": 0, "timeout": 10.0} | options)


def content(message: Any) -> list[dict[str, Any]]:
    """Without the ids of calls, which differ."""
    return [block.model_dump(exclude={"id", "parsed_output"}, exclude_none=True) for block in message.content]


@few(2)
@pytest.mark.parametrize("text", ["Hello world", TWO, ONE, ONE + " and\n" + ONE])
@in_loop
async def test_a_stream_rebuilds_the_whole_answer(text: str) -> None:
    async with running(says(text)) as server, api(with_tools(server)) as client:
        whole = await client.messages.create(**ASK | {"max_tokens": 200}, tools=FUNCTIONS)
        async with client.messages.stream(**ASK | {"max_tokens": 200}, tools=FUNCTIONS) as stream:
            final = await stream.get_final_message()
    assert content(whole) == content(final)
    assert whole.stop_reason == final.stop_reason == ("end_turn" if text == "Hello world" else "tool_use")
    assert whole.usage == final.usage and whole.usage.cache_read_input_tokens == 4
    assert whole.id.startswith("msg_") and whole.role == "assistant" and whole.model == MODEL


@in_loop
async def test_every_block_has_all_of_its_events_in_order() -> None:
    async with running(says(TWO)) as server:
        body = ASK | {"tools": FUNCTIONS, "stream": True, "max_tokens": 200}
        _, headers, data = await with_tools(server).post(PATH, body)
    found = events(data)
    assert headers["content-type"].startswith("text/event-stream") and b"[DONE]" not in data
    names: list[str] = []
    for event in found:
        if not names or names[-1] != event["type"]:
            names.append(event["type"])
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *block * 3, "message_delta", "message_stop"]
    kinds = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
    assert kinds == ["text", "tool_use", "tool_use"]
    pieces = [event["delta"]["partial_json"] for event in found if event.get("index") == 1 and "delta" in event]
    assert json.loads("".join(pieces)) == {"a": '}"ü'} and len(pieces) > 5, "arguments are streamed as they come"
    assert found[-2]["usage"]["output_tokens"] > 0 and found[-2]["timings"]["total_ms"] > 0


@pytest.mark.parametrize(
    ("fields", "reason", "which"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["zzz", "wor"]}, "stop_sequence", "wor"),
        ({"max_tokens": 20_000}, "end_turn", None),
    ],
)
@in_loop
async def test_an_output_says_what_ended_it(fields: dict[str, Any], reason: str, which: str | None) -> None:
    async with running() as server, api(server) as client:
        whole = await client.messages.create(**ASK | fields)
        async with client.messages.stream(**ASK | fields) as stream:
            final = await stream.get_final_message()
        asked = server.client.requests[0]
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == (reason, which)
    assert asked.sampling.max_tokens == min(fields.get("max_tokens", 100), MAX_LEN - len(asked.prompt))


@in_loop
async def test_errors_look_as_clients_of_this_api_expect() -> None:
    import anthropic

    async with running(api_key="secret") as server:
        async with api(server) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**ASK)
        async with api(server, api_key="secret") as client:
            with pytest.raises(anthropic.BadRequestError) as wrong:
                await client.messages.create(**ASK | {"messages": []})
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.count_tokens(model="other", messages=HI)
            await client.messages.create(**ASK)
    for error, kind in (
        (refused.value, "authentication_error"), (wrong.value, "invalid_request_error"),
        (missing.value, "not_found_error"),
    ):  # fmt: skip
        body: Any = error.body
        assert body["type"] == "error" and body["error"]["type"] == kind and body["error"]["message"]


@in_loop
async def test_a_stream_that_fails_ends_in_an_error_event() -> None:
    async with running() as server:
        server.client.hold_before = 2
        server.client.holding.clear()
        task = asyncio.create_task(server.post(PATH, ASK | {"stream": True}))
        await server.client.holding.wait()
        server.client.die()
        _, _, data = await task
    last = events(data)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "overloaded_error" and last["error"]["message"]


@in_loop
async def test_the_arguments_of_a_cut_call_are_what_came_of_them() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "xyz"}}\n</tool_call>'
    async with running(says(text)) as server, api(with_tools(server)) as client:
        for limit in range(40, len(text)):
            ask = ASK | {"max_tokens": limit, "tools": FUNCTIONS}
            whole = await client.messages.create(**ask)
            async with client.messages.stream(**ask) as stream:
                final = await stream.get_final_message()
            assert content(whole) == content(final) and whole.stop_reason == final.stop_reason == "max_tokens"
            if limit == text.index("z"):
                call: Any = whole.content[0]
                assert call.input == {"a": 12}
