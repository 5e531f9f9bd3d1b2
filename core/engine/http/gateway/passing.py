"""The way of a request through a gateway: passed on to one target after another until one has begun."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Literal

import aiohttp
import structlog
from aiohttp import web

from engine.contracts.events import ProxiedEvent
from engine.http.compression import accepted
from engine.http.errors import HttpError, status_of
from engine.http.gateway import failures
from engine.http.gateway.asked import Asked
from engine.http.gateway.failures import Elsewhere, Failure
from engine.http.gateway.probing import headers_for, timeout_of
from engine.http.gateway.reading import COMMENTS, NoAnswer, read_at_most
from engine.http.gateway.usage import Usage, UsageReader, cost_of, usage_of
from engine.http.sse import WRITE_TIMEOUT_S, DeferredHeaders
from engine.service.attempts import Attempt, Order
from engine.service.errors import ApiError
from engine.service.load import Share
from engine.service.promises import HEADER
from engine.service.targets import Target
from engine.service.timings import Arrival

WAIT_S = 15.0
"""How long a request that has begun nowhere waits for a target that comes back."""
POLL_S = 0.05
QUICK_S = 5.0
"""A target that took longer to fail is not tried once more before another model."""
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
REFUSAL = re.compile(rb'(?::[^\n]*\n|\r?\n)*(?:event: ?error\n|(?:data: ?)?\{\s*"error"\s*:\s*[{"])')
"""What a stream begins with that is an error and nothing else."""

log = structlog.get_logger("engine.gateway")


class Passing:
    """One request on its way: a :class:`~engine.service.targets.Sent`."""

    def __init__(self, asked: Asked, order: Order, arrival: Arrival) -> None:
        self._asked = asked
        self._order = order
        self._arrival = arrival
        self._state = asked.state
        self._settings = asked.state.gateway
        self._clock = asyncio.get_running_loop().time
        self._begun_s = self._clock()
        self._attempt: Attempt | None = None
        """The last one."""
        self._attempts = 0
        self._response: web.StreamResponse | None = None
        """Set once something of it is out."""
        self._has_begun = False
        self._is_whole = False
        """The end of the stream is out: nothing may follow."""
        self._first_ms = 0.0
        self._expected_ms: float | None = None
        """Of the attempt."""
        self._usage: Usage | None = None
        """Of a whole answer."""
        self._reader: UsageReader | None = None
        """Of a provider's stream."""
        self._status = 0
        """As it is counted, once it is known: that of an error event, not of the answer that it ended."""
        self._limit = asyncio.timeout(None)
        self._over: Literal["", "left", "silent", "unread", "late"] = ""
        """Why :attr:`_limit` was made to end."""
        self._last_s = self._clock()
        """When the target or, while it is written to, the client was last seen to get on."""
        self._is_writing = False

    @property
    def answered_by(self) -> str | None:
        """The model, of an answer that is whole; ``None``: it is not, or is an error."""
        return self._attempt.model if self._attempt is not None and self._status == 200 else None

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
        if not self._has_begun and self._attempt is not None:
            others = [target for target in self._order.targets if target is not self._attempt.target]
            if any(other.takes_requests for other in others):
                self._cut("left")

    def check(self, now_s: float) -> None:
        silent_s = now_s - self._last_s
        if self._is_writing and silent_s > WRITE_TIMEOUT_S:
            self._cut("unread")
        elif self._has_begun and not self._is_writing and silent_s > self._settings.silence_s:
            self._cut("silent")
        elif now_s - self._begun_s > self._settings.total_s:
            self._cut("late")

    def _cut(self, why: Literal["left", "silent", "unread", "late"]) -> None:
        if not self._over and not self._limit.expired():
            self._over = why
            self._limit.reschedule(self._clock())

    async def _answered(self) -> web.StreamResponse:
        failure: Failure | None = None
        again, breaks, waits_until_s = False, 0, self._clock() + WAIT_S
        while breaks < MOST_BREAKS:
            attempt = self._order.next(again=again)
            if attempt is None:
                if failure is None:
                    raise failures.nobody(self._order.targets)
                if not self._order.waits and (not again or self._clock() > waits_until_s):
                    break
                await asyncio.sleep(POLL_S)
                continue
            try:
                return await self._at(attempt)
            except Elsewhere as elsewhere:
                failure, again = elsewhere.failure, elsewhere.again
                breaks += elsewhere.broke
                if not elsewhere.broke:
                    waits_until_s = self._clock() + WAIT_S
                log.warning(
                    "attempt failed",
                    target=attempt.target.id,
                    why=attempt.target.refusal or failures.words_for(failure),
                    request_id=self._asked.request_id,
                )
        assert failure is not None
        return await self._failed(failure)

    async def _at(self, attempt: Attempt) -> web.StreamResponse:
        """The answer of one target. Raises :class:`Elsewhere`, :class:`ApiError`."""
        target = attempt.target
        tokens = self._order.prompt_tokens
        self._expected_ms = target.expected_ms(max(0, tokens - attempt.cached_tokens)) if self._asked.stream else None
        share = Share(target.load, tokens, attempt.cached_tokens)
        self._attempts += 1
        self._attempt, self._over, self._last_s = attempt, "", self._clock()
        self._limit = asyncio.timeout((target.provider or self._settings).first_byte_s)
        try:
            async with self._limit:
                target.sendings.add(self)
                try:
                    return await self._sent(attempt, share)
                finally:
                    target.sendings.discard(self)  # a limit that is over cannot be changed
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            if target.provider is None:  # whose probes will say when it is back
                target.is_down("cannot be reached", lets_go=False)
            target.breaker.failed()
            raise Elsewhere(failures.unreachable(), again=target.provider is None) from None
        except TimeoutError:
            return await self._broken(target, failures.timed_out(self._over))
        except (aiohttp.ClientError, ConnectionError) as error:
            if self._is_writing:
                raise ConnectionResetError("the client is gone") from None
            log.warning("target broke off", target=target.id, error=type(error).__name__)
            return await self._broken(
                target, failures.no_answer() if isinstance(error, NoAnswer) else failures.broke_off()
            )
        finally:
            share.end()

    async def _sent(self, attempt: Attempt, share: Share) -> web.StreamResponse:
        asked, target, stream = self._asked, attempt.target, self._asked.stream
        assert self._state.session is not None
        # An error event may have to follow in a stream, so that is asked for as it is.
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity" if stream or target.provider or asked.copy else accepted(asked.http),
            "X-Request-Id": asked.request_id,
            **self._arrival.trace.headers(),
            **headers_for(target),
        }
        if asked.terms.slo_class is not None and target.provider is None:
            headers[HEADER] = asked.terms.slo_class
        asking = self._state.session.post(
            target.at_path(asked.http.path),
            data=asked.body_for(attempt),
            headers=headers,
            timeout=timeout_of(self._settings),
            allow_redirects=False,
        )
        async with asking as reply:
            if reply.status in (401, 402, 403):
                target.refused_key(reply.status)
                raise Elsewhere(failures.refused_key(target, reply.status))
            if reply.status != 200 and not 400 <= reply.status < 600:
                raise NoAnswer(f"status {reply.status}")
            coding = reply.headers.get("Content-Encoding", "identity")
            if stream and reply.status == 200:
                if reply.content_type != asked.form.stream_type.partition(";")[0] or coding != "identity":
                    raise NoAnswer(f"no stream, but {reply.content_type} ({coding})")
                return await self._streamed(reply, attempt, share)
            data = await read_at_most(reply.content, MOST_ANSWER_BYTES)
            whole = self._whole(reply, data)
            if reply.status == 413 and target.provider is not None:  # another one may take more
                raise Elsewhere(whole)
            misses = reply.status == 404 and target.provider is not None  # its name of the model, or its URL, is wrong
            if misses or reply.status in (408, 429) or reply.status >= 500:  # another target might answer
                self._cannot(attempt, reply)
                raise Elsewhere(whole)
            if reply.status == 400 and failures.code_of(data) == TOO_LONG:
                self._order.too_long(attempt)
                raise Elsewhere(whole)
            if reply.status == 200 and (target.provider if coding != "identity" else not failures.is_object(data)):
                raise NoAnswer(f"no JSON object ({coding})")
            if reply.status == 200 and failures.is_error(data):
                return await self._refused(whole, target)
        if target.provider is not None and reply.status == 200:
            self._usage = usage_of(data)
        if asked.copy is not None:
            asked.copy.add(data)
        self._begun(share)
        target.worked()
        if self._response is not None:
            return await self._failed(whole)
        return whole

    def _cannot(self, attempt: Attempt, reply: aiohttp.ClientResponse) -> None:
        """A target said that it cannot answer now: it may be asked again, and when."""
        wait_s = retry_after_s(reply.headers)
        if reply.status != 429:
            attempt.target.breaker.failed()
        if attempt.target.provider is not None and wait_s:  # of an own one, 429 may be about one client alone
            attempt.target.rest(wait_s)
        is_quick = self._clock() - self._last_s <= QUICK_S
        if is_quick and (reply.status != 429 or wait_s is not None):
            self._order.failed(attempt, wait_s or 0.0)

    async def _streamed(self, reply: aiohttp.ClientResponse, attempt: Attempt, share: Share) -> web.StreamResponse:
        asked, target = self._asked, attempt.target
        sent_s, waiting_tokens = self._last_s, share.waiting_tokens
        ended, finished, tail, pattern = False, False, b"\n", asked.form.whole_stream
        finish = asked.form.finish if asked.n == 1 else None
        self._reader = UsageReader(asked.hides_usage) if target.provider is not None else None
        async for piece in reply.content.iter_any():
            if not self._has_begun and not COMMENTS.fullmatch(piece):
                if REFUSAL.match(piece):
                    self._limit.reschedule(self._clock() + REFUSAL_S)
                    data = piece + await read_at_most(reply.content, MOST_ANSWER_BYTES)
                    return await self._refused(self._whole(reply, data), target)
                target.first_byte.add(waiting_tokens, (self._clock() - sent_s) * 1e3)
                self._begun(share)
            if not ended:
                seen = tail + piece
                ended, tail = pattern.search(seen) is not None, seen[-TAIL_BYTES:]
                finished = finished or (finish is not None and finish.search(seen) is not None)
            if self._response is None:
                self._response = self._head(reply)
                await self._response.prepare(asked.http)
            await self._write(piece if self._reader is None else self._reader.feed(piece))
            self._is_whole = ended
        if not ended and not finished:
            raise aiohttp.ClientPayloadError("the stream ends too soon")
        self._is_whole = True
        target.worked()
        return await self._ended()

    def _begun(self, share: Share) -> None:
        """The first of an answer has come: it is this target's from here on."""
        self._has_begun, self._over = True, ""  # it cannot leave any more
        self._limit.reschedule(None)
        self._first_ms = self._since_ms()
        self._asked.body.release()
        self._order.forget()
        share.took(1)

    async def _ended(self, last: bytes = b"") -> web.StreamResponse:
        """The end of what is out. Raises ``ConnectionError`` when the client is gone or stuck."""
        assert self._response is not None
        if self._is_whole and self._reader is not None:
            last = self._reader.end()
        self._last_s, self._is_writing = self._clock(), True
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._response.write_eof(last)
        except TimeoutError:
            raise failures.unread() from None
        return self._response

    async def _refused(self, refusal: web.Response, target: Target) -> web.StreamResponse:
        """An answer that is an error. Raises :class:`Elsewhere` unless that is the request's own."""
        if b'"invalid_request_error"' not in failures.body_of(refusal):
            target.breaker.failed()
            raise Elsewhere(refusal)
        target.worked()
        self._status = 400
        return await self._failed(refusal)

    async def _write(self, piece: bytes) -> None:
        assert self._response is not None
        self._last_s, self._is_writing = self._clock(), True
        await self._response.write(piece)
        if self._asked.copy is not None:
            self._asked.copy.add(piece)
        self._last_s, self._is_writing = self._clock(), False

    async def _broken(self, target: Target, failure: ApiError) -> web.StreamResponse:
        """A target broke off. Raises :class:`Elsewhere` where it had not begun."""
        if self._over == "left":
            raise Elsewhere(failure, again=True)
        if self._over == "unread":
            raise failures.unread()
        if self._is_whole:  # what it does afterwards is no news
            return await self._ended()
        if self._over == "late":
            return await self._failed(failure)
        target.breaker.failed()
        if not self._has_begun:
            raise Elsewhere(failure, broke=True, again=True)
        return await self._failed(failure)

    async def _failed(self, failure: Failure) -> web.StreamResponse:
        """The end of a request that failed: as an event where a part of the answer, or a comment, is out."""
        if isinstance(failure, web.Response) and failure.status == 200:  # events that are a refusal
            self._status = self._status or 502
        if self._response is None:
            if isinstance(failure, web.Response):
                if not self._asked.stream and failure.status == 200:  # clients go by the status
                    failure.set_status(self._status)
                return failure
            raise failure
        return await self._ended(b"" if self._is_whole else self._ending(failure))

    def _ending(self, failure: Failure) -> bytes:
        """Of a stream that failed."""
        if isinstance(failure, web.Response):
            if failure.status == 200:
                return failures.body_of(failure)
            failure = HttpError(502, f"The server this request moved to answered {failure.status}.", code="bad_gateway")
        self._status = status_of(failure)
        return self._asked.form.gap + self._asked.form.broken(failure)

    def _head(self, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache", **self._headers(reply)}
        return DeferredHeaders(status=reply.status, headers=headers)

    def _whole(self, reply: aiohttp.ClientResponse, data: bytes) -> web.Response:
        return web.Response(status=reply.status, body=data, headers=self._headers(reply))

    def _headers(self, reply: aiohttp.ClientResponse) -> dict[str, str]:
        """Of the target's, and which target it is."""
        assert self._attempt is not None
        found = {name: reply.headers.get(name, "") for name in PASSED_ON}
        found |= {"X-Target": self._attempt.target.id, "X-Attempt": str(self._attempts)}
        if self._attempt.model != self._asked.chosen.name:
            found["X-Model"] = self._attempt.model
        found["X-Model-Reason"] = self._model_reason
        if self._expected_ms is not None:
            found["X-Expected-Ms"] = f"{self._expected_ms:.0f}"
        if self._attempts == 1:
            found["X-Route-Reason"] = " ".join(self._attempt.reason.split())  # a header is one line
        return {name: value for name, value in found.items() if value and value.isprintable()}  # others cannot be sent

    @property
    def _model_reason(self) -> str:
        """Why the model of the attempt answers; empty where its name stands for it alone, or nobody chose."""
        chosen = self._asked.chosen
        if self._attempt is not None and self._attempt.model != chosen.first:
            return f"{chosen.first} did not answer"
        return chosen.reason

    def _since_ms(self) -> float:
        return (time.monotonic() - self._arrival.received_s) * 1e3

    def _report(self, status: int) -> None:
        asked, trace, attempt = self._asked, self._arrival.trace, self._attempt
        provider = None if attempt is None else attempt.target.provider
        usage = self._usage if self._reader is None else self._reader.usage
        ended = ProxiedEvent(
            time.monotonic(),
            asked.request_id,
            asked.kind,
            "" if attempt is None else attempt.target.id,
            status,
            self._since_ms(),
            trace.parent,
            trace.span_id,
            self._first_ms,
            self._attempts,
            "" if attempt is None else attempt.model,
            self._expected_ms or 0.0,
            cost_of(usage, provider),
            asked.chosen.name,
            self._model_reason,
        )
        self._state.bus.publish((ended,))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """What ``Retry-After`` asks for in seconds; ``None``: nothing, or a date."""
    text = headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdigit() else None
