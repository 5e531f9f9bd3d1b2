"""``POST /tokenize``"""

from __future__ import annotations

from aiohttp import web

from engine.serving.bodies import json_response, read_body
from engine.serving.errors import bad_request
from engine.serving.logprobs import token_name
from engine.serving.preparing import encode_messages, encode_text, state_of
from engine.serving.protocol import TokenizeRequest, decode


async def tokenize(http: web.Request) -> web.StreamResponse:
    """``prompt`` or ``messages`` to ``{count, max_model_len, tokens, token_strs}``."""
    state = state_of(http)
    request = decode(await read_body(http, state.settings.max_body_bytes), TokenizeRequest)
    state.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("Expected either prompt or messages.", "prompt")
    if request.messages is not None:
        tokens = await encode_messages(state, request.messages, request.add_generation_prompt)
    else:
        special = request.add_special_tokens is not False
        tokens = await encode_text(state, request.prompt or "", add_special_tokens=special)
    names = [token_name(token, state.tokenizer.token_bytes) for token in tokens]
    return json_response({"count": len(tokens), "max_model_len": state.max_len, "tokens": tokens, "token_strs": names})
