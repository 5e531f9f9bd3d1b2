"""What a gateway reads of a request's body: enough to place it. The rest is for the server that answers it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.contracts.router import UNIT_BYTES
from engine.service.errors import bad_request

MOST_CHOICES = 128
MOST_PROMPT_BYTES = 1024 * 1024
"""So many bytes of a prompt are made numbers, which take ten times the room. A longer one is placed like its
beginning."""
MOST_FIELDS = 1024
"""More than any API has. Each takes time, during which nothing else happens."""
SMALL_BYTES = 4096
"""Fields with more bytes are not shown to routers."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PROMPT = re.compile(rb'[\[,]\s*(?:"[^"]*"|\[[^\]]*\])\s*')
"""One of several: a text without escaped quotes, or a list of token ids, and what is before it."""


class Peek(msgspec.Struct, frozen=True):
    """Of one body."""

    model: str | None
    prompt: tuple[int, ...]
    """The bytes of the prompt's fields as they were sent, four to a number."""
    prompt_fields: Mapping[str, bytes]
    """The same as JSON, by name."""
    n: int
    """Sequences that are asked for: prompts times choices, :data:`MOST_CHOICES` at most."""
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
        if len(raw) > MOST_FIELDS:
            raise bad_request(f"The request has {len(raw)} fields, expected at most {MOST_FIELDS}.")
        if len(bytes(raw.get("model", b""))) > SMALL_BYTES:
            raise bad_request(f"model is longer than {SMALL_BYTES} bytes.", "model")
        small = {name: value for name, value in raw.items() if name not in prompt and len(bytes(value)) <= SMALL_BYTES}
        fields = {name: msgspec.json.decode(value) for name, value in small.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not a JSON object: {error}.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", code="invalid_value") from None
    prompts = {name: bytes(raw[name]) for name in prompt if name in raw}
    return Peek(
        model=_must_be(fields, "model", str, None),
        prompt=units(b"".join([value.rstrip(b"]") for value in prompts.values()])),
        prompt_fields=prompts,
        n=min(MOST_CHOICES, num_prompts(prompts.get("prompt", b"")) * max(1, _must_be(fields, "n", int, 1))),
        stream=_must_be(fields, "stream", bool, streams),
        user=_of(fields, "user", str, None),
        cache_salt=_of(fields, "cache_salt", str, ""),
        goes_on=fields.get("previous_response_id") is not None,
        fields=fields,
    )


def num_prompts(data: bytes) -> int:
    """In a field ``prompt`` as it was sent: one text or list of token ids, or a list of such. :data:`MOST_CHOICES` at
    most: no more of them are looked at."""
    count, at = 0, 0
    data = data.replace(rb"\\", b"").replace(rb"\"", b"")  # millions of them would take an expression long
    while count < MOST_CHOICES and (found := _PROMPT.match(data, at)) is not None:
        count, at = count + 1, found.end()
    return max(1, count)


def units(data: bytes) -> tuple[int, ...]:
    """The bytes of a prompt as numbers that stand for its tokens: at least one."""
    size = min(len(data), MOST_PROMPT_BYTES)
    whole = size - size % UNIT_BYTES
    return tuple(memoryview(data)[:whole].cast("I")) or (0,)


def _of(fields: Mapping[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    """``null`` is the default; what is of another type is for the server to refuse, which is asked for the default."""
    value = fields.get(name)
    return value if isinstance(value, kind) else default


def _must_be(fields: Mapping[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    """As :func:`_of`, but another type is refused here: servers that took it for one of this type would answer in a
    way that is not expected of them, which counts as a failure."""
    if not isinstance(fields.get(name), kind | None):
        raise bad_request(f"{name} has the wrong type.", name)
    return _of(fields, name, kind, default)
