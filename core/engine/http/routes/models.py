"""``GET /v1/models`` and ``GET /v1/models/{id}``"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.state import ServerState
from engine.service.parsing import check_model


async def list_models(http: web.Request) -> web.StreamResponse:
    return json_response({"object": "list", "data": [_model(state_of(http))]})


async def one_model(http: web.Request) -> web.StreamResponse:
    """Answers for one id, which is compared, never used as a path."""
    state = state_of(http)
    check_model(http.match_info["model"], state.engine.model)
    return json_response(_model(state))


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.engine.model,
        "object": "model",
        "created": state.created,
        "owned_by": "engine",
        "max_model_len": state.engine.max_len,
    }
