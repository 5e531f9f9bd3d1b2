"""``POST /detokenize``"""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import client_of, entered, state_of
from engine.service.parsing import ParsedDetokenize, unpack


async def detokenize(http: web.Request) -> web.StreamResponse:
    """``tokens`` to ``{prompt}``, special tokens spelled out."""
    state, client = state_of(http), client_of(http)
    state.admission.gate(client)
    async with state.bodies.read(http) as body:
        asked = await state.parse(ParsedDetokenize, body)
        body.forget()
        with entered(http, None, 1):
            return json_response({"prompt": await state.engine.tokenizer.decode(unpack(asked.tokens), client=client)})
