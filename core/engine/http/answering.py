"""The way of every request that generates: read, prepare, route, and deliver whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable
from typing import Any

import structlog
from aiohttp import web

from engine.contracts.router import ToUrl
from engine.http import conversations, proxy
from engine.http.conversations import Storing
from engine.http.endpoints import Endpoint
from engine.http.format import Format
from engine.http.incoming import arrival_of, caller_of, client_of, entered, promise_of, state_of
from engine.http.progress import PrefillProgress
from engine.http.sse import EventStream
from engine.service.admission import Flight
from engine.service.errors import ApiError
from engine.service.job import Job
from engine.service.output import Delta, joined
from engine.service.prepare import checked_shape, make_job
from engine.service.rewriting import rewritten
from engine.service.validation import num_echoed

LARGE_ANSWER = 1024
"""An answer with the log probabilities of more prompt tokens is not written on the event loop's thread."""

log = structlog.get_logger("engine.answering")


async def answer(endpoint: Endpoint[Any], http: web.Request) -> web.StreamResponse:
    """Serve a request wherever the router sends it."""
    received_s = time.monotonic()
    state = state_of(http)
    engine = state.engine
    promised = promise_of(http)
    state.admission.gate(client_of(http), promised.name if promised is not None else "")
    async with state.bodies.read(http) as body:
        parsed, storing = await conversations.read(endpoint.request, http, body)
        parsed_s = time.monotonic()
        options = parsed.options
        if (data := endpoint.format.at_once(engine.model, options)) is not None:
            engine.check()
            return web.Response(body=data, content_type="application/json")
        client = client_of(http, options.user)
        with entered(http, options.user, parsed.num_prompts * options.num_choices()) as flight:
            prompts = await endpoint.prompts(engine, client, parsed)
            shape = await checked_shape(engine, options)
            arrival, caller = arrival_of(http, received_s, parsed_s), caller_of(http)
            job = make_job(engine, options, prompts, client, arrival, shape, caller, promised)
            await state.scaler.until_up()
            route = state.dispatcher.place(job.api)
            if isinstance(route, ToUrl):
                data = endpoint.passed_on(body.data)
                if caller is not None:
                    data = rewritten(data, {"cache_salt": job.api.cache_salt})
                return await proxy.answer(http, state, flight, job, route.base_url, data, endpoint.format)
            body.release(keeping=len(storing.items) if storing is not None else 0)
            events = EventStream(http, state.settings.keepalive_s, endpoint.format.stream_type)
            async with state.dispatcher.generate(job, route, lambda: events.written) as generation:
                form = endpoint.format(job, engine.tokenizer, generation)
                if job.api.stream:
                    return await _stream(events, flight, job, generation, form, state.prefill, storing)
                return await _whole(job, generation, form, storing)


async def whole(job: Job, deltas: AsyncIterable[Delta], form: Format) -> bytes:
    """The answer to a request that is not streamed. Raises :class:`ApiError`."""
    collected: list[list[Delta]] = [[] for _ in range(job.num_sequences)]
    async for delta in deltas:
        collected[delta.index].append(delta)

    def written() -> bytes:
        return form.whole([joined(each) for each in collected])

    is_large = job.api.sampling.prompt_logprobs is not None and num_echoed(job.api) > LARGE_ANSWER
    return await asyncio.to_thread(written) if is_large else written()


async def _whole(job: Job, deltas: AsyncIterable[Delta], form: Format, storing: Storing | None) -> web.StreamResponse:
    data = await whole(job, deltas, form)
    if storing is not None:
        storing.keep(form.record())
    return web.Response(body=data, content_type="application/json")


async def _stream(
    events: EventStream,
    flight: Flight,
    job: Job,
    deltas: AsyncIterable[Delta],
    form: Format,
    prefill: PrefillProgress,
    storing: Storing | None,
) -> web.StreamResponse:
    async with events, contextlib.AsyncExitStack() as shown:
        try:
            if job.options.return_progress and job.num_sequences == 1:
                await shown.enter_async_context(prefill.shown(events.write, job, form.progress))
            unfinished = job.num_sequences
            async for delta in deltas:
                data = form.events(delta)
                unfinished -= delta.finish_reason is not None
                if not unfinished:
                    if storing is not None:  # before a client that has read the end goes on from it
                        storing.keep(form.record())
                    return await events.finish(data + form.ending())
                await events.write(data)
        except ApiError as error:
            failure = error
        except asyncio.CancelledError:
            if flight.failure is None:
                raise  # the client is gone
            flight.task.uncancel()
            failure = flight.failure
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            # Whatever went wrong, a stream must not end as if it were complete.
            log.error("stream failed", error=type(error).__name__, request_id=job.api.request_id)
            failure = ApiError("failed", "The server failed on this request.", code="internal_error")
        if not events.started:
            raise failure
        log.warning("stream ended with an error", code=failure.code, request_id=job.api.request_id)
        return await events.finish(form.failure(failure))
