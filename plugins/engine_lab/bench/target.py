"""The server under test: how a request is put to it, and what came back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import msgspec

from engine_lab.bench.quirks import again_if_closed, api_of
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.stream import Clock, StreamResult, read_stream, read_whole
from engine_lab.bench.workload import BenchRequest


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible server and how to ask it."""

    base_url: str
    """Without ``/v1`` and without a slash at the end."""
    model: str
    endpoint: str
    """``chat`` or ``completions``."""
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    usage_per_chunk: bool = False
    stream: bool = True
    """``False``: the whole answer comes at once."""
    cache_salt: str | None = None
    """Keeps prompts out of the prefix cache of others (not part of the OpenAI API)."""

    @property
    def url(self) -> str:
        return f"{api_of(self.base_url)}/{'chat/completions' if self.endpoint == 'chat' else 'completions'}"

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}

    def body(self, request: BenchRequest, stream: bool = True) -> dict[str, Any]:
        """The request as JSON. ``ignore_eos`` and ``continuous_usage_stats`` are not part of the OpenAI API, so
        they are sent only when asked for."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "stream": stream,
        }
        if self.endpoint == "chat":
            said = (*request.before, request.prompt)
            body["messages"] = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        else:
            body["prompt"] = request.whole
        if stream:
            more = {"continuous_usage_stats": True} if self.usage_per_chunk else {}
            body["stream_options"] = {"include_usage": True, **more}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.cache_salt is not None:
            body["cache_salt"] = self.cache_salt
        return body


class Send(Protocol):
    """Sends a request that was due at ``scheduled_s`` and returns when its answer has ended. Never raises for
    anything the server does."""

    async def __call__(self, request: BenchRequest, scheduled_s: float) -> RequestRecord: ...


def record_of(
    request: BenchRequest,
    scheduled_s: float,
    sent_s: float,
    done_s: float,
    result: StreamResult,
    keep_text: bool,
    left: bool = False,
) -> RequestRecord:
    """What came of a request. Times in seconds of one clock."""
    return RequestRecord(
        index=request.index,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        done_s=done_s,
        chunks_s=tuple(result.chunks_s),
        chunk_tokens=tuple(result.chunk_tokens) if len(result.chunk_tokens) == len(result.chunks_s) else (),
        end_s=result.end_s,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        output_tokens=result.output_tokens,
        drafting=result.drafting,
        served=result.served,
        finish_reason=result.finish_reason,
        error=result.error,
        detail=result.detail,
        text="".join(result.text) if keep_text or request.turns else "",
        service_class=request.service_class,
        turn=len(request.before) // 2,
        left=left,
    )


class HttpSender:
    """Sends over HTTP with one connection per running request."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, clock: Clock, keep_text: bool = False) -> None:
        self._session, self._target, self._clock, self._keep_text = session, target, clock, keep_text

    async def __call__(self, request: BenchRequest, scheduled_s: float) -> RequestRecord:
        body = msgspec.json.encode(self._target.body(request, self._target.stream))
        sent_s, result, left = self._clock(), StreamResult(), asyncio.timeout(request.leave_after_s)
        try:
            async with left:
                result = await again_if_closed(lambda: self._post(body, result))
        except TimeoutError:
            if not left.expired():
                result = StreamResult(error="timeout", detail="no answer within --timeout")
        except aiohttp.ClientConnectorError as error:
            result = StreamResult(error="connect", detail=str(error))
        except aiohttp.ClientError as error:
            result = StreamResult(error="disconnected", detail=f"{type(error).__name__}: {error}")
        return record_of(request, scheduled_s, sent_s, self._clock(), result, self._keep_text, left.expired())

    async def _post(self, body: bytes, result: StreamResult) -> StreamResult:
        """``result`` is filled meanwhile, where the answer is a stream."""
        target = self._target
        async with self._session.post(target.url, data=body, headers=target.headers) as response:
            if response.status != 200:
                text = await response.text(errors="replace")
                return StreamResult(error=f"http_{response.status}", detail=text[:300])
            if not target.stream:
                answer = await response.read()
                return read_whole(answer, self._clock())
            if response.content_type != "text/event-stream":
                return StreamResult(error="not_a_stream", detail=f"content type {response.content_type}")
            return await read_stream(pieces(response), self._clock, result)


async def pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for piece in response.content.iter_any():
        yield piece


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """A session without a limit on connections: requests never queue in the client."""
    return aiohttp.ClientSession(
        # Idle connections are given up before common servers close theirs (5 s), or a request could be sent into a
        # connection that is just being closed and would count as failed.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        loop=asyncio.get_running_loop(),
    )
