"""``POST /tokenize``"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from engine.http.preparing import client_of, encode_text, encode_turns, state_of
from engine.http.state import ServerState
from engine.service.logprobs import token_name
from engine.service.parsing import ParsedTokenize


async def tokenize(http: web.Request) -> web.StreamResponse:
    """``prompt`` or ``messages`` to ``{count, max_model_len, tokens, token_strs}``."""
    state, client = state_of(http), client_of(http)
    state.admission.gate(client)
    async with state.bodies.read(http) as body:
        asked = await state.parse(ParsedTokenize, body)
        body.forget()
        with state.admission.enter(client, 1):
            if asked.turns is not None:
                tokens = await encode_turns(state, client, asked.turns, asked.add_generation_prompt, asked.variables)
            else:
                tokens = await encode_text(
                    state, client, asked.text or "", add_special_tokens=asked.add_special_tokens, fits=False
                )
            data = await asyncio.to_thread(_answer, state, tokens)
    return web.Response(body=data, content_type="application/json")


def _answer(state: ServerState, tokens: tuple[int, ...]) -> bytes:
    names = [token_name(token, state.tokenizer.token_bytes) for token in tokens]
    answer = {"count": len(tokens), "max_model_len": state.max_len, "tokens": tokens, "token_strs": names}
    return msgspec.json.encode(answer)
