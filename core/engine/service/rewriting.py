"""The body of a request as another server wants it: its name of the model, without fields that it refuses."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def rewritten(body: bytes, *, model: str, drop: Collection[str] = (), usage: bool = False) -> bytes:
    """``body``: a JSON object, whose other values stay as they were written. ``usage``: a stream shall end with it."""
    fields = {name: value for name, value in _fields.decode(body).items() if name not in drop}
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    if usage:
        options = msgspec.json.decode(fields.get("stream_options", b"null"))
        options = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        fields["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
    return msgspec.json.encode(fields)
