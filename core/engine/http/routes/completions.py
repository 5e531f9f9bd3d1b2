"""``POST /v1/completions``"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from aiohttp import web

from engine.http.answering import answer
from engine.http.completion_format import CompletionFormat
from engine.http.preparing import arrival_of, client_of, encode_text, make_job, state_of
from engine.http.state import ServerState
from engine.service.parsing import Packed, ParsedCompletion, unpack
from engine.service.validation import choice_count


async def completions(http: web.Request) -> web.StreamResponse:
    received_s = time.monotonic()
    state = state_of(http)
    state.admission.gate(client_of(http))
    async with state.bodies.read(http) as body:
        completion = await state.parse(ParsedCompletion, body)
        parsed_s = time.monotonic()
        options, n, prompts = completion.options, choice_count(completion.options), completion.prompts
        client = client_of(http, options.user)
        with state.admission.enter(client, len(prompts) * n) as flight:
            tokens = tuple([await _tokens(state, client, prompt) for prompt in prompts])
            texts = await _echo_texts(state, client, prompts, tokens) if options.echo else ()
            arrival = arrival_of(http, received_s, parsed_s)
            job = make_job(state, options, tokens, n, body, client, arrival)
            return await answer(
                http, state, flight, job, lambda runs: CompletionFormat(job, runs, state.tokenizer, texts)
            )


async def _tokens(state: ServerState, client: str, prompt: str | Packed) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await encode_text(state, client, prompt)
    await asyncio.sleep(0)  # others get their turn between prompts that may be long
    return unpack(prompt)


async def _echo_texts(
    state: ServerState, client: str, prompts: Sequence[str | Packed], tokens: Sequence[tuple[int, ...]]
) -> tuple[str, ...]:
    return tuple(
        [
            prompt
            if isinstance(prompt, str)
            else await state.tokenizer.decode(ids, skip_special_tokens=True, client=client)
            for prompt, ids in zip(prompts, tokens)
        ]
    )
