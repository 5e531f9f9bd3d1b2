"""The common way of chat and completion requests: route, generate, deliver whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import structlog
from aiohttp import web

from engine.contracts.events import ProxiedEvent, RequestParameters
from engine.contracts.exporter import Transcript
from engine.contracts.request import EngineRequest, SamplingParams
from engine.contracts.router import Answer, ApiRequest, Reject, Route, ToEngine, ToUrl
from engine.http import proxy
from engine.http.bodies import Body
from engine.http.progress import PrefillProgress
from engine.http.sse import EventStream
from engine.http.state import ENGINE_ID, ServerState
from engine.loop.client import EngineDead, OutputStream
from engine.plugin_guard.calls import contract_error, describe_error, name_of, quote
from engine.plugin_guard.values import problems
from engine.service.admission import Flight
from engine.service.errors import ApiError, engine_died
from engine.service.generation import Delta, RunSpec, SequenceRun, merge
from engine.service.output_text import OutputText
from engine.service.protocol import ChatOptions, CompletionOptions
from engine.service.replay import choice_problem, replayed
from engine.service.timings import Arrival
from engine.service.validation import choice_seed, num_echoed

ABORTED_S = 5.0
"""How long the places of an aborted request may stay taken, waiting for the engine."""
LARGE_ANSWER = 1024
"""An answer with the log probabilities of more prompt tokens is not written on the event loop's thread."""
LONGEST_RETRY_S = 24 * 3600
"""That a router may ask a client to wait."""
SLOW_ROUTER_MS = 50.0
"""A router that takes longer over a request is reported: nothing else happens on the event loop meanwhile."""

