"""Stored responses, as the official client reads and deletes them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ...service.fakes import MODEL, in_loop, says
from ..fakes import running
from ..test_responses_format import api


@in_loop
async def test_a_stored_response_is_what_was_answered_until_it_is_deleted() -> None:
    async with running(says("Yes")) as server, api(server) as client:
        first = await client.responses.create(model=MODEL, input="hi")
        assert await client.responses.retrieve(first.id) == first
        status, _, data = await server.post(f"/v1/responses/{first.id}", b"", method="DELETE")
        assert status == 200 and json.loads(data) == {"id": first.id, "object": "response", "deleted": True}
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError) as error:
                await call(first.id)
            assert error.value.code == "response_not_found" and first.id in error.value.message


@in_loop
async def test_a_stored_stream_is_what_its_last_event_said() -> None:
    async with running(says("Yes")) as server, api(server) as client:
        async with client.responses.stream(model=MODEL, input="hi") as stream:
            last = await stream.get_final_response()
        kept = await client.responses.retrieve(last.id)
        assert (kept.output_text, kept.usage, kept.status) == (last.output_text, last.usage, "completed")
        status, _, data = await server.get(f"/v1/responses/{last.id}?stream=true")
        assert status == 400 and json.loads(data)["error"]["param"] == "stream"


@in_loop
async def test_items_are_listed_in_pages_the_last_first() -> None:
    async with running(says("Yes")) as server, api(server) as client:
        first = await client.responses.create(model=MODEL, input="one")
        second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
        pages = client.responses.input_items.list(second.id, limit=2)
        texts: list[Any] = [item async for item in pages]
        page = await client.responses.input_items.list(second.id, limit=2)
    assert [item.content[0].text for item in texts] == ["two", "Yes", "one"]
    assert [item.content[0].type for item in texts] == ["input_text", "output_text", "input_text"]
    assert len({item.id for item in texts}) == 3 and page.has_more
    assert (page.first_id, page.last_id) == (texts[0].id, texts[1].id)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "limit=00055", "order=up", "after=x"])
@in_loop
async def test_a_page_that_makes_no_sense_is_refused(query: str) -> None:
    async with running(says("Yes")) as server, api(server) as client:
        first = await client.responses.create(model=MODEL, input="one")
        status, _, data = await server.get(f"/v1/responses/{first.id}/input_items?{query}")
        assert status == 400 and json.loads(data)["error"]["param"] == query.partition("=")[0]
