"""Thoughts on the wire of each API, as the official clients read them."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from engine.service.chat_template import TemplateSource

from ..service.fakes import MODEL, TEMPLATE, SharedTemplate, in_loop, says
from . import test_messages_format, test_responses_format
from .fakes import Running, chat, events_of, running
from .test_openai_client import HI, api

SAID = "<think>\nWhy? ü\n</think>\n\nYes."
CLOSED = "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


@functools.cache
def template() -> SharedTemplate:
    return SharedTemplate(TemplateSource(TEMPLATE + CLOSED, {}))


def thinks(server: Running) -> Running:
    server.server.state.engine.tokenizer.template = template()
    return server


@in_loop
async def test_chats_have_them_by_both_names() -> None:
    async with running(says(SAID)) as server, api(thinks(server)) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HI)
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        _, _, hidden = await server.post("/v1/chat/completions", chat(include_reasoning=False))
    message: Any = whole.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == ("Yes.", "Why? ü", "Why? ü")
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, "") for delta in deltas) == "Why? ü"
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    assert whole.usage and whole.usage.completion_tokens_details
    assert whole.usage.completion_tokens_details.reasoning_tokens == len(SAID.partition("Yes")[0].strip().encode()) - 1
    timings: Any = (whole.model_extra or {})["timings"]
    assert timings["ttft_ms"] < timings["ttfo_ms"] <= timings["total_ms"]
    assert b"reasoning_content" not in hidden and b"Why" not in hidden and b"Yes." in hidden


@in_loop
async def test_the_first_output_is_counted_beside_the_first_token() -> None:
    async with running(says("<think>Why?")) as server:
        await thinks(server).post("/v1/chat/completions", chat())
        server.client.script = says(SAID)
        await server.post("/v1/chat/completions", chat())
        _, _, data = await server.get("/engine/counters")
    counted = {each["name"]: each for each in json.loads(data)["metrics"]}
    ttft, ttfo = counted["engine_ttft_seconds"], counted["engine_ttfo_seconds"]
    assert (sum(ttft["counts"]), sum(ttfo["counts"])) == (2, 1), "one of them ended within its thought"


@in_loop
async def test_a_thought_that_the_template_has_closed_is_none() -> None:
    async with running(says("<think>x</think>")) as server:
        body = chat(enable_thinking=False, stream=True)
        _, _, data = await thinks(server).post("/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events_of(data) if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "<think>x</think>"


@pytest.mark.parametrize("said", [SAID, "<think>cut", "no thought"])
@in_loop
async def test_responses_have_an_item_of_reasoning(said: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hi"}
    async with running(says(said)) as server, test_responses_format.api(thinks(server)) as client:
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            final = await stream.get_final_response()
        _, _, data = await server.post(test_responses_format.PATH, asked | {"stream": True})
        again: Any = [item.model_dump(exclude_none=True) for item in whole.output]
        turns: Any = [{"role": "user", "content": "hi"}, *again, {"role": "user", "content": "so?"}]
        await client.responses.create(model=MODEL, input=turns)
    thought = said.removeprefix("<think>").partition("</think>")[0].strip() if "<think>" in said else ""
    for response in (whole, final):
        kinds: list[Any] = [item.type for item in response.output]
        assert kinds == ["reasoning"] * bool(thought) + ["message"] * (said != "<think>cut")
        if thought:
            item: Any = response.output[0]
            assert [part.text for part in item.content] == [thought] and item.id.startswith("rs_")
    events = test_responses_format.events(data)
    assert "".join(each["delta"] for each in events if each["type"] == "response.reasoning_text.delta") == thought
    done = [each["text"] for each in events if each["type"] == "response.reasoning_text.done"]
    assert done == [thought] * bool(thought)


@in_loop
async def test_messages_have_a_block_of_thinking_for_clients_that_ask_for_it() -> None:
    ask = test_messages_format.ASK
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    async with running(says(SAID)) as server, test_messages_format.api(thinks(server)) as client:
        tokenizer: Any = server.server.state.engine.tokenizer
        tokenizer.id_of = len
        whole: Any = await client.messages.create(**ask, thinking=thinking)
        async with client.messages.stream(**ask, thinking=thinking) as stream:
            final: Any = await stream.get_final_message()
        asked = server.client.requests[0].sampling.reasoning
        plain: Any = await client.messages.create(**ask)
        back = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in whole.content]}
        await client.messages.create(**ask | {"messages": [*HI, back, *HI]})
    assert asked is not None and (asked.closes, asked.opens, asked.budget) == (8, 7, 1024)
    for message in (whole, final):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking, message.content[1].text) == ("Why? ü", "Yes.")
        assert message.content[0].signature
    assert [block.type for block in plain.content] == ["text"], "nobody asked for thoughts: the template closes them"
