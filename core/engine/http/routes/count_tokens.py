"""``POST /v1/messages/count_tokens``"""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import client_of, entered, state_of
from engine.service.parsing import ParsedCount
from engine.service.prepare import encode_conversation


async def count_tokens(http: web.Request) -> web.StreamResponse:
    """The tokens of a prompt, as ``{input_tokens}``."""
    state, client = state_of(http), client_of(http)
    state.admission.gate(client)
    async with state.bodies.read(http) as body:
        asked = await state.parse(ParsedCount, body)
        body.forget()
        with entered(http, None, 1):
            tokens = await encode_conversation(state.engine, client, asked.conversation)
    return json_response({"input_tokens": len(tokens)})
