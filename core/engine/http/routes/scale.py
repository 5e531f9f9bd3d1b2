"""``GET /engine/scale``: how many engines there should be, why, and the figures that say so."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.state import ServerState
from engine.service.fleet import may_go
from engine.service.scaling import class_figures, engine_figures, fleet_figures


async def scale(http: web.Request) -> web.StreamResponse:
    return json_response(await read_scale(state_of(http)))


async def read_scale(state: ServerState) -> dict[str, Any]:
    """``reason``: of the latest change of the number of engines; ``may_go``: the engines that would be missed least,
    as many as there are beyond the fewest; ``signal_age_s``: of the engine that has been silent longest."""
    engines, scaler, fleet = [*state.engines.values()], state.scaler, state.fleet
    classes = await state.read_exporters(lambda: class_figures(engines))
    found = [engine_figures(engine) for engine in engines]
    figures = fleet_figures(engines, time.monotonic(), scaler.held)
    up = [each for each in found if each.state != "stopped"]
    return {
        "desired": fleet.desired,
        "ready": sum(each.state == "ready" for each in found),
        "min": scaler.least,
        "max": len(engines),
        "autoscale": scaler.is_on,
        "reason": fleet.reason,
        "changed_s_ago": fleet.changed_s_ago,
        "backlog_s": figures.backlog_s,
        "saturation": figures.saturation,
        "tokens_in_flight": {
            "queued": sum(each.queued_tokens for each in found),
            "running": sum(each.running_tokens for each in found),
        },
        "held": figures.held,
        "classes": {name: asdict(each) for name, each in classes.items()},
        "may_go": [engine.id for engine in may_go(engines)[: max(0, len(up) - scaler.least)]],
        "signal_age_s": max((each.age_s for each in found if each.age_s is not None), default=None),
        "engines": [asdict(each) for each in found],
    }
