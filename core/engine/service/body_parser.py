"""Parsing request bodies without holding up the event loop: small ones at once, large ones in a sandbox."""

from __future__ import annotations

import msgspec

from engine.service.body_child import KINDS, TOO_MUCH, Question, Refusal, Reply
from engine.service.errors import ApiError, bad_request
from engine.service.one_at_a_time import OneAtATime
from engine.service.parsing import Limits, P, parse
from engine.service.sandbox.process import LimitBroken, Sandbox

SMALL_BYTES = 64 * 1024
"""Smaller bodies are parsed at once: that takes at most about 10 ms, and 0.1 ms for what people send."""
MOST_BYTES = 128 * 1024 * 1024
"""Bytes of all bodies that may wait to be parsed."""
CPU_S = 10.0
MEMORY_MB = 1024


class BodyParser:
    """Starts its process with the first large body. Use on the event loop's thread."""

    def __init__(self) -> None:
        self._sandbox = Sandbox("engine.service.body_child", MEMORY_MB)
        self._decode = msgspec.msgpack.Decoder(Reply).decode
        self._alone = OneAtATime("JSON", MOST_BYTES)

    async def parse(self, kind: type[P], body: bytes, limits: Limits, client: str = "") -> P:
        """See :func:`engine.service.parsing.parse`; clients take turns. Raises :class:`ApiError`, and ``SandboxEnded``
        for what the body is not to blame for."""
        if len(body) <= SMALL_BYTES:
            return parse(kind, body, limits)
        question = Question(KINDS.index(kind), limits, body)
        try:
            async with self._alone.hold(client, len(body)):  # one copy of a large body at a time
                frame = msgspec.msgpack.encode(question)
                reply = self._decode(await self._sandbox.ask(frame, CPU_S, 4096 + 8 * len(body)))
        except LimitBroken as error:
            raise bad_request(f"The request body cannot be parsed: that {error}.") from None
        except RecursionError:
            raise bad_request(TOO_MUCH, code="invalid_value") from None
        if isinstance(reply, Refusal):
            raise ApiError(reply.kind, reply.message, param=reply.param, code=reply.code)
        assert isinstance(reply, kind)
        return reply

    def close(self) -> None:
        self._sandbox.close()