log = structlog.get_logger("engine.answering")
encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Job:
    """One API request, validated and tokenized."""

    api: ApiRequest
    request: ChatOptions | CompletionOptions
    body: Body
    """As received, for a proxy."""
    arrival: Arrival
    client: str
    """Who sent it; clients take turns."""
    created: int
    fingerprint: str

    @property
    def include_usage(self) -> bool:
        options = self.request.stream_options
        return bool(options and options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        options = self.request.stream_options
        return bool(options and options.continuous_usage_stats)


class Format(Protocol):
    """How an endpoint writes its answers."""

    def chunks(self, delta: Delta, first: bool) -> list[dict[str, Any]]:
        """The stream chunks for new output of a choice; ``first``: nothing of this choice was sent before."""
        ...

    def whole(self, outputs: Sequence[Delta]) -> dict[str, Any]:
        """The answer to a request that is not streamed; one complete delta per choice."""
        ...

    def last_chunk(self) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""
        ...


def request_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


async def answer(
    http: web.Request,
    state: ServerState,
    flight: Flight,
    job: Job,
    make_format: Callable[[Sequence[SequenceRun]], Format],
) -> web.StreamResponse:
    """Serve a validated request wherever the router sends it."""
    route = _decide(state, job.api)
    if isinstance(route, Reject):
        raise ApiError(route.status, route.message, code="rejected", retry_after_s=route.retry_after_s)
    if isinstance(route, ToUrl):
        return await _proxied(http, state, flight, job, route.base_url)
    job.body.release()
    runs: list[SequenceRun] = []
    events = EventStream(http, state.settings.keepalive_s)
    try:
        _start(state, job, route, runs)
        if job.api.stream:
            response = await _stream(events, flight, job, runs, make_format(runs), state.prefill)
        else:
            response = await _whole(job, runs, make_format(runs))
    except BaseException:
        await _abort(runs)
        raise
    finally:
        for run in runs:
            run.close()
            if state.bus.wants_transcripts:
                state.bus.transcribe(_transcript(job.api, run))
            run.report(events.written)
    if all(run.finish_reason is not None for run in runs):
        _report(state, job.api, runs)
    return response


async def _proxied(
    http: web.Request, state: ServerState, flight: Flight, job: Job, base_url: str
) -> web.StreamResponse:
    arrival, status = job.arrival, 499
    try:
        response = await proxy.forward(http, state, flight, base_url, job.body.data, job.api.stream, arrival.trace)
        status = response.status
        return response
    except ApiError as error:
        status = error.status
        raise
    except Exception as error:
        status = 499 if isinstance(error, ConnectionError) else 500
        raise
    finally:
        now_s, trace = time.monotonic(), arrival.trace
        total_ms = (now_s - arrival.received_s) * 1e3
        name, kind, server = job.api.request_id, job.api.kind, urlsplit(base_url).netloc.rpartition("@")[2]
        event = ProxiedEvent(now_s, name, kind, server, status, total_ms, trace.parent, trace.span_id)
        state.bus.publish((event,))


def _transcript(api: ApiRequest, run: SequenceRun) -> Transcript:
    return Transcript(run.spec.request_id, api.prompts[run.spec.index // api.n], run.tokens, api.cache_salt)


async def _abort(runs: Sequence[SequenceRun]) -> None:
    """End what a client left behind. Its places in the queue are taken until the engine knows: clients who come and go
    at once cannot send the engine more than that."""
    for run in runs:
        run.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORTED_S):
            for run in runs:
                await run.gone()


def _decide(state: ServerState, api: ApiRequest) -> Route:
    begun_s = time.monotonic()
    try:
        route = state.router.route(api, state.fleet())
    except Exception as error:
        # A router is foreign code; its failure is this request's failure and nobody else's.
        state.router_failures.warning(
            error=describe_error(error, state.router, "route"), request_id=api.request_id, exc_info=error
        )
        raise ApiError(500, "The router failed on this request.", code="router_failed") from None
    if (ms := now_ms_since(begun_s)) > SLOW_ROUTER_MS:
        log.warning("router blocked the server", router=name_of(state.router), ms=round(ms), request_id=api.request_id)
    wrong = route_problem(route, len(api.prompts) * api.n)
    if wrong:
        said = str(contract_error(state.router, "route", wrong))
        state.router_failures.warning(error=said, request_id=api.request_id)
        raise ApiError(500, "The router failed on this request.", code="router_failed")
    return route


def _is_url(text: str) -> bool:
    try:
        found = urlsplit(text)
        return found.scheme in ("http", "https") and bool(found.hostname) and (found.port or 1) > 0
    except ValueError:
        return False


def route_problem(route: object, num_choices: int) -> str:
    """Why this is no route for a request of so many choices; empty if it is one."""
    wrong = next(problems(route, Route, "a route"), "")
    if wrong:
        return f"returned what is no route: {wrong}"
    if isinstance(route, ToEngine) and route.engine_id != ENGINE_ID:
        return f"returned {quote(route)}, expected an engine of the fleet: {ENGINE_ID!r}"
    if isinstance(route, Reject) and route.status not in range(400, 600):
        return f"returned {quote(route)}, expected a status from 400 to 599"
    if isinstance(route, Reject) and not 0 <= (route.retry_after_s or 0) <= LONGEST_RETRY_S:
        return f"returned {quote(route)}, expected retry_after_s from 0 to {LONGEST_RETRY_S}"
    if isinstance(route, ToUrl) and not _is_url(route.base_url):
        return f"returned {quote(route)}, expected an http or https URL"
    if isinstance(route, Answer) and len(route.choices) != num_choices:
        return f"returned an answer of {len(route.choices)} choices, expected {num_choices}"
    if isinstance(route, Answer):
        return next(filter(None, map(choice_problem, route.choices)), "")
    return ""


def _report(state: ServerState, api: ApiRequest, runs: Sequence[SequenceRun]) -> None:
    try:
        state.router.finished(api, Answer(tuple(run.record() for run in runs)))
    except Exception as error:
        # The client has its answer already; a router that cannot take notes is only reported.
        state.router_failures.warning(
            error=describe_error(error, state.router, "finished"), request_id=api.request_id, exc_info=error
        )


def _start(state: ServerState, job: Job, route: ToEngine | Answer, runs: list[SequenceRun]) -> None:
    """Fill ``runs``, which the caller closes: whatever goes wrong on the way, none of them runs on for nobody."""
    api = job.api
    if isinstance(route, ToEngine):
        state.check_engine()
    try:
        for index in range(len(api.prompts) * api.n):
            prompt = api.prompts[index // api.n]
            # Every sequence runs under an id made here; ids that a client sends are only echoed.
            name = f"{api.request_id}-{index}"
            sampling = _sampling(api, prompt, index % api.n, state.max_len)
            stream: OutputStream
            sent_s = time.monotonic()
            if isinstance(route, Answer):
                stream = replayed(name, route.choices[index])
            else:
                stream = state.client.submit(_engine_request(job, name, prompt, sampling))
                state.prompts.add(name, prompt, api.cache_salt)
            runs.append(_run(state, job, index, name, prompt, sampling, stream, sent_s))
    except EngineDead as dead:
        raise engine_died(dead.cause) from None


def _sampling(api: ApiRequest, prompt: tuple[int, ...], choice: int, max_len: int) -> SamplingParams:
    """The parameters of one choice: its own seed, and no more tokens than its own prompt leaves room for."""
    return msgspec.structs.replace(
        api.sampling,
        seed=choice_seed(api.sampling.seed, choice),
        max_tokens=min(api.sampling.max_tokens, max_len - len(prompt)),
    )


def _engine_request(job: Job, name: str, prompt: tuple[int, ...], sampling: SamplingParams) -> EngineRequest:
    return EngineRequest(
        name,
        prompt,
        sampling,
        priority=job.request.priority or 0,
        cache_salt=job.api.cache_salt,
        client=job.client,
        group=job.api.request_id if len(job.api.prompts) * job.api.n > 1 else "",
    )


def _run(
    state: ServerState,
    job: Job,
    index: int,
    name: str,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    stream: OutputStream,
    sent_s: float,
) -> SequenceRun:
    spec = RunSpec(
        index=index,
        request_id=name,
        prompt_tokens=len(prompt),
        max_tokens=sampling.max_tokens,
        logprobs=sampling.logprobs is not None,
        sent_s=sent_s,
        parameters=_parameters(job.api, sampling),
    )
    text = OutputText(
        state.tokenizer,
        prompt,
        job.api.stop,
        include_stop=bool(job.request.include_stop_str_in_output),
        skip_special_tokens=job.request.skip_special_tokens is not False,
        min_tokens=sampling.min_tokens,
    )
    return SequenceRun(spec, stream, text, job.arrival, state.bus.publish)


def _parameters(api: ApiRequest, sampling: SamplingParams) -> RequestParameters:
    return RequestParameters(
        api.kind, api.stream, api.n, sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed
    )


async def _whole(job: Job, runs: Sequence[SequenceRun], form: Format) -> web.StreamResponse:
    collected: list[list[Delta]] = [[] for _ in runs]
    async with aclosing(merge(runs)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            collected[delta.index].append(delta)

    def written() -> bytes:
        body = form.whole([_joined(deltas) for deltas in collected])
        return encode(body | {"usage": usage(job.api, runs), "timings": timings(runs)})

    is_large = job.api.sampling.prompt_logprobs is not None and num_echoed(job.api) > LARGE_ANSWER
    data = await asyncio.to_thread(written) if is_large else written()
    return web.Response(body=data, content_type="application/json")


async def _stream(
    events: EventStream,
    flight: Flight,
    job: Job,
    runs: Sequence[SequenceRun],
    form: Format,
    prefill: PrefillProgress,
) -> web.StreamResponse:
    async with events, contextlib.AsyncExitStack() as shown:
        try:
            if job.request.return_progress and len(runs) == 1:
                await shown.enter_async_context(prefill.shown(events.write, runs[0], form.last_chunk))
            return await _stream_deltas(events, job, runs, form)
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
            failure = ApiError(500, "The server failed on this request.", code="internal_error")
        if not events.started:
            raise failure
        log.warning("stream ended with an error", code=failure.code, request_id=job.api.request_id)
        return await events.fail(failure)


async def _stream_deltas(
    events: EventStream, job: Job, runs: Sequence[SequenceRun], form: Format
) -> web.StreamResponse:
    begun: set[int] = set()
    unfinished = len(runs)
    async with aclosing(merge(runs)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            chunks = form.chunks(delta, delta.index not in begun)
            begun.add(delta.index)
            if delta.finish_reason is not None:
                unfinished -= 1
                if unfinished == 0:
                    chunks[-1]["timings"] = timings(runs)
            _add_usage(chunks, job, runs)
            if unfinished:
                await events.write(*map(encode, chunks))
    if job.include_usage:
        chunks.append(form.last_chunk() | {"usage": usage(job.api, runs), "timings": timings(runs)})
    return await events.finish(*map(encode, chunks))


def _add_usage(chunks: list[dict[str, Any]], job: Job, runs: Sequence[SequenceRun]) -> None:
    if job.usage_in_every_chunk:
        for chunk in chunks:
            chunk["usage"] = usage(job.api, runs)
    elif job.include_usage:
        for chunk in chunks:
            chunk["usage"] = None


def _joined(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        deltas[-1].index,
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        deltas[-1].finish_reason,
    )


def usage(api: ApiRequest, runs: Sequence[SequenceRun]) -> dict[str, Any]:
    """Token counts. Each prompt counts once, however many choices it has; so do its cached tokens."""
    prompt = sum(map(len, api.prompts))
    completion = sum(len(run.tokens) for run in runs)
    cached = sum(run.account.engine.cached_tokens for run in runs[:: api.n] if run.account)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings(runs: Sequence[SequenceRun]) -> dict[str, Any]:
    """The account of the choice that took longest: it is the one the client waited for."""
    accounts = [run.account for run in runs if run.account is not None]
    return max(accounts, key=lambda account: account.total_ms).public()


def now_ms_since(begun_s: float) -> float:
    return (time.monotonic() - begun_s) * 1e3
