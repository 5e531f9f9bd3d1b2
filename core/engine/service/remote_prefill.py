"""Prompts that one engine computes for another, which then finds keys and values in a store that both share.

Whatever becomes of it, the engine that decodes is sent the whole request after it, and computes what it does not find.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress

import msgspec

from engine.contracts.request import EngineRequest, FinishReason, SamplingParams, Timings, TokensOut
from engine.loop.client import EngineDead, OutputStream
from engine.service.engines import EngineHandle
from engine.service.load import Share

LATE = 3.0
"""Of the time that a prompt and those before it are expected to take: after so much nobody waits for it."""
LEAST_S, UNKNOWN_S = 0.5, 10.0
"""At least so long, and where nothing was measured yet."""


def prefill_for(
    request: EngineRequest, cached_tokens: int, decodes: EngineHandle, engines: Iterable[EngineHandle]
) -> RemotePrefill | None:
    """The prompt, sent to the engine for prompts that has the fewest to compute; ``None`` where there is none, or too
    little is missing at the engine that ``decodes``: ``cached_tokens``, which the router expects there, and what
    the prompt shares with others that were sent there are not."""
    able = [engine for engine in engines if engine.role == "prefill" and engine.takes_requests]
    if decodes.role != "decode" or not able or request.sampling.prompt_logprobs is not None:
        return None
    cached = max(cached_tokens, decodes.prompts.shared(request.prompt, request.cache_salt))
    if len(request.prompt) - cached <= decodes.plan.settings.fleet.prefill_tokens:
        return None
    try:
        return RemotePrefill(min(able, key=lambda engine: engine.load.queued_tokens), request)
    except EngineDead:  # died a moment ago
        return None


class RemotePrefill:
    """A prompt at the engine that computes it. Always :meth:`close` it."""

    def __init__(self, engine: EngineHandle, request: EngineRequest) -> None:
        """Raises :class:`EngineDead`."""
        own = msgspec.structs.replace(
            request, request_id=f"{request.request_id}-prefill", sampling=SamplingParams(max_tokens=0, temperature=0.0)
        )
        self.engine = engine
        self._stream = engine.client.submit(own)
        self._share = Share(engine.load, len(request.prompt), 0)
        self.is_done = self._is_over = False
        """Well: stores have it, or are about to hear of it."""

    async def wait(self) -> None:
        """Until it is computed, lost or late."""
        expected_s = self.engine.prefill_s(self._share.waiting_tokens)
        with suppress(EngineDead, TimeoutError):
            async with asyncio.timeout(UNKNOWN_S if expected_s is None else max(LEAST_S, LATE * expected_s)):
                async for out in self._stream:
                    self._is_over = self._is_over or out.finish_reason is not None
                    self.is_done = out.finish_reason == "length"
        self.close()

    def close(self) -> None:
        """Nobody waits for it any more: it ends, and is counted no longer. Idempotent."""
        if not self._is_over:
            self._is_over = True
            with suppress(EngineDead):
                self._stream.abort()
        self._share.end()


class AfterPrefill:
    """An :class:`~engine.loop.client.OutputStream` that begins when a prompt was computed elsewhere."""

    def __init__(
        self, request: EngineRequest, prefill: RemotePrefill, submit: Callable[[EngineRequest], OutputStream]
    ) -> None:
        self._request, self._prefill, self._submit = request, prefill, submit
        self._stream: OutputStream | None = None
        self._aborted: FinishReason | None = None
        self._over = asyncio.Event()
        self._has_ended = False

    def __aiter__(self) -> AsyncIterator[TokensOut]:
        return self

    async def __anext__(self) -> TokensOut:
        if self._stream is None:
            await self._wait()
            if self._aborted is not None:
                if self._has_ended:
                    raise StopAsyncIteration
                self._has_ended = True
                return TokensOut(self._request.request_id, finish_reason=self._aborted, timings=Timings())
            self._stream = self._submit(msgspec.structs.replace(self._request, prefilled=self._prefill.is_done))
        return await self._stream.__anext__()

    async def _wait(self) -> None:
        """For the prompt, or the end of the request."""
        waits = [asyncio.create_task(self._prefill.wait()), asyncio.create_task(self._over.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            self._prefill.close()

    def abort(self, reason: FinishReason = "abort") -> None:
        if self._stream is not None:
            self._stream.abort(reason)
        elif self._aborted is None:
            self._aborted = reason
            self._prefill.close()
            self._over.set()
