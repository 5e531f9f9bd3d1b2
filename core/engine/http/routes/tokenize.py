"""``POST /tokenize``"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from engine.http.incoming import client_of, entered, state_of
from engine.service.engines import EngineHandle
from engine.service.logprobs import token_name
from engine.service.parsing import ParsedTokenize
from engine.service.prepare import encode_conversation, encode_text


async def tokenize(http: web.Request) -> web.StreamResponse:
    """``prompt`` or ``messages`` to ``{count, max_model_len, tokens, token_strs}``."""
    state, client = state_of(http), client_of(http)
    engine = state.engine
    state.admission.gate(client)
    async with state.bodies.read(http) as body:
        asked = await state.parse(ParsedTokenize, body)
        body.forget()
        with entered(http, None, 1):
            if asked.conversation is not None:
                tokens = await encode_conversation(engine, client, asked.conversation)
            else:
                tokens = await encode_text(
                    engine, client, asked.text or "", add_special_tokens=asked.add_special_tokens, fits=False
                )
            data = await asyncio.to_thread(_answer, engine, tokens)
    return web.Response(body=data, content_type="application/json")


def _answer(engine: EngineHandle, tokens: tuple[int, ...]) -> bytes:
    names = [token_name(token, engine.tokenizer.token_bytes) for token in tokens]
    answer = {"count": len(tokens), "max_model_len": engine.max_len, "tokens": tokens, "token_strs": names}
    return msgspec.json.encode(answer)
