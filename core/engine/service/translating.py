"""What the translations of other APIs' requests to chats share."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Any

import msgspec

from engine.service.errors import bad_request
from engine.service.protocol import (
    CacheBreakpoint,
    CacheControl,
    CommonOptions,
    ContentPart,
    Function,
    Message,
    Tool,
)

BETWEEN = "\n\n"
"""Stands between what the system says in several messages or blocks."""
Mark = tuple[int | None, CacheControl | CacheBreakpoint]
"""After how many characters of a message's text a beginning of the prompt ends that is to stay cached; ``None``: after
all of the message."""


def common(request: CommonOptions) -> dict[str, Any]:
    """The fields that every API has."""
    return {name: getattr(request, name) for name in CommonOptions.__struct_fields__}


def required(value: str | None, at: str) -> str:
    """Raises :class:`ApiError` ``invalid`` for a field that is missing, or empty."""
    if not value:
        raise bad_request(f"Missing required field {at!r}.", at, "missing_required_parameter")
    return value


def function_tool(at: str, cache_control: CacheControl | None = None, **fields: Any) -> Tool:
    """``fields``: of :class:`Function`. Raises :class:`ApiError` ``invalid`` naming the tool ``at``."""
    try:
        return Tool("function", msgspec.convert(fields, Function), cache_control)
    except msgspec.ValidationError as error:
        raise bad_request(f"Invalid value for {at!r}: {error}.", at, "invalid_value") from None


class Joined(Message):
    """A message whose text was several."""

    marks: list[Mark] = msgspec.field(default_factory=list)


def marks_of(message: Message) -> list[Mark]:
    """In the order of its text."""
    found: list[Mark] = list(message.marks) if isinstance(message, Joined) else []
    if isinstance(message.content, list):
        at = 0
        for part in message.content:
            at += len(part.text or "")
            found += [(at, words) for words in (part.cache_control, part.prompt_cache_breakpoint) if words is not None]
    if message.cache_control is not None:
        found.append((None, message.cache_control))
    return found


def system_first(messages: list[Message]) -> list[Message]:
    """What the system says before anybody speaks, as one message: chat templates take one."""
    count = next((i for i, each in enumerate(messages) if each.role not in ("system", "developer")), len(messages))
    parts: list[ContentPart] = []
    for message in messages[:count]:
        parts += _parts(message)
    if count < 2:
        return messages
    if any(part.text is None for part in parts):
        return [Message("system", list(parts)), *messages[count:]]  # it is refused for its other parts
    marks: list[Mark] = []
    at = 0
    for message in messages[:count]:
        ends = list(accumulate([len(part.text or "") for part in _parts(message)])) or [0]
        for chars, words in marks_of(message):
            end = ends[-1] if chars is None else chars
            marks.append((at + end + len(BETWEEN) * bisect_left(ends, end), words))
        at += ends[-1] + len(BETWEEN) * len(_parts(message))
    return [Joined("system", BETWEEN.join([part.text or "" for part in parts]), marks=marks), *messages[count:]]


def _parts(message: Message) -> list[ContentPart]:
    content = message.content or ""
    return [ContentPart("text", content)] if isinstance(content, str) else content
