"""What a gateway reads of a request's body: enough to place it. The rest is for the server that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.contracts.router import UNIT_BYTES
from engine.service.errors import bad_request

MOST_CHOICES = 128
SMALL_BYTES = 4096
"""Fields with more bytes are not shown to routers."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Peek(msgspec.Struct, frozen=True):
    """Of one body."""

    model: str | None
    prompt: tuple[int, ...]
    """The bytes of the prompt's fields as they were sent, four to a number."""
    n: int
    """Answers that are asked for."""
    stream: bool
    user: str | None
    cache_salt: str
    goes_on: bool
    """From a response that is stored at the server that made it."""
    fields: dict[str, Any]
    """The other fields that are small."""


def peek(body: bytes, prompt: Sequence[str], *, streams: bool = False) -> Peek:
    """``prompt``: the names of the fields that are the prompt, in the order in which a model reads them. ``streams``:
    unless the body says otherwise. Raises :class:`ApiError` ``invalid``."""
    try:
        raw = _fields.decode(body)
        small = {name: value for name, value in raw.items() if name not in prompt and len(bytes(value)) <= SMALL_BYTES}
        fields = {name: msgspec.json.decode(value) for name, value in small.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not a JSON object: {error}.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", code="invalid_value") from None
    return Peek(
        model=_of(fields, "model", str, None),
        prompt=units(b"".join([bytes(raw[name]).rstrip(b"]") for name in prompt if name in raw])),
        n=max(1, min(MOST_CHOICES, _of(fields, "n", int, 1))),
        stream=_of(fields, "stream", bool, streams),
        user=_of(fields, "user", str, None),
        cache_salt=_of(fields, "cache_salt", str, ""),
        goes_on=fields.get("previous_response_id") is not None,
        fields=fields,
    )


def units(data: bytes) -> tuple[int, ...]:
    """The bytes of a prompt as numbers that stand for its tokens: at least one."""
    whole = len(data) - len(data) % UNIT_BYTES
    return tuple(memoryview(data)[:whole].cast("I")) or (0,)


def _of(fields: Mapping[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    """``null`` is the default; what is of another type is for the server to refuse, which is asked for the default."""
    value = fields.get(name)
    return value if isinstance(value, kind) else default
