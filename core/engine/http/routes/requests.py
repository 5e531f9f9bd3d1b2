"""``GET /engine/requests``: where the time of ended requests went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from engine.contracts.events import RequestEvent
from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.state import ServerState
from engine.service.chrome_trace import chrome_trace
from engine.service.errors import ApiError, bad_request
from engine.service.response_store import request_of
from engine.service.waterfall import MAX_REQUESTS, ORDERS, Waterfall

DEFAULT_COUNT = 32
MAX_WITHIN_S = 10**9


async def recent_requests(http: web.Request) -> web.StreamResponse:
    """The requests that ended last, the last first, as :meth:`engine.service.waterfall.Waterfall.plain` but without
    what is inside of spans, and how long ago each ended; ``?count=N`` of them, ``?engine=ID`` and ``?class=NAME`` for
    those of one engine or class of service alone, ``?within_s=N`` for those that ended in the last seconds,
    ``?order=total``, ``ttft``, ``tpot`` or ``queue`` for those that took longest. ``covers_s``: of the
    requests that ended in so many seconds before now none is left out; ``null``: since the server started."""
    return json_response(await read_recent(state_of(http), http.query, http.query.get("engine")))


async def read_recent(state: ServerState, query: Mapping[str, str], engine: str | None = None) -> dict[str, Any]:
    """``engine``: the id of the engine, ``None``: of all."""
    count = _number("count", query.get("count", str(DEFAULT_COUNT)), MAX_REQUESTS)
    within_s = _number("within_s", query.get("within_s", str(MAX_WITHIN_S)), MAX_WITHIN_S)
    order, slo_class = query.get("order", "latest"), query.get("class", "")
    if order not in ORDERS:
        raise bad_request(f"order={order[:16]!r}: expected one of {', '.join(ORDERS)}.", "order")
    if engine is not None:
        state.engine_of(engine)  # it is one
    waterfalls = state.waterfalls

    def read() -> dict[str, Any]:
        now_s, forgot_s = time.monotonic(), waterfalls.forgot_s
        found = waterfalls.recent(count, engine, order, slo_class, now_s - within_s)
        covers_s = None if forgot_s is None else round(now_s - forgot_s, 3)
        return {"requests": [_brief(each, now_s) for each in found], "covers_s": covers_s}

    return await state.read_exporters(read)


def _number(name: str, text: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)) or not 0 < int(text) <= most:
        raise bad_request(f"{name}={text[:16]!r}: expected a number from 1 to {most}.", name)
    return int(text)


async def one_request(http: web.Request) -> web.StreamResponse:
    """All sequences of the request whose id a response had, with why the prefix cache had no more of their prompts;
    ``?format=chrome`` for Chrome's and Perfetto's trace viewers."""
    state, name = state_of(http), request_of(http.match_info["request"])
    form = http.query.get("format", "json")
    if form not in ("json", "chrome"):
        raise bad_request(f"format={form[:16]!r}: expected json or chrome.", "format")

    if form == "chrome":
        found = await _found(state, name)
        return json_response(await state.read_exporters(lambda: chrome_trace(found, state.waterfalls.steps)))
    return json_response(await read_request(state, name))


async def read_request(state: ServerState, name: str) -> dict[str, Any]:
    return {"sequences": [each.plain() | _prefix(state, each.request) for each in await _found(state, name)]}


async def _found(state: ServerState, name: str) -> Sequence[Waterfall]:
    found = await state.read_exporters(lambda: state.waterfalls.find(name))
    if not found:
        message = f"No request of this id is among the last {MAX_REQUESTS} that ended."
        raise ApiError("not_found", message, code="request_not_found")
    return found


def _brief(waterfall: Waterfall, now_s: float) -> dict[str, object]:
    spans = {span.name: round(span.ms, 3) for span in waterfall.spans}
    ago_s = round(now_s - waterfall.request.at_s, 3)
    return waterfall.plain() | {"spans": spans, "ended_s_ago": ago_s}


def _prefix(state: ServerState, request: RequestEvent) -> dict[str, object]:
    """Why the prefix cache had no more of a prompt, as far as similar ones are remembered."""
    engine = state.engines[request.engine]
    block_size = engine.client.info.block_size if engine.client.info else 1
    return {"prefix": engine.prompts.explain(request.request_id, request.cached_tokens, block_size, engine.decode)}
