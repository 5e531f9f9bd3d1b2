"""A sequence at one engine after another, until one of them has begun with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress

from engine.contracts.request import EngineRequest, FinishReason, TokensOut
from engine.loop.client import EngineDead, OutputStream
from engine.service.engines import EngineHandle
from engine.service.forecast import Expected
from engine.service.load import Share
from engine.service.promises import Promise
from engine.service.remote_prefill import AfterPrefill, RemotePrefill

MOST_DEATHS = 2
"""A sequence that was with so many engines when they died fails: it may be what they died of."""
WAIT_S = 15.0
"""How long a sequence waits for another engine that is starting again."""
POLL_S = 0.05


class Sending:
    """An :class:`~engine.loop.client.OutputStream` of the first of some engines that takes a sequence. While no token
    has come another one takes over from an engine that dies, or that is told to let go of what it has not begun."""

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
        self._has_begun = False
        self._is_aborted = False
        self._leaves = False
        self._attempt = self._num_deaths = 0
        self._send(None)

    def _others(self) -> list[EngineHandle]:
        """Further engines that take requests, in order."""
        self._left = [engine for engine in self._left if engine.takes_requests]
        if not self._left and self._attempt:
            self._left = [each for each in self._again() if each.takes_requests and each is not self.engine]
        return self._left

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
        self.sent_s = sent_s
        """When it was sent there: before the engine can have it."""
        cached_tokens, self._cached_tokens = self._cached_tokens, 0
        self._share = Share(engine.load, len(self.request.prompt), cached_tokens)
        self._expected = engine.forecast.expect(self._promise, max(0, len(self.request.prompt) - cached_tokens))
        engine.forecast.sent(self._expected)
        engine.sendings.add(self)
        ends = [end for end, _ in self.request.retain]
        engine.prompts.add(self.request.request_id, self.request.prompt, self.request.cache_salt, ends)
        self._attempt += 1
        self._sent(engine)

    def _submit_to(self, engine: EngineHandle) -> OutputStream:
        """Raises :class:`EngineDead`."""
        prefill, self._prefill = self._prefill, None
        if prefill is None:
            return engine.client.submit(self.request)
        if not engine.client.alive:
            self._prefill = prefill
            raise EngineDead("it is not alive")
        return AfterPrefill(self.request, prefill, engine.client.submit)

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
                self.close()
                self._num_deaths += 1
                if self._has_begun or self._is_aborted or self._num_deaths == MOST_DEATHS:
                    raise
                self._leaves = False
                await self._send_soon(dead)
                continue
            if out.finish_reason is not None:
                self.close()
            if self._leaves and out.finish_reason != "error":  # what comes now nobody has seen: all of it comes again
                if out.finish_reason is not None:
                    self._leaves = False
                    self._go_on()
                continue
            if out.tokens and not self._has_begun:
                self.engine.forecast.first_token(self._expected)
            self._has_begun = self._has_begun or bool(out.tokens or out.prompt_logprobs)
            self._share.took(len(out.tokens))
            return out

    def _go_on(self) -> None:
        """At another engine; at the one that let go of it where the others are gone meanwhile. Raises
        :class:`EngineDead`."""
        last = self.engine
        try:
            self._send(None)
        except EngineDead:
            self._send_to(last)

    @property
    def expected_ttft_ms(self) -> float | None:
        """From :attr:`sent_s` on, as it was expected then; ``None``: it was not."""
        return self._expected.ms

    @property
    def route(self) -> Mapping[str, str | int]:
        """The engine that has the sequence, how many were sent it, and why the first of them was; empty where there is
        no other."""
        if self._reason is None:
            return {}
        return {"engine": self.engine.id, "attempt": self._attempt, "reason": self._reason}

    def leave(self) -> None:
        """Go to another engine, if one takes it and no token has come."""
        if not (self._has_begun or self._is_aborted or self._leaves) and self._others():
            self._leaves = True
            self._stream.abort()

    def abort(self, reason: FinishReason = "abort") -> None:
        self._is_aborted, self._leaves = True, False
        self._stream.abort(reason)

    def close(self) -> None:
        """Nobody waits for it any more: it ends, and is counted no longer."""
        with suppress(EngineDead):
            self._stream.abort()
        self._share.end()
        self.engine.forecast.end(self._expected)
        self.engine.sendings.discard(self)
