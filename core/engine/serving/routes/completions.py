"""``POST /v1/completions``"""

from __future__ import annotations

import time
from collections.abc import Sequence

from aiohttp import web

from engine.serving.answering import answer, now_ms_since
from engine.serving.bodies import read_body
from engine.serving.completion_format import CompletionFormat
from engine.serving.preparing import encode_text, make_job, state_of
from engine.serving.protocol import CompletionRequest, decode
from engine.serving.state import ServerState
from engine.serving.timings import Arrival
from engine.serving.validation import Prompt, check_token_ids, choice_count, split_prompts


async def completions(http: web.Request) -> web.StreamResponse:
    received_s = time.monotonic()
    state = state_of(http)
    state.admission.gate()
    body = await read_body(http, state.settings.max_body_bytes)
    request = decode(body, CompletionRequest)
    state.check_model(request.model)
    n = choice_count(request)
    prompts = split_prompts(request.prompt)
    state.admission.check_fan_out(len(prompts), n)
    with state.admission.enter(len(prompts) * n) as flight:
        begun_s = time.monotonic()
        tokens = tuple([await _tokens(state, prompt) for prompt in prompts])
        texts = await _echo_texts(state, prompts) if request.echo else ()
        arrival = Arrival(received_s, now_ms_since(begun_s))
        job = make_job(state, request, tokens, n, body, arrival)
        return await answer(http, state, flight, job, lambda runs: CompletionFormat(job, runs, state.tokenizer, texts))


async def _tokens(state: ServerState, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await encode_text(state, prompt)
    return check_token_ids(prompt, state.vocab_size)


async def _echo_texts(state: ServerState, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    return tuple(
        [
            prompt if isinstance(prompt, str) else await state.tokenizer.decode(prompt, skip_special_tokens=True)
            for prompt in prompts
        ]
    )
