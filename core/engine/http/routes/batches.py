"""``/v1/batches``: https://platform.openai.com/docs/api-reference/batch"""

from __future__ import annotations

from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta

from engine.http.bodies import json_response
from engine.http.incoming import caller_of, owner_of, state_of
from engine.http.paging import limit_of, page
from engine.service.protocol import Body, decode

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class BatchRequest(Body):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


async def create(http: web.Request) -> web.StreamResponse:
    state = state_of(http)
    async with state.bodies.read(http) as body:
        asked = decode(body.data, BatchRequest)
    batch = await state.batches.create(
        asked.input_file_id, asked.endpoint, asked.metadata, owner_of(http), caller_of(http)
    )
    return json_response(batch.public(state.batches.runner.paused))


async def listed(http: web.Request) -> web.StreamResponse:
    """``?limit=``, ``?after=`` an id; the latest first."""
    tenant, limit, after = owner_of(http), limit_of(http, most=100, default=20), http.query.get("after")
    batches = state_of(http).batches
    found = await batches.call(lambda store: store.batches(tenant, after, limit))
    return json_response(page([batch.public(batches.runner.paused) for batch in found], limit))


async def one(http: web.Request) -> web.StreamResponse:
    name, tenant, batches = http.match_info["batch"], owner_of(http), state_of(http).batches
    batch = await batches.call(lambda store: store.batch(name, tenant))
    return json_response(batch.public(batches.runner.paused))


async def cancel(http: web.Request) -> web.StreamResponse:
    batches = state_of(http).batches
    batch = await batches.cancel(http.match_info["batch"], owner_of(http))
    return json_response(batch.public(batches.runner.paused))
