"""The child that parses large request bodies: ``python -m engine.service.body_child``.

JSON of a few megabytes keeps an interpreter busy for up to a second, whatever thread it is parsed in.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, get_args

import msgspec

from engine.service.errors import ApiError, Kind
from engine.service.parsing import Limits, Parsed, parse
from engine.service.sandbox import child

KINDS: tuple[Any, ...] = get_args(Parsed)


TOO_MUCH = "The request is nested too deeply, or has an integer beyond 64 bits."


class Question(msgspec.Struct, frozen=True, array_like=True):
    """A frame to the child. ``kind``: an index into :data:`KINDS`."""

    kind: int
    limits: Limits
    body: bytes


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """What becomes an :class:`ApiError`."""

    kind: Kind
    message: str
    param: str | None
    code: str | None


Reply = Parsed | Refusal


def answer(frame: bytes) -> bytes:
    question = msgspec.msgpack.decode(frame, type=Question)
    try:
        return msgspec.msgpack.encode(parse(KINDS[question.kind], question.body, question.limits))
    except ApiError as error:
        return msgspec.msgpack.encode(Refusal(error.kind, error.message, error.param, error.code))
    except (RecursionError, OverflowError):
        return msgspec.msgpack.encode(Refusal("invalid", TOO_MUCH, None, "invalid_value"))


def rehearse() -> None:
    limits = Limits("", 1, 2, 2, 2)
    for body in (b'{"messages":[{"role":"user","content":"a"}]}', b'{"a":1}', b"[", b"\xff"):
        answer(msgspec.msgpack.encode(Question(0, limits, body)))
    gc.disable()  # what is parsed has no cycles, and looking for them would take most of the time


if __name__ == "__main__":
    sys.exit(child.main(answer, rehearse))
