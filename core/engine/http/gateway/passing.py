"""The way of a request through a gateway: read, placed, passed on to one target after another until one has begun."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import aiohttp
import msgspec
import structlog
from aiohttp import web

from engine.contracts.events import ProxiedEvent
from engine.contracts.request import SamplingParams
from engine.contracts.router import ApiRequest
from engine.http.bodies import Body
from engine.http.compression import accepted
from engine.http.endpoints import Endpoint
from engine.http.errors import HttpError, status_of
from engine.http.format import Format
from engine.http.gateway.probing import headers_for, timeout_of
from engine.http.gateway.reading import NoAnswer, read_at_most
from engine.http.gateway.state import GatewayState, gateway_of
from engine.http.incoming import arrival_of, client_of
from engine.http.middleware import REQUEST_ID
from engine.http.sse import WRITE_TIMEOUT_S, DeferredHeaders
from engine.service.admission import Flight
from engine.service.errors import ApiError, bad_request
from engine.service.load import Share
from engine.service.peek import peek
from engine.service.targets import Target, taking
from engine.service.timings import Arrival

WAIT_S = 15.0
"""How long a request that has begun nowhere waits for a target that comes back."""
POLL_S = 0.05
MOST_BREAKS = 2
"""A request under which so many targets broke off fails: it may be what they died of."""
MOST_ANSWER_BYTES = 256 * 1024 * 1024
"""Of a whole answer, which is held until its last byte has come."""
REFUSAL_S = 5.0
"""What follows an error that begins a stream must come so soon."""
TOO_LONG = "context_length_exceeded"
"""The code of a refusal that a target with a longer context may not repeat."""
PASSED_ON = ("Content-Type", "Retry-After", "Content-Encoding", "Vary")
TAIL_BYTES = 64
"""More than the longest mark of a stream's end."""
COMMENTS = re.compile(rb"(?::[^\n]*\n|\r?\n)+")
"""Whole lines that say only that a target is alive."""
REFUSAL = re.compile(rb'(?::[^\n]*\n|\r?\n)*(?:event: ?error\n|(?:data: ?)?\{"error")')
"""What a stream begins with that is an error and nothing else."""

log = structlog.get_logger("engine.gateway")


async def answer(endpoint: Endpoint[Any], kind: str, http: web.Request) -> web.StreamResponse:
    """Have a target answer."""
    received_s = time.monotonic()
    state = gateway_of(http)
    state.admission.gate(client_of(http))
    async with state.bodies.read(http) as body:
        peeked = peek(body.data, endpoint.prompt, streams=endpoint.streams)
        with state.admission.enter(client_of(http, peeked.user), peeked.n) as flight:
            model, targets = state.serving(peeked.model)
            if peeked.goes_on and len(targets) > 1:
                raise bad_request(
                    "Responses are stored at the target that made them, and this gateway has several; send the whole "
                    "conversation instead.",
                    "previous_response_id",
                )
            api = ApiRequest(
                request_id=http[REQUEST_ID],
                kind=kind,
                model=model,
                prompts=(peeked.prompt,),
                n=peeked.n,
                sampling=SamplingParams(),
                cache_salt=peeked.cache_salt,
                stop=(),
                stream=peeked.stream,
                echo=False,
                fields=peeked.fields,
            )
            asked = Asked(http, state, flight, api, targets, body, endpoint.format)
            del peeked, api  # they hold the prompt
            return await Passing(asked, arrival_of(http, received_s, time.monotonic())).answer()


@dataclass(slots=True)
class Asked:
    """A request, as it came in."""

    http: web.Request
    state: GatewayState
    flight: Flight
    api: ApiRequest
    targets: list[Target]
    """Those that have its model."""
    body: Body
    form: type[Format]

    def forget(self) -> None:
        """It has begun, so it is sent nowhere any more: drop what is large."""
        self.body.release()
        self.api = replace(self.api, prompts=((),))


class Elsewhere(Exception):
    """A target has not begun with the answer, and another one may."""

    def __init__(self, failure: ApiError | web.Response, *, broke: bool = False) -> None:
        """``failure``: what the client is told if there is none. ``broke``: the target may have died of the
        request."""
        super().__init__()
        self.failure = failure
        self.broke = broke


