"""``GET /engine/expert_load``: how often each expert was chosen since the engine was ready."""

from __future__ import annotations

from aiohttp import web

from engine.assembly.expert_load import expert_load_file
from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.loop.client import EngineDead
from engine.service.engines import not_ready
from engine.service.errors import ApiError


async def expert_load(http: web.Request) -> web.StreamResponse:
    """Answers with an :class:`~engine.assembly.expert_load.ExpertLoadFile`; 404 where experts are not counted."""
    state = state_of(http)
    engine = state.engine_of(http.query.get("engine"))
    if not engine.plan.parallelism.count_experts:
        raise ApiError("not_found", "Experts are not counted: start the engine with parallelism.count_experts=true.")
    try:
        return json_response(expert_load_file(await engine.client.expert_load()))
    except EngineDead as error:
        raise not_ready(error) from error
