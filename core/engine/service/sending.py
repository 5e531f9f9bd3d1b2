"""A sequence at one engine after another, until one of them has begun with it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress

from engine.contracts.request import EngineRequest, FinishReason, TokensOut
from engine.loop.client import EngineDead, OutputStream
from engine.service.engines import EngineHandle
from engine.service.load import Share

MOST_DEATHS = 2
"""So many engines may die with a sequence that has not begun: what kills each of them does not get all of a fleet."""


class Sending:
    """An :class:`~engine.loop.client.OutputStream` of the first of some engines that takes a sequence. While no token
    has come the next one takes over from an engine that dies, or that is told to let go of what it has not begun. No
    engine gets a second time what it died with, and after :data:`MOST_DEATHS` there is no next one."""

    def __init__(
        self,
        request: EngineRequest,
        engines: Sequence[EngineHandle],
        sent: Callable[[EngineHandle], None],
        *,
        cached_tokens: int = 0,
        reason: str | None = None,
        again: Callable[[], Sequence[EngineHandle]] = tuple,
    ) -> None:
        """``engines``: in the order in which they are tried; those that take no requests are passed over. ``sent`` is
        told of each that is sent the sequence. ``cached_tokens``: of the prompt, expected at the first one;
        ``reason``: why that one is the first, ``None``: there is
        no other. ``again``: asked for further engines once the sequence must leave one and no other is left. Raises
        :class:`EngineDead` where none takes it."""
        self.request = request
        self._reason = reason
        self._left = list(engines)
        self._cached_tokens = cached_tokens
        self._sent = sent
        self._again = again
        self._died = set[str]()
        """Engines that died with it."""
        self._has_begun = False
        self._is_aborted = False
        self._leaves = False
        self._attempt = 0
        self._send(None)

    def _send(self, failure: EngineDead | None) -> None:
        """To the next engine that takes it; one that let go of it in vain has it again. Raises ``failure``, or
        :class:`EngineDead`, where there is none."""
        while self._has_others():
            try:
                self._send_to(self._left.pop(0))
                return
            except EngineDead as dead:  # died a moment ago
                failure = failure or dead
        if self._attempt and failure is None:
            with suppress(EngineDead):
                self._send_to(self.engine)
                return
        raise failure or EngineDead("no engine takes requests")

    def _has_others(self) -> bool:
        """Whether one of those that are left takes requests; those that do not are left no longer."""
        self._left = [engine for engine in self._left if engine.takes_requests]
        if not self._left and self._attempt:
            self._left = [each for each in self._again() if each.takes_requests and each.id not in self._died]
        return bool(self._left)

    def _send_to(self, engine: EngineHandle) -> None:
        """Raises :class:`EngineDead`."""
        sent_s = time.monotonic()
        self._stream: OutputStream = engine.client.submit(self.request)
        self.engine = engine
        """Which has the sequence."""
        self.sent_s = sent_s
        """When it was sent there: before the engine can have it."""
        cached_tokens, self._cached_tokens = self._cached_tokens, 0
        self._share = Share(engine.load, len(self.request.prompt), cached_tokens)
        engine.sendings.add(self)
        engine.prompts.add(self.request.request_id, self.request.prompt, self.request.cache_salt)
        self._attempt += 1
        self._sent(engine)

    def __aiter__(self) -> AsyncIterator[TokensOut]:
        return self

    async def __anext__(self) -> TokensOut:
        while True:
            try:
                out = await self._stream.__anext__()
            except EngineDead as dead:
                self.close()
                if self._has_begun or self._is_aborted:
                    raise
                self._leaves = False
                self._died.add(self.engine.id)
                if len(self._died) == MOST_DEATHS:
                    raise
                self._send(dead)
                continue
            if out.finish_reason is not None:
                self.close()
            if self._leaves and out.finish_reason != "error":  # what comes now nobody has seen: all of it comes again
                if out.finish_reason is not None:
                    self._leaves = False
                    self._send(None)
                continue
            self._has_begun = self._has_begun or bool(out.tokens or out.prompt_logprobs)
            self._share.took(len(out.tokens))
            return out

    @property
    def route(self) -> Mapping[str, str | int]:
        """The engine that has the sequence, how many were sent it, and why the first of them was; empty where there is
        no other."""
        if self._reason is None:
            return {}
        return {"engine": self.engine.id, "attempt": self._attempt, "reason": self._reason}

    def leave(self) -> None:
        """Go to the next engine, if there is one and no token has come."""
        if not (self._has_begun or self._is_aborted or self._leaves) and self._has_others():
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
