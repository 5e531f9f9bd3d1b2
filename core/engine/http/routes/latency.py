"""``GET /engine/latency``: rolling percentiles."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engine.contracts.percentiles import describe
from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.state import ServerState
from engine.service.engines import EngineHandle
from engine.service.promises import DEFAULT_CLASS


async def latency(http: web.Request) -> web.StreamResponse:
    """The summary of :class:`engine.service.latency.RollingLatency`, and whether any event was lost."""
    return json_response(await read_latency(state_of(http), http.query.get("engine")))


async def read_latency(state: ServerState, name: str | None = None) -> dict[str, Any]:
    """``name``: the id of the engine, ``None``: the first one."""
    engine = state.engine_of(name)
    summary = await state.read_exporters(engine.latency.summary)
    classes = await state.read_exporters(lambda: _classes(engine))
    events = {"dropped": state.bus.dropped, "exporters_cut_off": state.bus.cut_off}
    return {"engine": engine.id, **summary, "classes": classes, "events": events}


def _classes(engine: EngineHandle) -> dict[str, Any]:
    """TTFT by class: observed, as it was expected, and how far these were apart."""
    forecast, found = engine.forecast.summary(), {}
    for name in engine.plan.settings.slo.classes or (DEFAULT_CLASS,):
        observed, expected = map(describe, engine.latency.of_class(name).values())
        found[name] = {"ttft_ms": observed, "expected_ttft_ms": expected, **forecast.get(name, {})}
    return found
