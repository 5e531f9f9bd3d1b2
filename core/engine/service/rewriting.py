"""The body of a request as another server wants it: its name of the model, without fields that it refuses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def rewritten(body: bytes, fields: Mapping[str, Any], *, drop: Collection[str] = (), usage: bool = False) -> bytes:
    """``body``: a JSON object. Its values stay as they were written but for ``fields``, which it gets. ``usage``: a
    stream shall end with it."""
    found = {name: value for name, value in _fields.decode(body).items() if name not in drop}
    found |= {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    if usage:
        found["stream_options"] = _with_usage(found.get("stream_options", msgspec.Raw(b"null")))
    return msgspec.json.encode(found)


def _with_usage(options: msgspec.Raw) -> msgspec.Raw:
    """What is no object stays, for the other server to refuse."""
    try:
        found = msgspec.json.decode(options, type=dict[str, msgspec.Raw] | None) or {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return options
    return msgspec.Raw(msgspec.json.encode({**found, "include_usage": True}))
