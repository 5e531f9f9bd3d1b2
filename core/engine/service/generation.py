"""One output sequence on its way from the engine to a client: detokenize, stop, time, count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from engine.contracts.events import Event, FirstTokenEvent, RequestParameters, TokensEvent
from engine.contracts.request import FinishReason, Timings, TokenLogprobs, TokensOut
from engine.loop.client import EngineDead, OutputStream
from engine.service.errors import engine_died, engine_failed
from engine.service.output_text import OutputText
from engine.service.timings import Account, Arrival, Written, make_account

Publish = Callable[[Sequence[Event]], None]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text is visible. ``offset``: characters of output text before it."""

    token: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Delta:
    """New visible output of choice ``index``. ``tokens`` is filled when logprobs were asked for."""

    index: int
    text: str
    tokens: tuple[ShownToken, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What a run needs to know about its sequence."""

    index: int
    request_id: str
    prompt_tokens: int
    max_tokens: int
    logprobs: bool
    sent_s: float
    """When it was handed to the engine."""
    parameters: RequestParameters | None = None


class SequenceRun:
    """Follows one sequence to its end. Iterate :meth:`deltas` once; always :meth:`close`, then :meth:`report`."""

    def __init__(
        self,
        spec: RunSpec,
        stream: OutputStream,
        text: OutputText,
        arrival: Arrival,
        publish: Publish,
    ) -> None:
        self.spec = spec
        self.tokens: list[int] = []
        """Every counted output token, the one that ended the output included."""
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.account: Account | None = None
        """Set at the end."""
        self._stream = stream
        self._text = text
        self._arrival = arrival
        self._publish = publish
        self._reason: FinishReason = "abort"
        self._ended_s = 0.0
        self._detokenize_s = 0.0
        self._pending: list[tuple[ShownToken, int]] = []
        self._first_s: float | None = None
        self._last_s = 0.0
        self._itl_ms: list[tuple[float, int]] = []

    async def deltas(self) -> AsyncIterator[Delta]:
        """Visible output as it comes; the last one has ``finish_reason``. Raises :class:`ApiError`."""
        try:
            async for out in self._stream:
                if out.prompt_logprobs:
                    self.prompt_logprobs = out.prompt_logprobs
                text = self._take(out) if not self._text.stopped else ""
                if out.finish_reason is not None:
                    yield self._end(out, text)
                    return
                shown = self._release()
                if text or shown:
                    yield Delta(self.spec.index, text, shown)
        except EngineDead as dead:
            self._account("error", None)
            raise engine_died(dead.cause) from None
        self._account("error", None)
        raise engine_failed("its output ended without a finish reason")

    def close(self) -> None:
        """Stop the sequence if it still runs: its blocks are free within one step."""
        if self.account is None:
            with suppress(EngineDead):  # a dead engine holds no blocks
                self._stream.abort()

    async def gone(self) -> None:
        """Wait until the engine has let go of a sequence that was closed."""
        with suppress(EngineDead):
            async for out in self._stream:
                if self.account is None and out.finish_reason is not None:
                    self._account("abort", out.timings)

    def report(self, write: Written) -> None:
        """Publish what became of the sequence, once everything was written."""
        if self.account is None:
            self._account("abort", None)
        assert self.account is not None
        spec, arrival = self.spec, self._arrival
        # One span has the id that the client knows; what other sequences a request has are spans beside it.
        trace = arrival.trace if spec.index == 0 else replace(arrival.trace, span_id="")
        event = self.account.event(
            spec.request_id, self._ended_s, self._reason, spec.max_tokens, write, trace, spec.parameters
        )
        self._publish((event,))

    def record(self) -> Mapping[str, Any]:
        """The finished choice, as routers store it and :func:`engine.service.replay.replayed` serves it again."""
        return {
            "tokens": tuple(self.tokens),
            "logprobs": tuple(self.logprobs),
            "prompt_logprobs": self.prompt_logprobs,
            "finish_reason": self.finish_reason,
            "stop_token": self.stop_token,
        }

    def _take(self, out: TokensOut) -> str:
        """Count and time the new tokens; returns the text they make visible."""
        text: list[str] = []
        before, begun_s = len(self.tokens), time.monotonic()
        for i, token in enumerate(out.tokens):
            self.tokens.append(token)
            logprobs = out.logprobs[i] if i < len(out.logprobs) else None
            if logprobs is not None:
                self.logprobs.append(logprobs)
            if token == out.stop_token and i == len(out.tokens) - 1:
                self.stop_token = token
                break
            text.append(self._show(token, logprobs))
            if self._text.stopped:
                # Tokens of the same step behind the stop string never happened, as far as the client can tell.
                self._stream.abort("stop")
                break
        now = time.monotonic()
        self._detokenize_s += now - begun_s
        self._time(len(self.tokens) - before, now)
        return "".join(text)

    def _show(self, token: int, logprobs: TokenLogprobs | None) -> str:
        offset = self._text.detokenized
        piece = self._text.feed(token)
        end = self._text.detokenized
        # A token without visible text that completes a stop string has no part in the output, unless the string has.
        if self.spec.logprobs and (not self._text.stopped or end > offset or self._text.shown > end):
            self._pending.append((ShownToken(token, offset, logprobs), end))
        return piece

    def _release(self) -> tuple[ShownToken, ...]:
        """Tokens whose text is out. After a stop, those that contributed at least a character of it."""
        count, shown = 0, self._text.shown
        for token, end in self._pending:
            if end > shown and not (self._text.stopped and token.offset < shown):
                break
            count += 1
        released = tuple(token for token, _ in self._pending[:count])
        del self._pending[:count]
        return released

    def _end(self, out: TokensOut, text: str) -> Delta:
        reason = out.finish_reason
        if not self._text.stopped and reason in ("stop", "length"):
            text += self._text.finish()
        if self._text.stopped:
            reason = "stop"
        if reason not in ("stop", "length"):
            self._account("error", out.timings)
            raise engine_failed(out.error or "the sequence was aborted")
        self.finish_reason = reason
        self._account(reason, out.timings)
        return Delta(self.spec.index, text, self._release(), reason)

    def _time(self, count: int, now: float) -> None:
        if count == 0:
            return
        event: Event
        if self._first_s is None:
            self._first_s = now
            event = FirstTokenEvent(now, self.spec.request_id, (now - self._arrival.received_s) * 1e3)
        else:
            itl_ms = (now - self._last_s) * 1e3 / count
            self._itl_ms.append((itl_ms, count))
            event = TokensEvent(now, self.spec.request_id, count, itl_ms)
        self._last_s = now
        self._publish((event,))

    def _account(self, reason: FinishReason, engine: Timings | None) -> None:
        self._reason, self._ended_s = reason, time.monotonic()
        self.account = make_account(
            self._arrival,
            engine,
            sent_s=self.spec.sent_s,
            ended_s=self._ended_s,
            first_token_s=self._first_s,
            itl_ms=self._itl_ms,
            prompt_tokens=self.spec.prompt_tokens,
            output_tokens=len(self.tokens),
            detokenize_ms=self._detokenize_s * 1e3,
        )


async def merge(runs: Sequence[SequenceRun]) -> AsyncIterator[Delta]:
    """The deltas of all runs as they come. The first failure ends it."""
    if len(runs) == 1:
        async with aclosing(runs[0].deltas()) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield delta
        return
    queue: asyncio.Queue[Delta | asyncio.Task[None]] = asyncio.Queue()

    async def pump(run: SequenceRun) -> None:
        async for delta in run.deltas():
            queue.put_nowait(delta)

    tasks = [asyncio.create_task(pump(run)) for run in runs]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Delta):
                yield item
            else:
                running -= 1
                item.result()
    finally:
        for task in tasks:
            task.cancel()
