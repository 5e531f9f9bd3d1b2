"""What a provider's answer says of its tokens, which are paid for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from engine.contracts.config import ProviderSettings
from engine.http.gateway.reading import COMMENTS

MOST_HELD = 1024 * 1024
"""Bytes of an event that has no end: it is passed on unread."""
MOST_COMMENT_BYTES = 1024
"""Of comments that wait for nothing, though no blank line ends them."""
MOST_TOKENS = 2**40
"""An answer that says more, or fewer than none, says nothing."""
_END = re.compile(rb"\r?\n\r?\n")
_DATA = re.compile(rb"^data: ?(.*)$", re.MULTILINE)
_EMPTY = ([b"[]"], [b"[", b"]"])
T = TypeVar("T")
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class Usage(msgspec.Struct, frozen=True):
    """As the API of chats and completions has it."""

    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0

    def cost(self, provider: ProviderSettings) -> float:
        """In the currency of the prices."""
        input_cost = self.prompt_tokens * provider.input_price
        return (input_cost + self.completion_tokens * provider.output_price) / 1e6


def cost_of(usage: Usage | None, provider: ProviderSettings | None) -> float:
    """Of a target's answer; 0: it is no provider's, or says no usage."""
    return 0.0 if provider is None or usage is None else usage.cost(provider)


class _Answer(msgspec.Struct):
    """Its parts as they were written: of them all, only the usage is read."""

    usage: msgspec.Raw = msgspec.Raw(b"null")
    choices: msgspec.Raw = msgspec.Raw(b"null")


def usage_of(data: bytes) -> Usage | None:
    """Of an answer, or a chunk of one; ``None``: it says none that can be."""
    found = _decoded(data, _Answer)
    return None if found is None else _decoded(found.usage, Usage)


def asks_for_usage(fields: Mapping[str, Any]) -> bool:
    """Whether a client wants it in a stream."""
    options = fields.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


class UsageReader:
    """Reads a stream event by event, and leaves out the one for which only the gateway asked."""

    def __init__(self, hides: bool) -> None:
        """``hides``: the client has not asked for usage."""
        self._hides = hides
        self._held = bytearray()
        self.usage: Usage | None = None

    def feed(self, piece: bytes) -> bytes:
        """What is passed on now: whole events."""
        seen = max(0, len(self._held) - 3)  # an end may begin there
        self._held += piece
        events, begin = list[bytes](), 0
        for end in _END.finditer(self._held, seen):
            events.append(bytes(self._held[begin : end.end()]))
            begin = end.end()
        del self._held[:begin]
        is_comment = len(self._held) <= MOST_COMMENT_BYTES and COMMENTS.fullmatch(self._held) is not None
        if is_comment or len(self._held) > MOST_HELD:
            events.append(bytes(self._held))
            self._held.clear()
        return b"".join([event for event in events if not self._is_hidden(event)])

    def end(self) -> bytes:
        """What is left at the end of the stream."""
        held = bytes(self._held)
        self._held.clear()
        return b"" if self._is_hidden(held) else held

    def _is_hidden(self, event: bytes) -> bool:
        if b'"usage"' not in event or (data := _DATA.search(event)) is None:
            return False
        found = _decoded(data.group(1), _Answer)
        if found is None or not bytes(found.usage).startswith(b"{"):
            return False
        self.usage = _decoded(found.usage, Usage) or self.usage
        return self._hides and b"[DONE]" not in event and bytes(found.choices).split() in _EMPTY


def _decoded(data: bytes | msgspec.Raw, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
