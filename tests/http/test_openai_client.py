"""The official client against a listening server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from engine.contracts.events import FirstTokenEvent, RequestEvent, TokensEvent
from engine.service.timings import SPANS

from ..service.fakes import MAX_LEN, MODEL, ids, in_loop, says
from .fakes import Running, running

HI: Any = [{"role": "user", "content": "hi"}]


def api(server: Running) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=10)


@in_loop
async def test_chat_is_answered_with_usage_and_timings_that_add_up() -> None:
    async with running() as server, api(server) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=HI)
        choice = reply.choices[0]
        assert (choice.message.role, choice.message.content, choice.finish_reason) == (
            "assistant",
            "Hello world",
            "stop",
        )
        assert reply.id.startswith("chatcmpl-") and reply.object == "chat.completion" and reply.system_fingerprint
        usage = reply.usage
        assert usage and usage.prompt_tokens_details
        assert usage.prompt_tokens == len(server.client.requests[0].prompt)
        assert usage.completion_tokens == len("Hello world") + 1
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens_details.cached_tokens == 4
        timings: Any = reply.model_extra and reply.model_extra["timings"]
        assert sum(timings[f"{span}_ms"] for span in (*SPANS, "unattributed")) == pytest.approx(
            timings["total_ms"], abs=1e-6
        )
        assert 0 < timings["ttft_ms"] <= timings["total_ms"]
        assert timings["itl_ms"]["count"] == len("Hello world")
        assert (timings["cached_tokens"], timings["drafted_tokens"], timings["accepted_tokens"]) == (4, 3, 2)
        assert (timings["decode_steps"], timings["draft_chains"], timings["num_draft_tokens"]) == (2, 1, 1.5)
        assert (timings["draft_ms"], timings["draft_share"]) == (0.05, 0.4)


@in_loop
async def test_a_chat_stream_concatenates_to_the_whole_answer() -> None:
    text = "Grüße 😀 ok"
    async with running(says(text)) as server, api(server) as client:
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, stream_options=options)
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(model=MODEL, messages=HI)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(parts) == text == whole.choices[0].message.content
    assert not any("\ufffd" in part for part in parts)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[-1].model_extra and "timings" in chunks[-1].model_extra
    assert chunks[-2].model_extra and "timings" in chunks[-2].model_extra


@in_loop
async def test_two_choices_have_their_own_index_and_seed() -> None:
    async with running() as server, api(server) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=HI, n=2, seed=7)
        assert [choice.index for choice in reply.choices] == [0, 1]
        assert [choice.message.content for choice in reply.choices] == ["Hello world"] * 2
        first, second = server.client.requests
        assert first.sampling.seed == 7 != second.sampling.seed
        assert reply.usage and reply.usage.prompt_tokens == len(first.prompt)
        stream = await client.chat.completions.create(model=MODEL, messages=HI, n=2, stream=True)
        texts = {0: "", 1: ""}
        ends = []
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            if chunk.choices[0].finish_reason:
                ends.append(chunk.choices[0].index)
        assert texts == {0: "Hello world", 1: "Hello world"} and sorted(ends) == [0, 1]


@in_loop
async def test_chat_logprobs_align_with_the_visible_tokens() -> None:
    async with running(says("ab|STOP|cd")) as server, api(server) as client:
        asked: Any = {"logprobs": True, "top_logprobs": 2, "stop": "|STOP|"}
        reply = await client.chat.completions.create(model=MODEL, messages=HI, **asked)
        logprobs = reply.choices[0].logprobs
        assert logprobs and logprobs.content
        assert reply.choices[0].message.content == "ab" == "".join(entry.token for entry in logprobs.content)
        assert [entry.bytes for entry in logprobs.content] == [[97], [98]]
        assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in logprobs.content)
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, **asked)
        tokens = ""
        async for chunk in stream:
            entries = chunk.choices[0].logprobs
            shown = "".join(entry.token for entry in (entries and entries.content) or [])
            assert shown == (chunk.choices[0].delta.content or "")
            tokens += shown
        assert tokens == "ab"
        assert reply.usage and reply.usage.completion_tokens == len("ab|STOP|")
        assert [reason for _, reason in server.client.aborted] == ["stop", "stop"]


@in_loop
async def test_completions_echo_with_logprobs_and_offsets() -> None:
    async with running(says("xyz")) as server, api(server) as client:
        reply = await client.completions.create(model=MODEL, prompt="qr", echo=True, logprobs=1, max_tokens=2)
        choice = reply.choices[0]
        assert (choice.text, choice.finish_reason) == ("qrxy", "length")
        logprobs = choice.logprobs
        assert logprobs
        assert logprobs.tokens == ["q", "r", "x", "y"]
        assert logprobs.text_offset == [0, 1, 2, 3]
        assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
        assert logprobs.top_logprobs and logprobs.top_logprobs[0] is None
        assert logprobs.top_logprobs[2] == {"x": -0.5}


@in_loop
async def test_prompts_come_as_text_texts_ids_or_lists_of_ids() -> None:
    async with running() as server, api(server) as client:
        prompts: list[Any] = ["hi", ["hi", "ho"], list(ids("hi")), [list(ids("hi")), list(ids("ho"))]]
        for prompt in prompts:
            reply = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=3)
            assert [choice.text for choice in reply.choices] == ["Hel"] * len(reply.choices)
        sent = [request.prompt for request in server.client.requests]
        assert sent == [ids(text) for text in ("hi", "hi", "ho", "hi", "hi", "ho")]


@in_loop
async def test_defaults_of_max_tokens() -> None:
    async with running() as server, api(server) as client:
        await client.completions.create(model=MODEL, prompt="hi")
        await client.chat.completions.create(model=MODEL, messages=HI)
        first, second = server.client.requests
        assert first.sampling.max_tokens == 16
        assert second.sampling.max_tokens == MAX_LEN - len(second.prompt)


@in_loop
async def test_errors_reach_the_client_as_its_own_types() -> None:
    async with running() as server, api(server) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=HI, temperature=3)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=HI)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model=MODEL, prompt="x" * 400)
        assert "400" in long.value.message and str(MAX_LEN) in long.value.message
        assert server.client.requests == []


@in_loop
async def test_a_failing_request_ends_its_stream_with_an_error_event() -> None:
    async with running() as server, api(server) as client:
        server.client.fail_request = "numbers went wrong at 0x7fff1234 in /opt/secret/file.py"
        with pytest.raises(openai.APIError) as failed:
            async for _ in await client.chat.completions.create(model=MODEL, messages=HI, stream=True):
                pass
        assert "numbers went wrong" in failed.value.message
        assert "0x7fff" not in failed.value.message and "/opt" not in failed.value.message
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model=MODEL, messages=HI)
        server.client.fail_request = ""
        reply = await client.chat.completions.create(model=MODEL, messages=HI)
        assert reply.choices[0].message.content == "Hello world"


@in_loop
async def test_models_are_listed() -> None:
    async with running() as server, api(server) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("../../etc/passwd")


@in_loop
async def test_exporters_get_the_numbers_of_the_response() -> None:
    async with running() as server, api(server) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=HI)
        events = server.server.state.bus.settled(lambda: list(server.exporter.events))
        timings: Any = reply.model_extra and reply.model_extra["timings"]
        (request,) = [event for event in events if isinstance(event, RequestEvent)]
        assert request.e2e_ms == timings["total_ms"] and request.unattributed_ms == timings["unattributed_ms"]
        assert (request.output_tokens, request.cached_tokens) == (12, 4)
        assert sum(isinstance(event, FirstTokenEvent) for event in events) == 1
        assert sum(event.num_tokens for event in events if isinstance(event, TokensEvent)) == 11
