"""What Ollama's clients ask besides: ``GET /api/version``, ``/api/tags``, ``/api/ps`` and ``POST /api/show``"""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.state import ServerState
from engine.service.errors import bad_request
from engine.service.ollama_request import DEFAULT_TAG
from engine.service.parsing import check_model
from engine.service.reasoning import reasoning_syntax_of


class ShowRequest(msgspec.Struct):
    model: str | None = None
    name: str | None = None
    """The older name of ``model``."""


async def api_version(http: web.Request) -> web.StreamResponse:
    return json_response({"version": state_of(http).engine.plan.engine_version})


async def tags(http: web.Request) -> web.StreamResponse:
    return json_response({"models": [_model(state_of(http))]})


async def ps(http: web.Request) -> web.StreamResponse:
    """The model that is loaded: the one there is."""
    state = state_of(http)
    return json_response({"models": [_model(state) | {"context_length": state.engine.max_len}]})


async def show(http: web.Request) -> web.StreamResponse:
    state = state_of(http)
    async with state.bodies.read(http) as body:
        try:
            asked = msgspec.json.decode(body.data, type=ShowRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_request(f"The request body is not valid: {error}.") from None
    check_model((asked.model or asked.name or "").removesuffix(DEFAULT_TAG), state.engine.model)
    tokenizer = state.engine.tokenizer
    text = "" if tokenizer.template is None else tokenizer.template.source.text
    can = {"tools": tokenizer.call_syntax is not None, "thinking": reasoning_syntax_of(text) is not None}
    family = _family(state)
    return json_response({
        "template": text,
        "details": _details(state),
        "model_info": {"general.architecture": family, f"{family}.context_length": state.engine.max_len},
        "capabilities": ["completion", *(name for name, has in can.items() if has)],
        "modified_at": _since(state),
    })  # fmt: skip


def _model(state: ServerState) -> dict[str, Any]:
    name = state.engine.model
    digest = state.engine.fingerprint.removeprefix("fp_")
    about = {"name": name, "model": name, "modified_at": _since(state), "size": 0, "digest": digest}
    return about | {"details": _details(state)}


def _details(state: ServerState) -> dict[str, Any]:
    family = _family(state)
    return {
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": ", ".join([choice.name for choice in state.engine.plan.slots.get("quantizer", ())]),
    }


def _family(state: ServerState) -> str:
    return str(state.engine.plan.model.raw.get("model_type", ""))


def _since(state: ServerState) -> str:
    return datetime.datetime.fromtimestamp(state.created, datetime.UTC).isoformat()
