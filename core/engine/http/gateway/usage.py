"""What a provider's answer says of its tokens, which are paid for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.contracts.config import ProviderSettings

MOST_HELD = 1024 * 1024
"""Bytes of an event that has no end: it is passed on unread."""
_END = re.compile(rb"\r?\n\r?\n")
_DATA = re.compile(rb"^data: ?(.*)$", re.MULTILINE)


class Usage(msgspec.Struct, frozen=True):
    """As the API of chats and completions has it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def cost(self, provider: ProviderSettings) -> float:
        """In the currency of the prices."""
        input_cost = self.prompt_tokens * provider.input_price
        return (input_cost + self.completion_tokens * provider.output_price) / 1e6


class _Answer(msgspec.Struct):
    usage: Usage | None = None
    choices: list[Any] | None = None


def usage_of(data: bytes) -> Usage | None:
    """Of an answer, or a chunk of one; ``None``: it says none."""
    found = _decoded(data)
    return None if found is None else found.usage


def asks_for_usage(fields: Mapping[str, Any]) -> bool:
    """Whether a client wants it in a stream."""
    options = fields.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


class UsageReader:
    """Reads a stream event by event, and leaves out the one for which only the gateway asked."""

    def __init__(self, hides: bool) -> None:
        """``hides``: the client has not asked for usage."""
        self._hides = hides
        self._held = b""
        self.usage: Usage | None = None

    def feed(self, piece: bytes) -> bytes:
        """What is passed on now: whole events."""
        data = self._held + piece
        *events, self._held = _split(data)
        if len(self._held) > MOST_HELD:
            events.append(self._held)
            self._held = b""
        return b"".join([event for event in events if not self._is_hidden(event)])

    def end(self) -> bytes:
        """What is left at the end of the stream."""
        held, self._held = self._held, b""
        return b"" if self._is_hidden(held) else held

    def _is_hidden(self, event: bytes) -> bool:
        if b'"usage"' not in event or (data := _DATA.search(event)) is None:
            return False
        found = _decoded(data.group(1))
        if found is None or found.usage is None:
            return False
        self.usage = found.usage
        return self._hides and found.choices == []


def _split(data: bytes) -> list[bytes]:
    """Events with their ends, and what follows the last end."""
    parts, begin = list[bytes](), 0
    for end in _END.finditer(data):
        parts.append(data[begin : end.end()])
        begin = end.end()
    return [*parts, data[begin:]]


def _decoded(data: bytes) -> _Answer | None:
    try:
        return msgspec.json.decode(data, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