class Passing:
    """One request on its way: a :class:`~engine.service.targets.Sent`."""

    def __init__(self, asked: Asked, arrival: Arrival) -> None:
        self._asked = asked
        self._arrival = arrival
        self._state = asked.state
        self._settings = asked.state.gateway
        self._clock = asyncio.get_running_loop().time
        self._placed = asked.state.place(asked.api, asked.targets)
        self._attempt = 0
        self._tried: set[str] = set()
        self._target: Target | None = None
        self._response: web.StreamResponse | None = None
        """Set once something of it is out."""
        self._has_begun = False
        self._is_whole = False
        """The end of the stream is out: nothing may follow."""
        self._first_ms = 0.0
        self._status = 0
        """As it is counted, once it is known: that of an error event, not of the answer that it ended."""
        self._limit = asyncio.timeout(None)
        self._over: Literal["", "left", "silent", "unread"] = ""
        """Why :attr:`_limit` was made to end."""
        self._last_s = self._clock()
        """When the target or, while it is written to, the client was last seen to get on."""
        self._is_writing = False

    async def answer(self) -> web.StreamResponse:
        try:
            response = await self._answered()
            self._status = self._status or response.status
            return response
        except asyncio.CancelledError:
            failure = self._asked.flight.failure
            if failure is None or self._response is None:
                raise  # the client is gone, or can be told in another way
            self._asked.flight.task.uncancel()
            return await self._failed(failure)
        except ApiError as error:
            self._status = status_of(error)
            if self._response is None:
                raise
            return await self._failed(error)
        except Exception as error:
            self._status = 499 if isinstance(error, ConnectionError) else 500
            raise
        finally:
            self._report(self._status or 499)

    def leave(self) -> None:
        if not self._has_begun and any(other.takes_requests for other in self._others()):
            self._cut("left")

    def check(self, now_s: float) -> None:
        silent_s = now_s - self._last_s
        if self._is_writing and silent_s > WRITE_TIMEOUT_S:
            self._cut("unread")
        elif self._has_begun and not self._is_writing and silent_s > self._settings.silence_s:
            self._cut("silent")

    def _cut(self, why: Literal["left", "silent", "unread"]) -> None:
        if not self._over and not self._limit.expired():
            self._over = why
            self._limit.reschedule(self._clock())

    def _others(self) -> list[Target]:
        return [target for target in self._asked.targets if target is not self._target]

    async def _answered(self) -> web.StreamResponse:
        failure: ApiError | web.Response | None = None
        breaks, waits_until_s = 0, self._clock() + WAIT_S
        while breaks < MOST_BREAKS:
            target = self._next(again=isinstance(failure, ApiError))
            if target is None:
                if isinstance(failure, web.Response) or (failure and self._clock() > waits_until_s):
                    break
                if failure is None:
                    raise _nobody(self._asked.targets)
                await asyncio.sleep(POLL_S)
                continue
            try:
                return await self._at(target)
            except Elsewhere as elsewhere:
                failure = elsewhere.failure
                breaks += elsewhere.broke
                if not elsewhere.broke:
                    waits_until_s = self._clock() + WAIT_S
                log.warning(
                    "request goes elsewhere", target=target.id, why=_why(failure), request_id=self._asked.api.request_id
                )
        assert failure is not None
        return await self._failed(failure)

    def _next(self, *, again: bool) -> Target | None:
        """The target to try: the first that was not tried, in the router's order; with ``again`` also one that was,
        but the last one only where there is no other."""
        order = [self._state.targets[name] for name in self._placed.engines]
        order += [target for target in self._asked.targets if target not in order]
        ready = taking(order)
        new = [target for target in ready if target.id not in self._tried]
        old = sorted(ready, key=lambda target: target is self._target) if again else []
        return next(iter([*new, *old]), None)

    async def _at(self, target: Target) -> web.StreamResponse:
        """The answer of one target. Raises :class:`Elsewhere`, :class:`ApiError`."""
        asked, placed = self._asked, self._placed
        is_first = not self._attempt and target.id == placed.engines[0]
        cached = sum(placed.cached_tokens) if is_first else 0
        share = Share(target.load, len(asked.api.prompts[0]), cached)
        self._attempt += 1
        self._tried.add(target.id)
        self._target, self._over, self._last_s = target, "", self._clock()
        self._limit = asyncio.timeout(self._settings.first_byte_s)
        self._state.placing[asked.api.model].begun(asked.api, target.id)
        try:
            async with self._limit:
                target.sendings.add(self)
                try:
                    return await self._sent(target, share)
                finally:
                    target.sendings.discard(self)  # a limit that is over cannot be changed
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            target.is_down("cannot be reached", lets_go=False)
            target.breaker.failed()
            raise Elsewhere(_unreachable()) from None
        except TimeoutError:
            return await self._broken(target, self._timed_out())
        except (aiohttp.ClientError, ConnectionError) as error:
            if self._is_writing:
                raise ConnectionResetError("the client is gone") from None
            log.warning("target broke off", target=target.id, error=type(error).__name__)
            return await self._broken(target, _no_answer() if isinstance(error, NoAnswer) else _broke_off())
        finally:
            share.end()

    async def _sent(self, target: Target, share: Share) -> web.StreamResponse:
        asked, state = self._asked, self._state
        assert state.session is not None
        stream = asked.api.stream
        # An error event may have to follow in a stream, so that is asked for as it is.
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity" if stream else accepted(asked.http),
            "X-Request-Id": asked.api.request_id,
            **self._arrival.trace.headers(),
            **headers_for(state),
        }
        url, timeout = target.url + asked.http.path, timeout_of(self._settings)
        asking = state.session.post(url, data=asked.body.data, headers=headers, timeout=timeout, allow_redirects=False)
        async with asking as reply:
            if reply.status in (401, 403):
                raise HttpError(502, "A target refused the gateway's key (gateway.key_env).", code="bad_gateway")
            if reply.status != 200 and reply.status < 400:
                raise NoAnswer(f"status {reply.status}")
            coding = reply.headers.get("Content-Encoding", "identity")
            if stream and reply.status == 200:
                if reply.content_type != asked.form.stream_type.partition(";")[0] or coding != "identity":
                    raise NoAnswer(f"no stream, but {reply.content_type} ({coding})")
                return await self._streamed(reply, target, share)
            data = await read_at_most(reply.content, MOST_ANSWER_BYTES)
            whole = self._whole(reply, data)
            if reply.status in (408, 429) or reply.status >= 500:  # another target might answer
                if reply.status != 429:
                    target.breaker.failed()
                raise Elsewhere(whole)
            if reply.status == 400 and _code_of(data) == TOO_LONG:
                self._tried |= {other.id for other in self._others() if not other.may_exceed(target, asked.api.model)}
                raise Elsewhere(whole)
            if reply.status == 200 and coding == "identity" and not _is_object(data):
                raise NoAnswer("no JSON object")
        self._begun(share)
        target.breaker.worked()
        if self._response is not None:
            return await self._failed(whole)
        return whole

    async def _streamed(self, reply: aiohttp.ClientResponse, target: Target, share: Share) -> web.StreamResponse:
        asked = self._asked
        ended, finished, tail, pattern = False, False, b"\n", asked.form.whole_stream
        finish = asked.form.finish if asked.api.n == 1 else None
        async for piece in reply.content.iter_any():
            if not self._has_begun and not COMMENTS.fullmatch(piece):
                if REFUSAL.match(piece):
                    return await self._refused(reply, target, piece)
                self._begun(share)
            if not ended:
                seen = tail + piece
                ended, tail = pattern.search(seen) is not None, seen[-TAIL_BYTES:]
                finished = finished or (finish is not None and finish.search(seen) is not None)
            if self._response is None:
                self._response = self._head(reply)
                await self._response.prepare(asked.http)
            await self._write(piece)
            self._is_whole = ended
        if not ended and not finished:
            raise aiohttp.ClientPayloadError("the stream ends too soon")
        self._is_whole = True
        target.breaker.worked()
        return await self._ended()

    def _begun(self, share: Share) -> None:
        """The first of an answer has come: it is this target's from here on."""
        self._has_begun, self._over = True, ""  # it cannot leave any more
        self._limit.reschedule(None)
        self._first_ms = self._since_ms()
        self._asked.forget()
        share.took(1)

    async def _ended(self, last: bytes = b"") -> web.StreamResponse:
        """The end of what is out. Raises ``ConnectionError`` when the client is gone or stuck."""
        assert self._response is not None
        self._last_s, self._is_writing = self._clock(), True
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._response.write_eof(last)
        except TimeoutError:
            raise _unread() from None
        return self._response

    async def _refused(self, reply: aiohttp.ClientResponse, target: Target, piece: bytes) -> web.StreamResponse:
        """A stream that begins with an error. Raises :class:`Elsewhere` unless that is the request's own."""
        self._limit.reschedule(self._clock() + REFUSAL_S)
        refusal = self._whole(reply, piece + await read_at_most(reply.content, MOST_ANSWER_BYTES))
        if b'"invalid_request_error"' not in _body_of(refusal):
            target.breaker.failed()
            raise Elsewhere(refusal)
        target.breaker.worked()
        self._status = 400
        return await self._failed(refusal)

    async def _write(self, piece: bytes) -> None:
        assert self._response is not None
        self._last_s, self._is_writing = self._clock(), True
        await self._response.write(piece)
        self._last_s, self._is_writing = self._clock(), False

    async def _broken(self, target: Target, failure: ApiError) -> web.StreamResponse:
        """A target broke off. Raises :class:`Elsewhere` where it had not begun."""
        if self._over == "left":
            raise Elsewhere(failure)
        if self._over == "unread":
            raise _unread()
        if self._is_whole:  # what it does afterwards is no news
            return await self._ended()
        target.breaker.failed()
        if not self._has_begun:
            raise Elsewhere(failure, broke=True)
        return await self._failed(failure)

    async def _failed(self, failure: ApiError | web.Response) -> web.StreamResponse:
        """The end of a request that failed: as an event where a part of the answer, or a comment, is out."""
        if isinstance(failure, web.Response) and failure.status == 200:  # events that are a refusal
            self._status = self._status or 502
        if self._response is None:
            if isinstance(failure, web.Response):
                return failure
            raise failure
        return await self._ended(b"" if self._is_whole else self._ending(failure))

    def _ending(self, failure: ApiError | web.Response) -> bytes:
        """Of a stream that failed."""
        if isinstance(failure, web.Response):
            if failure.status == 200:
                return _body_of(failure)
            failure = HttpError(502, f"The server this request moved to answered {failure.status}.", code="bad_gateway")
        self._status = status_of(failure)
        return self._asked.form.gap + self._asked.form.broken(failure)

    def _timed_out(self) -> ApiError:
        if self._over == "silent":
            return HttpError(504, "The server that answers this request fell silent.", code="target_silent")
        return HttpError(504, "No server began to answer this request in time.", code="target_timeout")

    def _head(self, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache", **self._headers(reply)}
        return DeferredHeaders(status=reply.status, headers=headers)

    def _whole(self, reply: aiohttp.ClientResponse, data: bytes) -> web.Response:
        return web.Response(status=reply.status, body=data, headers=self._headers(reply))

    def _headers(self, reply: aiohttp.ClientResponse) -> dict[str, str]:
        """Of the target's, and which target it is."""
        assert self._target is not None
        found = {name: reply.headers.get(name, "") for name in PASSED_ON}
        found |= {"X-Target": self._target.id, "X-Attempt": str(self._attempt)}
        if self._attempt == 1:
            found["X-Route-Reason"] = " ".join(self._placed.reason.split())  # a header is one line
        return {name: value for name, value in found.items() if value and value.isprintable()}  # others cannot be sent

    def _since_ms(self) -> float:
        return (time.monotonic() - self._arrival.received_s) * 1e3

    def _report(self, status: int) -> None:
        api, trace, target = self._asked.api, self._arrival.trace, self._target
        ended = ProxiedEvent(
            time.monotonic(),
            api.request_id,
            api.kind,
            "" if target is None else target.id,
            status,
            self._since_ms(),
            trace.parent,
            trace.span_id,
            self._first_ms,
            self._attempt,
        )
        self._state.bus.publish((ended,))


def _body_of(response: web.Response) -> bytes:
    assert isinstance(response.body, bytes)
    return response.body


def _is_object(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _code_of(data: bytes) -> object:
    """The code of an error, if that is one with a code."""
    try:
        return msgspec.json.decode(data)["error"]["code"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return None


def _why(failure: ApiError | web.Response) -> str:
    return f"status {failure.status}" if isinstance(failure, web.Response) else str(failure.code)


def _nobody(targets: list[Target]) -> ApiError:
    reasons = ", ".join(f"{target.id}: {target.why_not}" for target in targets)
    return ApiError("unavailable", f"No target takes requests ({reasons}).", code="not_ready", retry_after_s=2)


def _unread() -> ConnectionError:
    return ConnectionResetError("the client does not read its stream")


def _unreachable() -> ApiError:
    return HttpError(502, "The server for this request cannot be reached.", code="bad_gateway")


def _broke_off() -> ApiError:
    return HttpError(502, "The server broke off while it answered this request.", code="bad_gateway")


def _no_answer() -> ApiError:
    return HttpError(502, "The server answered this request with what is no answer.", code="bad_gateway")
