"""Batches, as the official client creates, watches and cancels them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.contracts.config import AutoscaleSettings, BatchSettings, FleetSettings
from engine.http.line_answers import LAST
from engine.http.routes.batches import BatchRequest
from engine.service.keys import Caller
from engine.service.protocol import decode

from ...service.fakes import HELLO, MODEL, Script, in_loop, says
from ...service.test_keys import entry, written
from ..fakes import Running, running
from ..test_responses_format import api

CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **body: Any) -> bytes:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": f"hi {number}"}], **body}
    return json.dumps({"custom_id": f"n{number}", "method": "POST", "url": url, "body": asked}).encode() + b"\n"


@asynccontextmanager
async def with_batches(folder: Path, script: Script = HELLO, **server: Any) -> AsyncIterator[Running]:
    settings = BatchSettings(path=str(folder), quiet_s=0.0, **server.pop("batches", {}))
    async with running(script, batches=settings, **server) as found:
        yield found


def halting(count: int) -> Script:
    """Answers so many requests; those after them never come to an end."""
    begun: list[str] = []

    def script(request: Any) -> Any:
        begun.append(request.request_id)
        if len(begun) > count:
            raise asyncio.CancelledError
        return HELLO(request)

    return script


async def until(client: openai.AsyncOpenAI, name: str, *states: str) -> Any:
    while (batch := await client.batches.retrieve(name)).status not in states:
        await asyncio.sleep(0.01)
    return batch


async def created(client: openai.AsyncOpenAI, *lines: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


async def lines_of(client: openai.AsyncOpenAI, name: str | None) -> list[Any]:
    assert name is not None
    content = await client.files.content(name)
    return [json.loads(each) for each in content.text.splitlines()]


@in_loop
async def test_each_line_is_answered_as_a_request_by_itself_or_with_its_error(tmp_path: Path) -> None:
    async with with_batches(tmp_path) as server, api(server) as client:
        first = await created(client, line(1), line(2, n=2), line(3, temperature=9), metadata={"of": "me"})
        assert (first.status, first.endpoint, first.metadata) == ("validating", CHAT, {"of": "me"})
        done = await until(client, first.id, "completed")
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (3, 2, 1)
        assert done.in_progress_at and done.finalizing_at and done.completed_at and done.expires_at
        one, two = await lines_of(client, done.output_file_id)
        (failed,) = await lines_of(client, done.error_file_id)
        by_itself = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi 1"}])
    assert (one["custom_id"], two["custom_id"], failed["custom_id"]) == ("n1", "n2", "n3")
    assert one["error"] is None and one["response"]["status_code"] == 200
    body = one["response"]["body"]
    assert body["choices"][0]["message"]["content"] == by_itself.choices[0].message.content == "Hello world"
    assert body["id"] == one["response"]["request_id"] and len(two["response"]["body"]["choices"]) == 2
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    assert {request.priority for request in server.client.requests[:3]} == {LAST}


@pytest.mark.parametrize(
    ("endpoint", "asked", "text"),
    [
        ("/v1/completions", {"prompt": "hi"}, lambda body: body["choices"][0]["text"]),
        ("/v1/responses", {"input": "hi"}, lambda body: body["output"][0]["content"][0]["text"]),
    ],
)
@in_loop
async def test_completions_and_responses_have_batches_too(tmp_path: Path, endpoint: str, asked: Any, text: Any) -> None:
    def of(number: int, **fields: Any) -> bytes:
        body = {"model": MODEL, **asked, **fields}
        return json.dumps({"custom_id": str(number), "method": "POST", "url": endpoint, "body": body}).encode() + b"\n"

    async with with_batches(tmp_path) as server, api(server) as client:
        lines = [of(1), of(2, stream=True), *([of(3, previous_response_id="resp_1")] if "input" in asked else [])]
        batch = await until(client, (await created(client, *lines, endpoint=endpoint)).id, "completed")
        (one,) = await lines_of(client, batch.output_file_id)
        errors = await lines_of(client, batch.error_file_id)
    assert text(one["response"]["body"]) == "Hello world"
    refused = [each["response"]["body"]["error"]["param"] for each in errors]
    assert refused == ["stream", "previous_response_id"][: len(refused)]


@in_loop
async def test_a_batch_goes_on_in_the_next_server_and_no_line_is_doubled(tmp_path: Path) -> None:
    async with with_batches(tmp_path, halting(5), batches={"max_in_flight": 2}) as server, api(server) as client:
        batch = await created(client, *[line(number) for number in range(1, 11)], metadata={"a": "b"})
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 5:
            await asyncio.sleep(0.01)
    async with with_batches(tmp_path) as server, api(server) as client:
        done = await until(client, batch.id, "completed")
        found = await lines_of(client, done.output_file_id)
        assert len(server.client.requests) == 5
        assert (await client.batches.list()).data == [done]
    assert [each["custom_id"] for each in found] == [f"n{number}" for number in range(1, 11)]


@in_loop
async def test_a_cancelled_batch_has_what_was_done_and_says_what_was_not(tmp_path: Path) -> None:
    async with with_batches(tmp_path, halting(1), batches={"max_in_flight": 1}) as server, api(server) as client:
        batch = await created(client, line(1), line(2))
        while not (await client.batches.retrieve(batch.id)).request_counts.completed:
            await asyncio.sleep(0.01)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        done = await until(client, batch.id, "cancelled")
        assert [each["custom_id"] for each in await lines_of(client, done.output_file_id)] == ["n1"]
        (left,) = await lines_of(client, done.error_file_id)
        assert (left["custom_id"], left["response"], left["error"]["code"]) == ("n2", None, "batch_cancelled")
        assert (await client.batches.cancel(batch.id)) == done
        assert server.client.aborted


@in_loop
async def test_a_file_with_mistakes_fails_with_their_lines(tmp_path: Path) -> None:
    async with with_batches(tmp_path) as server, api(server) as client:
        batch = await created(client, line(1), b"\n", b"{no json\n", line(1), line(2, url="/v1/completions"))
        failed = await until(client, batch.id, "failed")
        assert failed.errors and failed.errors.data
        found = [(each.line, each.code) for each in failed.errors.data]
        assert found == [(3, "invalid_json_line"), (4, "duplicate_custom_id"), (5, "mismatched_endpoint")]
        assert server.client.requests == [] and failed.failed_at
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)


@in_loop
async def test_lines_wait_while_clients_are_served(tmp_path: Path) -> None:
    async with with_batches(tmp_path) as server, api(server) as client:
        server.client.hold_before = 2
        waiting = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=[]))
        waiting.cancel()
        answer = asyncio.create_task(
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        )
        await server.client.holding.wait()
        batch = await created(client, line(1))
        await until(client, batch.id, "in_progress")
        await asyncio.sleep(0.1)
        assert len(server.client.requests) == 1
        server.client.proceeding.set()
        await answer
        await until(client, batch.id, "completed")


@in_loop
async def test_a_tenant_sees_its_own_and_its_lines_are_salted(tmp_path: Path) -> None:
    keys = [Caller(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("ann", "bob")]
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": key.name, "sha256": key.sha256} for key in keys]))
    async with with_batches(tmp_path / "b", keys=str(file)) as server:
        ann, bob = (api(server).with_options(api_key=key.name) for key in keys)
        batch = await until(ann, (await created(ann, line(1))).id, "completed")
        assert server.client.requests[0].cache_salt == keys[0].salted("")
        for call in (bob.batches.retrieve(batch.id), bob.batches.cancel(batch.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        for name in (batch.input_file_id, batch.output_file_id):
            for call in (bob.files.retrieve(name), bob.files.content(name), bob.files.delete(name)):
                with pytest.raises(openai.NotFoundError):
                    await call
        with pytest.raises(openai.NotFoundError):
            await bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        assert (await bob.files.list()).data == [] == (await bob.batches.list()).data
        assert len((await ann.files.list()).data) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"completion_window": "1h"}, "completion_window"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"output": 1}, "output"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
@in_loop
async def test_a_batch_that_makes_no_sense_is_refused(tmp_path: Path, fields: Any, param: str) -> None:
    asked = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h", **fields}
    async with with_batches(tmp_path) as server:
        status, _, data = await server.post("/v1/batches", asked)
    assert status == 400 and json.loads(data)["error"]["param"].startswith(param.partition(".")[0])
    whole = {"input_file_id": "f", "endpoint": CHAT, "completion_window": "24h"}
    assert decode(json.dumps(whole).encode(), BatchRequest).metadata is None


@in_loop
async def test_a_server_without_batches_says_so(tmp_path: Path) -> None:
    async with running(says("Yes")) as server, api(server) as client:
        with pytest.raises(openai.NotFoundError) as error:
            await client.files.list()
        assert error.value.code == "no_batches"
    async with with_batches(tmp_path), with_batches(tmp_path) as second, api(second) as client:
        await client.files.list()


@in_loop
async def test_a_line_with_more_sequences_than_its_key_allows_fails(tmp_path: Path) -> None:
    keys = written(tmp_path, [entry("ann", "key-of-ann", max_sequences=2)])
    async with with_batches(tmp_path / "b", keys=keys) as server, api(server) as anybody:
        client = anybody.with_options(api_key="key-of-ann")
        batch = await created(client, line(1, n=3), line(2, n=2), line(3, n=2))
        done = await until(client, batch.id, "completed")
        (failed,) = await lines_of(client, done.error_file_id)
    assert (done.request_counts.completed, failed["custom_id"]) == (2, "n1")
    assert failed["response"]["body"]["error"]["code"] == "key_limit"


@in_loop
async def test_a_line_starts_an_engine_where_there_is_none(tmp_path: Path) -> None:
    fleet = FleetSettings(autoscale=AutoscaleSettings(min=0, max=1))
    async with with_batches(tmp_path, fleet=fleet) as server, api(server) as client:
        await server.server.state.engine.supervisor.stop()
        scaling = asyncio.create_task(server.server.state.scaler.run())
        batch = await created(client, line(1), line(2))
        assert (await until(client, batch.id, "completed")).request_counts.completed == 2
        scaling.cancel()
