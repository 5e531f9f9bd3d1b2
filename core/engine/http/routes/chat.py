"""``POST /v1/chat/completions``"""

from __future__ import annotations

import time

from aiohttp import web

from engine.http.answering import answer
from engine.http.chat_format import ChatFormat
from engine.http.preparing import arrival_of, client_of, encode_turns, make_job, state_of
from engine.service.parsing import ParsedChat
from engine.service.validation import choice_count


async def chat_completions(http: web.Request) -> web.StreamResponse:
    received_s = time.monotonic()
    state = state_of(http)
    state.admission.gate(client_of(http))
    async with state.bodies.read(http) as body:
        chat = await state.parse(ParsedChat, body)
        parsed_s = time.monotonic()
        options, n = chat.options, choice_count(chat.options)
        client = client_of(http, options.user)
        with state.admission.enter(client, n) as flight:
            prompt = await encode_turns(
                state, client, chat.turns, options.add_generation_prompt is not False, chat.variables
            )
            arrival = arrival_of(http, received_s, parsed_s)
            job = make_job(state, options, (prompt,), n, body, client, arrival)
            token_bytes = state.tokenizer.token_bytes
            return await answer(http, state, flight, job, lambda runs: ChatFormat(job, runs, token_bytes))
