"""``GET /engine/history``: an hour of what an engine served."""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.service.engines import EngineHandle
from engine.service.errors import bad_request
from engine.service.history import ALL

MOST_DIGITS = 12


async def history(http: web.Request) -> web.StreamResponse:
    """What :meth:`engine.service.history.History.since` says, and what was promised (``targets``); ``?since=N`` from
    period N on, ``?class=NAME`` of the requests of one class of service, ``?engine=ID`` of that engine, else of the
    first one."""
    state, query = state_of(http), http.query
    engine, since, slo_class = state.engine_of(query.get("engine")), query.get("since", "0"), query.get("class", ALL)
    if not since.isascii() or not since.isdigit() or len(since) > MOST_DIGITS:
        raise bad_request(f"since={since[:16]!r}: expected the number of a period.", "since")
    if slo_class != ALL and slo_class not in state.slo.classes:
        names = ", ".join(state.slo.classes) or "none"
        raise bad_request(f"class={slo_class[:64]!r}: expected one of slo.classes ({names}).", "class")
    found = await state.read_exporters(lambda: engine.history.since(int(since), slo_class))
    shown = {"engine": engine.id, "classes": list(state.slo.classes), "targets": _targets(engine, slo_class)}
    return json_response(shown | found)


def _targets(engine: EngineHandle, slo_class: str) -> dict[str, float | None]:
    """In ms; ``None``: there is none, or one for each of several classes."""
    classes = engine.plan.settings.slo.classes
    asked = classes if len(classes) == 1 else {slo_class: classes[slo_class]} if slo_class else {}
    ttft_ms, itl_ms = next(((each.ttft_ms, each.itl_ms) for each in asked.values()), (0.0, 0.0))
    return {"ttft_ms": ttft_ms or None, "itl_ms": itl_ms or engine.plan.scheduler.itl_target_ms or None}
