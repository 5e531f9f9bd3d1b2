"""A sequence at one engine after another, until one of them has begun with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from engine.contracts.request import EngineRequest, FinishReason, TokensOut
from engine.loop.client import EngineDead, OutputStream
from engine.service.engines import EngineHandle
from engine.service.load import Share

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
        cached_tokens: int = 0,
        reason: str | None = None,
    ) -> None:
        """``engines``: in the order in which they are tried; those that take no requests are passed over. ``sent`` is
        told of each that is sent the sequence. ``cached_tokens``: of the prompt, expected at the first one;
        ``reason``: why that one is the first, ``None``: there is no other. Raises :class:`EngineDead` where none takes
        it."""
        self.request = request
        self._reason = reason
        self._engines = engines
        self._others = tuple(engines)
        """Without the one that has the sequence."""
        self._cached_tokens = cached_tokens
        self._sent = sent
        self._has_begun = False
        self._is_aborted = False
        self._leaves = False
        self._attempt = self._num_deaths = 0
        self._send(None)

    def _send(self, failure: EngineDead | None) -> None:
        """To the first other engine that takes it. Raises ``failure``, or :class:`EngineDead`, where there is none."""
        for engine in self._others:
            if not engine.takes_requests:
                continue
            try:
                self._stream: OutputStream = engine.client.submit(self.request)
            except EngineDead as dead:  # died a moment ago
                failure = failure or dead
                continue
            self.engine = engine
            """Which has the sequence."""
            self._others = tuple(other for other in self._engines if other is not engine)
            self.sent_s = time.monotonic()
            """When it was sent there."""
            cached_tokens, self._cached_tokens = self._cached_tokens, 0
            self._share = Share(engine.load, len(self.request.prompt), cached_tokens)
            engine.sendings.add(self)
            engine.prompts.add(self.request.request_id, self.request.prompt, self.request.cache_salt)
            self._attempt += 1
            self._sent(engine)
            return
        raise failure or EngineDead("no engine takes requests")

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
                    await self._send_soon(None)
                continue
            self._has_begun = self._has_begun or bool(out.tokens or out.prompt_logprobs)
            self._share.took(len(out.tokens))
            return out

    async def _send_soon(self, failure: EngineDead | None) -> None:
        """As :meth:`_send`, once another engine takes it."""
        last_s = time.monotonic() + WAIT_S
        while True:
            try:
                return self._send(failure)
            except EngineDead:
                if time.monotonic() > last_s or all(engine.state == "failed" for engine in self._others):
                    raise
            await asyncio.sleep(POLL_S)

    @property
    def route(self) -> Mapping[str, str | int]:
        """The engine that has the sequence, how many were sent it, and why the first of them was; empty where there is
        no other."""
        if self._reason is None:
            return {}
        return {"engine": self.engine.id, "attempt": self._attempt, "reason": self._reason}

    def leave(self) -> None:
        """Go to another engine, if one takes it and no token has come."""
        if any(engine.takes_requests for engine in self._others) and not (
            self._has_begun or self._is_aborted or self._leaves
        ):
            self._leaves = True
            self._stream.abort()

    def abort(self, reason: FinishReason = "abort") -> None:
        self._is_aborted, self._leaves = True, False
        self._stream.abort(reason)

    def close(self) -> None:
        """Nobody waits for it any more: it ends, and is counted no longer."""
        self._stream.abort()
        self._share.end()
        self.engine.sendings.discard(self)
