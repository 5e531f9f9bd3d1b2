"""``POST /detokenize``"""

from __future__ import annotations

from aiohttp import web

from engine.serving.bodies import json_response, read_body
from engine.serving.preparing import state_of
from engine.serving.protocol import DetokenizeRequest, decode
from engine.serving.validation import check_token_ids


async def detokenize(http: web.Request) -> web.StreamResponse:
    """``tokens`` to ``{prompt}``, special tokens spelled out."""
    state = state_of(http)
    request = decode(await read_body(http, state.settings.max_body_bytes), DetokenizeRequest)
    state.check_model(request.model)
    tokens = check_token_ids(tuple(request.tokens), state.vocab_size, "tokens")
    return json_response({"prompt": await state.tokenizer.decode(tokens)})
