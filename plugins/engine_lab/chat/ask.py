"""One question, and its answer as it comes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from engine_lab.bench.stream import StreamResult, read_stream
from engine_lab.bench.target import Target, pieces

clock = time.perf_counter


class AskError(RuntimeError):
    """There is no answer, or not all of it; the message says why."""


@dataclass(slots=True)
class Answer:
    """What came so far. Cut short by Ctrl-C it stays as it is."""

    asked_s: float
    said: StreamResult = field(default_factory=StreamResult)

    @property
    def text(self) -> str:
        return "".join(self.said.text)

    @property
    def ttft_s(self) -> float | None:
        return self.said.chunks_s[0] - self.asked_s if self.said.chunks_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """After the first chunk; ``None`` before there are two, and for servers that count no tokens."""
        said = self.said
        if len(said.chunks_s) < 2 or len(said.chunk_tokens) < 2 or said.chunks_s[-1] <= said.chunks_s[0]:
            return None
        return (said.chunk_tokens[-1] - said.chunk_tokens[0]) / (said.chunks_s[-1] - said.chunks_s[0])


async def ask(
    session: aiohttp.ClientSession, target: Target, body: dict[str, Any], answer: Answer, shown: Callable[[], None]
) -> None:
    """Fills ``answer`` and calls ``shown`` whenever there is more of it. Leaving it early ends the request. Raises
    :class:`AskError`."""
    try:
        async with session.post(target.url, data=msgspec.json.encode(body), headers=target.headers) as response:
            if response.status != 200:
                raise AskError(_message(response.status, await response.read()))
            await read_stream(_shown(pieces(response), shown), clock, answer.said)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise AskError(f"{target.base_url}: {error or 'timed out'}") from error
    if answer.said.error:
        raise AskError(f"{answer.said.error}: {answer.said.detail}")


async def _shown(given: AsyncIterator[bytes], shown: Callable[[], None]) -> AsyncIterator[bytes]:
    async for piece in given:
        yield piece
        shown()  # the reader has taken it


def _message(status: int, body: bytes) -> str:
    """What an error object says, or else the start of the body."""
    try:
        return f"{status}: {msgspec.json.decode(body)['error']['message']}"
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"{status}: {body[:200].decode('utf-8', 'replace')}"
