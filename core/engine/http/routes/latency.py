"""``GET /engine/latency``: rolling percentiles."""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.preparing import state_of


async def latency(http: web.Request) -> web.StreamResponse:
    """The summary of :class:`engine.service.latency.RollingLatency`, and whether any event was lost."""
    state = state_of(http)
    summary = await state.read_exporters(state.latency.summary)
    events = {"dropped": state.bus.dropped, "exporters_cut_off": state.bus.cut_off}
    return json_response({**summary, "events": events})
