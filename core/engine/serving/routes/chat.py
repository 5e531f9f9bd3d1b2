"""``POST /v1/chat/completions``"""

from __future__ import annotations

import time

from aiohttp import web

from engine.serving.answering import answer, now_ms_since
from engine.serving.bodies import read_body
from engine.serving.chat_format import ChatFormat
from engine.serving.preparing import encode_messages, make_job, state_of
from engine.serving.protocol import ChatRequest, decode
from engine.serving.timings import Arrival
from engine.serving.validation import choice_count


async def chat_completions(http: web.Request) -> web.StreamResponse:
    received_s = time.monotonic()
    state = state_of(http)
    state.admission.gate()
    body = await read_body(http, state.settings.max_body_bytes)
    request = decode(body, ChatRequest)
    state.check_model(request.model)
    n = choice_count(request)
    state.admission.check_fan_out(1, n)
    with state.admission.enter(n) as flight:
        begun_s = time.monotonic()
        prompt = await encode_messages(state, request.messages, request.add_generation_prompt)
        arrival = Arrival(received_s, now_ms_since(begun_s))
        job = make_job(state, request, (prompt,), n, body, arrival)
        return await answer(http, state, flight, job, lambda _: ChatFormat(job, state.tokenizer.token_bytes))
