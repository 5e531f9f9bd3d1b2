"""``GET /engine/latency``: rolling percentiles."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.state import ServerState


async def latency(http: web.Request) -> web.StreamResponse:
    """The summary of :class:`engine.service.latency.RollingLatency`, and whether any event was lost."""
    return json_response(await read_latency(state_of(http), http.query.get("engine")))


async def read_latency(state: ServerState, name: str | None = None) -> dict[str, Any]:
    """``name``: the id of the engine, ``None``: the first one."""
    engine = state.engine_of(name)
    summary = await state.read_exporters(engine.latency.summary)
    if state.slo.classes:
        forecast, observed = engine.forecast.summary(), await state.read_exporters(engine.latency.classes)
        summary["classes"] = {name: observed.get(name, {}) | forecast.get(name, {}) for name in state.slo.classes}
    events = {"dropped": state.bus.dropped, "exporters_cut_off": state.bus.cut_off}
    return {"engine": engine.id, **summary, "events": events}
