"""Reading one completion, streamed or whole: bytes in, times and counts out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_lab.bench.quirks import text_of
from engine_lab.bench.record import Drafting, Served

Clock = Callable[[], float]


@dataclass(slots=True)
class StreamResult:
    """What a stream carried. Times in seconds of the given clock."""

    chunks_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    """Output tokens so far, at each of those of them that say so."""
    end_s: float = 0.0
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    drafting: Drafting | None = None
    served: Served | None = None
    response_id: str = ""
    timings: dict[str, Any] = field(default_factory=dict)
    """As the server sent them."""
    done: bool = False
    """``data: [DONE]`` came."""
    error: str = ""
    detail: str = ""


class _DraftTimings(msgspec.Struct):
    """What of a ``timings`` object is about drafting."""

    drafted_tokens: int
    accepted_tokens: int
    draft_chains: int
    draft_ms: float
    decode_ms: float


class _Route(msgspec.Struct):
    """What of a ``timings`` object says which engine it was."""

    route: Served


async def read_stream(pieces: AsyncIterator[bytes], clock: Clock, result: StreamResult | None = None) -> StreamResult:
    """Read server-sent events until they end. The clock is read once per piece, before any parsing. ``result``, if
    given, is filled meanwhile."""
    result = result or StreamResult()
    rest = b""
    async for piece in pieces:
        now = clock()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                _take(result, line[5:].strip(), now)
    if not result.error and not result.done and result.finish_reason is None:
        result.error, result.detail = "stream_truncated", "the stream ended without a finish reason or [DONE]"
    return result


def read_whole(answer: bytes, now: float) -> StreamResult:
    """Read an answer that was not streamed and came at ``now``: its text is one chunk."""
    result = StreamResult()
    _take(result, answer, now)
    return result


def _take(result: StreamResult, data: bytes, now: float) -> None:
    if data == b"[DONE]":
        result.done = True
        return
    try:
        chunk = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        result.error, result.detail = "bad_json", f"{error} in {data[:200]!r}"
        return
    if not isinstance(chunk, dict):
        result.error, result.detail = "bad_json", f"expected an object, got {data[:200]!r}"
        return
    if chunk.get("error"):
        result.error, result.detail = "stream_error", str(chunk["error"])[:300]
        return
    result.response_id = chunk.get("id") or result.response_id
    usage = chunk.get("usage")
    if usage:
        take_usage(result, usage)
    if timings := chunk.get("timings"):
        take_timings(result, timings)
    for choice in chunk.get("choices") or ():
        _take_choice(result, choice, now, says_tokens=bool(usage))


def _take_choice(result: StreamResult, choice: dict[str, Any], now: float, says_tokens: bool) -> None:
    if text := text_of(choice):
        result.chunks_s.append(now)
        if says_tokens and result.output_tokens is not None:
            result.chunk_tokens.append(result.output_tokens)
        result.text.append(text)
        result.end_s = now
    if choice.get("finish_reason"):
        result.finish_reason = choice["finish_reason"]
        result.end_s = now


def take_timings(result: StreamResult, timings: Any) -> None:
    """Keep a ``timings`` object, and what it says of drafting and of engines, if it says all of it. Other servers have
    a ``timings``, too."""
    result.timings = timings
    with suppress(msgspec.ValidationError):
        result.served = msgspec.convert(timings, _Route).route
    try:
        said = msgspec.convert(timings, _DraftTimings)
    except msgspec.ValidationError:
        return
    result.drafting = Drafting(
        said.drafted_tokens, said.accepted_tokens, said.draft_chains, said.draft_ms, said.decode_ms
    )


def take_usage(result: StreamResult, usage: dict[str, Any]) -> None:
    """Copy token counts from a ``usage`` object; those it lacks stay unknown."""
    result.prompt_tokens = usage.get("prompt_tokens", result.prompt_tokens)
    result.output_tokens = usage.get("completion_tokens", result.output_tokens)
    details = usage.get("prompt_tokens_details") or {}
    result.cached_tokens = details.get("cached_tokens", result.cached_tokens)
