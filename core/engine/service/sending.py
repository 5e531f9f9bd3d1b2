"""A sequence at one engine after another: what one of them has begun, another one goes on with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from engine.contracts.request import EngineRequest, FinishReason, Timings, TokensOut
from engine.loop.client import EngineDead, OutputStream
from engine.service.engines import EngineHandle
from engine.service.forecast import Expected
from engine.service.load import Share
from engine.service.promises import Promise
from engine.service.remote_prefill import AfterPrefill, RemotePrefill
from engine.service.timings import gone_on

MOST_DEATHS = 2
"""A sequence that was with so many engines when they died fails: it may be what they died of."""
NONE_TAKES = "no other engine takes requests"
TOO_SHORT = "the others have no room for so many tokens"
OTHER_IDENTITY = "the others have other weights, settings or software"
NOT_NAMED = "the router names no other engine"
REASONS = (NONE_TAKES, NOT_NAMED, TOO_SHORT, OTHER_IDENTITY)
"""Why a sequence stays at an engine that drains."""
WAIT_S = 15.0
"""How long a sequence waits for another engine that is starting again."""
POLL_S = 0.05


class Sending:
    """An :class:`~engine.loop.client.OutputStream` of the first of some engines that takes a sequence. Another one
    takes over from an engine that dies, or is told to let go of it: it is sent the tokens so far, and goes on after
    them."""

    def __init__(
        self,
        request: EngineRequest,
        engines: Sequence[EngineHandle],
        sent: Callable[[EngineHandle], None],
        *,
        cached_tokens: int,
        reason: str | None,
        again: Callable[[], Sequence[EngineHandle]],
        fleet: Mapping[str, EngineHandle],
        promise: Promise | None = None,
        prefill: RemotePrefill | None = None,
    ) -> None:
        """``engines``: in the order in which they are tried; those that take no requests are passed over. ``sent`` is
        told of each that is sent the sequence. ``cached_tokens``: of the prompt, expected at the first one;
        ``reason``: why that one is the first, ``None``: there is no other. ``again``: asked for further engines once
        none of these is left; ``fleet``: all of them, of which some may come back. ``promise``: of its class.
        ``prefill``: what computes the prompt before. Raises :class:`EngineDead` where none takes it."""
        self.request = request
        self._reason = reason
        self._left = list(engines)
        self._again = again
        self._fleet = fleet
        self._promise = promise
        self._prefill = prefill
        self._expected: Expected
        self._cached_tokens = cached_tokens
        self._sent = sent
        self._tokens: list[int] = []
        """Of the output, from all engines."""
        self._identity = ""
        """Of the engine that they are from."""
        self._timings: Timings | None = None
        """At the engines before this one, since the one that has begun; of one that died what is known from here."""
        self._handed_over: list[str] = []
        self.stays = ""
        """Why it has not left, when it was told to."""
        self._is_aborted = self._has_stopped = False
        """The second: it has met a stop string, and is whole."""
        self._leaves = False
        self._attempt = self._num_deaths = 0
        self._send(None)

    def _others(self) -> list[EngineHandle]:
        """Further engines that take it, in order."""
        self._left = [engine for engine in self._left if self._why_not(engine) is None]
        if not self._left and self._attempt:
            self._left = [each for each in self._again() if each is not self.engine and self._why_not(each) is None]
        return self._left

    def _why_not(self, engine: EngineHandle) -> str | None:
        """Why an engine cannot have it; ``None``: it can."""
        if not engine.takes_requests:
            return NONE_TAKES
        if self._has_begun and engine.identity != self._identity:
            return OTHER_IDENTITY
        return TOO_SHORT if len(self.request.prompt) + self.request.sampling.max_tokens > engine.max_len else None

    def _send(self, failure: EngineDead | None) -> None:
        """To the first other engine that takes it. Raises ``failure``, or :class:`EngineDead`, where there is none."""
        others = self._others()
        while others:
            try:
                return self._send_to(others.pop(0))
            except EngineDead as dead:  # died a moment ago
                failure = failure or dead
        raise failure or EngineDead("no engine takes requests")

    def _send_to(self, engine: EngineHandle) -> None:
        """Raises :class:`EngineDead`."""
        sent_s = time.monotonic()
        self._stream = self._submit_to(engine)
        self.engine = engine
        """Which has the sequence."""
        cached_tokens, self._cached_tokens = self._cached_tokens, 0
        known = len(self.request.prompt) + len(self._tokens)
        self._share = Share(engine.load, known, cached_tokens)
        self._waits = engine.forecast.expect(self._promise, max(0, known - cached_tokens))
        engine.forecast.sent(self._waits)
        if not self._has_begun:
            self._expected = self._waits
            self.sent_s = sent_s
            """When it was sent to the engine that has begun with it: before that can have it."""
        engine.sendings.add(self)
        ends = [end for end, _ in self.request.retain]
        engine.prompts.add(self.request.request_id, self.request.prompt, self.request.cache_salt, ends)
        if self._has_begun:
            self._handed_over.append(f"went on at {engine.id} after {len(self._tokens):,} tokens")
        else:
            self._attempt += 1
        self._sent(engine)

    def _submit_to(self, engine: EngineHandle) -> OutputStream:
        """Raises :class:`EngineDead`."""
        prefill, self._prefill = self._prefill, None
        if prefill is None:
            return engine.client.submit(self._rest())
        if not engine.client.alive:
            self._prefill = prefill
            raise EngineDead("it is not alive")
        return AfterPrefill(self.request, prefill, engine.client.submit)

    def _rest(self) -> EngineRequest:
        """What is left of it to do."""
        if not self._has_begun:
            return self.request
        sampling = replace(self.request.sampling, prompt_logprobs=None)  # they came with the first token
        return replace(self.request, output=tuple(self._tokens), sampling=sampling, prefilled=True)

    async def _send_soon(self, failure: EngineDead) -> None:
        """As :meth:`_send`, once another engine takes it, unless it is aborted meanwhile."""
        last_s = time.monotonic() + WAIT_S
        while not self._is_aborted:
            try:
                return self._send(failure)
            except EngineDead:
                others = [engine for engine in self._fleet.values() if engine is not self.engine]
                if time.monotonic() > last_s or all(engine.is_over for engine in others):
                    raise
            await asyncio.sleep(POLL_S)
        raise failure

    def __aiter__(self) -> AsyncIterator[TokensOut]:
        return self

    async def __anext__(self) -> TokensOut:
        while True:
            try:
                out = await self._stream.__anext__()
            except EngineDead as dead:
                self._died()
                if self._has_stopped:
                    return TokensOut(self.request.request_id, finish_reason="stop", timings=self._timings)
                if self._is_aborted or self._num_deaths == MOST_DEATHS:
                    raise
                self._leaves = False
                await self._send_soon(dead)
                continue
            if out.tokens:
                self._took(out.tokens)
            if out.finish_reason is None:
                return out
            self.close()
            timings = self._all_timings(out.timings)
            if not self._has_left(out):
                return replace(out, timings=timings)
            self._leaves = False
            self._timings = timings if self._has_begun else None
            await self._go_on()

    @property
    def _has_begun(self) -> bool:
        """Tokens have come: only an engine of the same identity can go on."""
        return bool(self._tokens)

    def _has_left(self, out: TokensOut) -> bool:
        """Whether its engine let go of it because it was told to."""
        return self._leaves and out.finish_reason == "abort"

    def _died(self) -> None:
        """The engine that had it did; the times there are what is known from here."""
        self.close()
        self._num_deaths += 1
        if self._has_begun and self._timings is None:
            self._timings = Timings(self.sent_s, prefill_ms=(self._first_s - self.sent_s) * 1e3)

    def _all_timings(self, timings: Timings | None) -> Timings | None:
        """Those of the engine that had it last, and of those before it."""
        if self._timings is None or timings is None:
            return self._timings or timings
        return gone_on(self._timings, timings)

    def _took(self, tokens: Sequence[int]) -> None:
        """Tokens have come."""
        if not self._has_begun:
            self._first_s = time.monotonic()
            self._identity = self.engine.identity
            self.engine.forecast.first_token(self._expected)
        self._tokens += tokens
        self._share.took(len(tokens))
        self.engine.forecast.end(self._waits)

    async def _go_on(self) -> None:
        """At another engine; at the one that let go of it where the others are gone meanwhile, or once one of them is
        back where that one is gone, too. Raises :class:`EngineDead`."""
        last = self.engine
        try:
            self._send(None)
        except EngineDead:
            try:
                self._send_to(last)
            except EngineDead as dead:
                await self._send_soon(dead)

    @property
    def expected_ttft_ms(self) -> float | None:
        """From :attr:`sent_s` on, as it was expected then; ``None``: it was not."""
        return self._expected.ms

    @property
    def route(self) -> Mapping[str, str | int]:
        """The engine that has the sequence, how many were sent it until one began, why the first of them was, and after
        how many tokens others went on; empty where there is no other."""
        if self._reason is None:
            return {}
        reason = "; ".join([self._reason, *self._handed_over])
        return {"engine": self.engine.id, "attempt": self._attempt, "reason": reason}

    def leave(self) -> None:
        """Go to another engine, if one takes it: to go on there, or to begin where no token has come."""
        if self._is_aborted or self._leaves:
            return
        why_not = [self._why_not(each) for each in self._fleet.values() if each is not self.engine]
        self.stays = "" if None in why_not else max(filter(None, why_not), key=REASONS.index, default=NONE_TAKES)
        if not self.stays and not self._others():
            self.stays = NOT_NAMED
        if not self.stays:
            self._leaves = True
            self._stream.abort()

    def abort(self, reason: FinishReason = "abort") -> None:
        self._is_aborted, self._leaves = True, False
        self._has_stopped = self._has_stopped or reason == "stop"
        self._stream.abort(reason)

    def close(self) -> None:
        """Nobody waits for it any more: it ends, and is counted no longer."""
        with suppress(EngineDead):
            self._stream.abort()
        self._share.end()
        self.engine.forecast.end(self._waits)
        self.engine.sendings.discard(self)
