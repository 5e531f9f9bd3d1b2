"""Responses that go on from stored ones, as the official client asks for them."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import openai
import pytest

from engine.contracts.router import ToUrl

from ..service.fakes import MODEL, DirectRouter, in_loop, says, text_of
from .fakes import Running, running
from .test_responses_format import FUNCTIONS, PATH, api, events
from .test_tool_calls import ONE, with_tools


def said(server: Running) -> str:
    """The prompt of the last request."""
    return text_of(server.client.requests[-1].prompt)


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_a_response_goes_on_from_the_one_before_and_its_instructions_do_not(stream: bool) -> None:
    async with running(says("Yes")) as server, api(server) as client:

        async def ask(**fields: Any) -> Any:
            if not stream:
                return await client.responses.create(model=MODEL, **fields)
            async with client.responses.stream(model=MODEL, **fields) as told:
                return await told.get_final_response()

        first = await ask(input="one", instructions="Be.")
        second = await ask(input=[{"role": "user", "content": "two"}], previous_response_id=first.id)
        assert said(server) == (
            "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert (first.store, first.previous_response_id) == (True, None)
        assert (second.store, second.previous_response_id) == (True, first.id)
        third = await ask(input="three", instructions="New.", previous_response_id=second.id, store=False)
        assert said(server).startswith("<|im_start|>system\nNew.<|im_end|>\n<|im_start|>user\none<|im_end|>")
        assert said(server).count("Yes") == 2 and third.store is False
        with pytest.raises(openai.NotFoundError) as error:
            await ask(input="four", previous_response_id=third.id)
        assert (error.value.param, error.value.code) == ("previous_response_id", "previous_response_not_found")
        assert third.id in error.value.message and "server.store_s" in error.value.message


@in_loop
async def test_two_responses_go_on_from_the_same_one() -> None:
    async with running(says("Yes")) as server, api(server) as client:
        first = await client.responses.create(model=MODEL, input="one")
        for text in ("two", "three"):
            await client.responses.create(model=MODEL, input=text, previous_response_id=first.id)
            assert f"one<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\n{text}" in said(server)


@in_loop
async def test_what_a_stored_call_came_to_follows_it() -> None:
    async with running(says(ONE)) as server, api(with_tools(server)) as client:
        first = await client.responses.create(model=MODEL, input="hi", tools=FUNCTIONS)
        call: Any = first.output[0]
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
        second = await client.responses.create(
            model=MODEL, input=output, tools=FUNCTIONS, previous_response_id=first.id
        )
        items = await client.responses.input_items.list(second.id, order="asc")
    user, called, came_to = items.data
    assert (user.type, called.type, came_to.type) == ("message", "function_call", "function_call_output")
    assert called.id == call.id and json.loads(call.arguments) == {"a": '}"ü'}
    request: Any = server.router.requests[-1]
    assert text_of(request.prompts[0]).endswith(
        "user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )


@in_loop
async def test_an_item_of_a_stored_response_may_be_referred_to() -> None:
    async with running(says("Yes")) as server, api(server) as client:
        first = await client.responses.create(model=MODEL, input="one")
        reference: Any = {"type": "item_reference", "id": first.output[0].id}
        user: Any = [{"role": "user", "content": text, "id": None} for text in ("one", "two")]
        second = await client.responses.create(model=MODEL, input=[user[0], reference, user[1]])
        assert "one<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\ntwo" in said(server)
        await client.responses.delete(first.id)
        await client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
        assert said(server).count("Yes") == 2, "what it referred to is part of it"
        with pytest.raises(openai.NotFoundError) as error:
            await client.responses.create(model=MODEL, input=[user[0], reference])
        assert error.value.param == "input[1]"


@in_loop
async def test_an_item_that_a_response_has_not_is_not_found() -> None:
    async with running(says("Yes")) as server, api(server) as client:
        first = await client.responses.create(model=MODEL, input="one")
        wrong: Any = {"type": "item_reference", "id": first.output[0].id[:-1] + "7"}
        with pytest.raises(openai.NotFoundError) as error:
            await client.responses.create(model=MODEL, input=[{"role": "user", "content": "two"}, wrong])
    assert (error.value.param, error.value.code) == ("input[1]", "item_not_found")


@in_loop
async def test_many_references_to_a_long_item_take_no_more_than_a_body_may_have() -> None:
    async with running(says("Yes" * 1000), max_body_bytes=2**20) as server:
        first = json.loads((await server.post(PATH, {"model": MODEL, "input": "one"}))[2])
        references = [{"type": "item_reference", "id": first["output"][0]["id"]}] * 9000
        tracemalloc.start()
        try:
            status, _, answer = await server.post(PATH, {"model": MODEL, "input": references})
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (status, json.loads(answer)["error"]["code"]) == (413, "request_too_large")
    assert most < 2**23 + 2**22, "9000 times the item are more"


@in_loop
async def test_only_the_same_tenant_goes_on() -> None:
    async with running(says("Yes"), trust_user=True) as server, api(server) as client:
        salt = {"cache_salt": "s"}
        first = await client.responses.create(model=MODEL, input="one", user="u", extra_body=salt)
        await client.responses.create(
            model=MODEL, input="two", user="u", previous_response_id=first.id, extra_body=salt
        )
        for user, extra in (("v", salt), ("u", {}), ("u", {"cache_salt": "t"})):
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(
                    model=MODEL, input="two", user=user, previous_response_id=first.id, extra_body=extra
                )
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        found = await client.responses.retrieve(first.id, extra_query={"user": "u", **salt})
        assert found.id == first.id


@in_loop
async def test_a_user_that_is_not_trusted_is_no_tenant() -> None:
    async with running(says("Yes")) as server, api(server) as client:
        first = await client.responses.create(model=MODEL, input="one", user="u")
        assert (await client.responses.retrieve(first.id)).id == first.id


@in_loop
async def test_ids_that_the_server_shows_to_others_do_not_tell_the_ids_of_responses() -> None:
    async with running(says("Yes")) as server, api(server) as client:
        first = await client.responses.create(model=MODEL, input="one")
        _, _, data = await server.get("/engine/requests")
        shown = json.loads(data)["requests"][0]["request_id"].rpartition("-")[0]
        assert first.id.startswith(shown) and len(first.id) > len(shown)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(shown)
        status, _, data = await server.get(f"/engine/requests/{first.id}")
        assert status == 200 and json.loads(data)["sequences"][0]["request_id"] == f"{shown}-0"


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_a_response_that_failed_or_that_its_client_left_is_not_stored(stream: bool) -> None:
    async with running() as server:
        server.client.fail_request = "no memory left"
        await server.post(PATH, {"input": "hi", "stream": stream})
        server.client.fail_request = ""
        server.client.hold_before = 2
        _, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
        body = json.dumps({"input": "hi", "stream": stream}).encode()
        writer.write(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await server.client.holding.wait()
        writer.transport.abort()
        while not server.client.aborted:
            server.client.abort_seen.clear()
            await server.client.abort_seen.wait()
        assert await server.server.state.admission.until_idle(5)
        assert len(server.client.requests) == 2 and server.server.state.responses.num_bytes == 0


@in_loop
async def test_a_response_that_met_its_limit_is_stored() -> None:
    async with running(says("Hello")) as server, api(server) as client:
        cut = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
        await client.responses.create(model=MODEL, input="on", previous_response_id=cut.id)
        assert cut.status == "incomplete" and "assistant\nHe<|im_end|>" in said(server)


@in_loop
async def test_log_probabilities_are_stored_with_the_response_and_not_said_again() -> None:
    async with running(says("Yes")) as server, api(server) as client:
        first: Any = await client.responses.create(
            model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=2
        )
        kept: Any = await client.responses.retrieve(first.id)
        assert kept.output[0].content[0].logprobs == first.output[0].content[0].logprobs != []
        second = await client.responses.create(model=MODEL, input="on", previous_response_id=first.id)
        items: Any = await client.responses.input_items.list(second.id, order="asc")
        assert items.data[1].content[0].logprobs == []


@in_loop
async def test_a_server_without_a_store_says_so() -> None:
    async with running(store_bytes=0) as server, api(server) as client:
        first = await client.responses.create(model=MODEL, input="hi", store=True)
        assert first.store is False
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(model=MODEL, input="hi", previous_response_id=first.id)
        assert (error.value.code, error.value.param) == ("unsupported_parameter", "previous_response_id")
        assert "server.store_bytes" in error.value.message
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_1_0"}])
        assert error.value.param == "input[0]"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)


@in_loop
async def test_a_conversation_larger_than_a_body_may_be_is_refused() -> None:
    async with running(says("Yes"), max_body_bytes=300) as server:
        body: dict[str, Any] = {"input": [{"role": "user", "content": "x" * 100, "metadata": "y" * 50}]}
        _, _, data = await server.post(PATH, body)
        status, _, data = await server.post(PATH, body | {"previous_response_id": json.loads(data)["id"]})
        assert status == 413 and b"server.max_body_bytes" in data
        assert server.server.state.bodies.taken == 0


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_another_server_is_sent_the_whole_conversation_and_told_to_store_nothing(stream: bool) -> None:
    async with running(says("Yes")) as other, running(says("No")) as server:
        _, _, data = await server.post(PATH, {"input": "one"})
        name = json.loads(data)["id"]
        server.router.decision = ToUrl(other.url)
        body = {"input": "two", "previous_response_id": name, "stream": stream}
        status, _, data = await server.post(PATH, body)
        answer = events(data)[-1]["response"] if stream else json.loads(data)
        assert status == 200 and "one<|im_end|>\n<|im_start|>assistant\nNo<|im_end|>" in said(other)
        assert (answer["store"], answer["previous_response_id"]) == (False, None)
        assert other.server.state.responses.num_bytes == 0
        server.router.decision = DirectRouter().decision
        status, _, _ = await server.post(PATH, {"input": "three", "previous_response_id": answer["id"]})
        assert status == 404, "what another server answered is not stored here"


@in_loop
async def test_a_large_conversation_goes_on_as_a_small_one_does() -> None:
    async with running(says("Yes")) as server:
        padded = [{"role": "user", "content": "one", "metadata": "y" * 70_000}]
        _, _, data = await server.post(PATH, {"input": padded})
        status, _, _ = await server.post(PATH, {"input": "two", "previous_response_id": json.loads(data)["id"]})
        assert status == 200 and "one<|im_end|>\n<|im_start|>assistant\nYes" in said(server)


@in_loop
async def test_an_input_that_is_to_be_stored_counts_while_it_is_answered() -> None:
    async with running(says("Yes")) as server:
        server.client.hold_before = 1
        for stored, least in ((True, 30_000), (False, 0)):
            body = {"input": [{"role": "user", "content": "one", "metadata": "y" * 100_000}], "store": stored}
            server.client.holding.clear()
            task = asyncio.create_task(server.post(PATH, body))
            await server.client.holding.wait()
            assert (server.server.state.bodies.taken > least) is stored
            server.client.proceeding.set()
            await task
            server.client.proceeding.clear()
        assert server.server.state.bodies.taken == 0
