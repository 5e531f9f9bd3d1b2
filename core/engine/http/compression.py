"""Answers in fewer bytes, for clients that say ``Accept-Encoding`` (RFC 9110, 12.5.3).

gzip for everyone; zstd (RFC 8878), which takes a third of the time, where Python (3.14) or ``backports.zstd`` has it.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import zlib
from collections.abc import Callable, Collection
from functools import partial

from aiohttp import web

from engine.http.state import LISTENER

LEAST_BYTES = 1024
"""Smaller bodies fit into one packet as they are."""
INLINE_BYTES = 64 * 1024
"""Larger bodies take longer than a millisecond, so another thread codes them: both libraries let go of the
interpreter."""
GZIP_LEVEL, ZSTD_LEVEL = 4, 3
GZIP_BITS = 16 + 15
"""What zlib takes for gzip with the largest window."""
STREAM_BITS, STREAM_MEMORY = 16 + 13, 7
"""A stream's window of 8 KiB: 96 KiB of memory for each instead of 256, and 4 % more bytes."""
_WEIGHT = re.compile(r"q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)", re.IGNORECASE)

Coding = Callable[[bytes], bytes]


def _gzip(body: bytes) -> bytes:
    return zlib.compress(body, GZIP_LEVEL, GZIP_BITS)


def _zstd() -> Coding | None:
    for module in ("compression.zstd", "backports.zstd"):
        try:
            return partial(importlib.import_module(module).compress, level=ZSTD_LEVEL)
        except ImportError:
            continue
    return None


CODINGS: dict[str, Coding] = {name: code for name, code in (("zstd", _zstd()), ("gzip", _gzip)) if code is not None}
"""Codings by name, the preferred one first."""


async def compressed(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """A whole answer, in the coding that the client likes best if that is worth it. What is sent already, as streams
    and proxied answers are, and what has no body is left alone."""
    if not isinstance(response, web.Response) or not request.app[LISTENER].settings.compression:
        return response
    body = response.body
    if not isinstance(body, bytes):
        return response
    if request.method == "HEAD" or response.status in (204, 304) or "Content-Encoding" in response.headers:
        return response
    sent = accepted(request)
    is_small = len(body) < LEAST_BYTES
    if is_small and "q=0" not in sent:
        return response  # the usual case costs nothing
    name, must = negotiated(sent, CODINGS)
    if is_small and not must:
        return response
    response.headers["Vary"] = "Accept-Encoding"
    if name is not None:
        coded = CODINGS[name](body) if len(body) <= INLINE_BYTES else await asyncio.to_thread(CODINGS[name], body)
        if must or len(coded) < len(body):
            response.body = coded
            response.headers["Content-Encoding"] = name
    return response


def accepted(request: web.Request) -> str:
    """All ``Accept-Encoding`` fields as one, in lower case; none if they are no text."""
    sent = ",".join(request.headers.getall("Accept-Encoding", ()))
    return sent.lower() if sent.isascii() else ""


def negotiated(sent: str, codings: Collection[str]) -> tuple[str | None, bool]:
    """The coding to use, or ``None``, and whether the client refuses what is not coded.

    Where it accepts nothing that there is, it gets the answer as it is: better than none.
    """
    weights = _weights(sent)
    others = weights.get("*", 0.0)
    # Of two that are liked as much, one that is named wins over one that is only not excluded.
    ranked = [(weights.get(name, others), name in weights, -i, name) for i, name in enumerate(codings)]
    weight, _, _, best = max(ranked)
    if weight == 0 or weight < weights.get("identity", 0.0):
        return None, False
    return best, weights.get("identity", weights.get("*", 1.0)) == 0


def _weights(sent: str) -> dict[str, float]:
    """How much the client likes each coding, from 0 (not at all) to 1; what cannot be read is left out."""
    weights: dict[str, float] = {}
    for item in sent.split(","):
        name, _, parameter = (part.strip() for part in item.partition(";"))
        weight = _WEIGHT.fullmatch(parameter) if parameter else None
        if name and (weight or not parameter):
            weights[name] = float(weight[1]) if weight else 1.0
    return weights


class StreamCoder:
    """A stream as gzip: every piece can be read when it arrives."""

    name = "gzip"

    def __init__(self) -> None:
        self._coder = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, STREAM_BITS, STREAM_MEMORY)
        self._is_lost = False

    async def coded(self, piece: bytes, *, last: bool = False) -> bytes:
        """The bytes to send for ``piece``. Raises ``ConnectionError`` after a call that was cancelled: its bytes are
        missing, so that nobody could read what follows."""
        if self._is_lost:
            raise ConnectionResetError("a part of the stream was lost")
        if len(piece) <= INLINE_BYTES:
            return self._coded(piece, last)
        self._is_lost = True
        coded = await asyncio.to_thread(self._coded, piece, last)
        self._is_lost = False
        return coded

    def _coded(self, piece: bytes, last: bool) -> bytes:
        return self._coder.compress(piece) + self._coder.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)


def for_stream(request: web.Request) -> tuple[StreamCoder | None, dict[str, str]]:
    """What codes a stream, if the server is to and the client accepts it, and the headers that say so."""
    if not request.app[LISTENER].settings.compress_streams:
        return None, {}
    headers = {"Vary": "Accept-Encoding"}
    name, _ = negotiated(accepted(request), (StreamCoder.name,))
    if name is None:
        return None, headers
    return StreamCoder(), headers | {"Content-Encoding": name}
