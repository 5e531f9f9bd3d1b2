"""What the translations of other APIs' requests to chats share."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.service.errors import bad_request
from engine.service.protocol import CommonOptions, ContentPart, Function, Message, Tool


def common(request: CommonOptions) -> dict[str, Any]:
    """The fields that every API has."""
    return {name: getattr(request, name) for name in CommonOptions.__struct_fields__}


def required(value: str | None, at: str) -> str:
    """Raises :class:`ApiError` ``invalid`` for a field that is missing, or empty."""
    if not value:
        raise bad_request(f"Missing required field {at!r}.", at, "missing_required_parameter")
    return value


def function_tool(at: str, **fields: Any) -> Tool:
    """``fields``: of :class:`Function`. Raises :class:`ApiError` ``invalid`` naming the tool ``at``."""
    try:
        return Tool("function", msgspec.convert(fields, Function))
    except msgspec.ValidationError as error:
        raise bad_request(f"Invalid value for {at!r}: {error}.", at, "invalid_value") from None


def system_first(messages: list[Message]) -> list[Message]:
    """What the system says before anybody speaks, as one message: chat templates take one."""
    count = next((i for i, each in enumerate(messages) if each.role not in ("system", "developer")), len(messages))
    parts: list[ContentPart] = []
    for message in messages[:count]:
        content = message.content or ""
        parts += [ContentPart("text", content)] if isinstance(content, str) else content
    if count < 2:
        return messages
    if any(part.text is None for part in parts):
        return [Message("system", list(parts)), *messages[count:]]  # it is refused for its other parts
    return [Message("system", "\n\n".join([part.text or "" for part in parts])), *messages[count:]]
