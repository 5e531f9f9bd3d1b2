"""What a client is told where no target answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web

from engine.http.errors import HttpError
from engine.service.errors import ApiError
from engine.service.targets import Target

Failure = ApiError | web.Response
"""An error of the gateway, or what a target answered."""


ANSWER_FIELDS = frozenset({"choices", "output", "content", "done"})
"""What a whole answer has one of, by its API."""


class Elsewhere(Exception):
    """A target has not begun with the answer, and another one may."""

    def __init__(self, failure: Failure, *, broke: bool = False, again: bool = False) -> None:
        """``failure``: what the client is told if there is none. ``broke``: the target may have died of the request.
        ``again``: it may be tried again where there is no other, and is waited for."""
        super().__init__()
        self.failure = failure
        self.broke = broke
        self.again = again


def body_of(response: web.Response) -> bytes:
    assert isinstance(response.body, bytes)
    return response.body


def is_object(data: bytes) -> bool:
    """Whether that is a JSON object."""
    return _fields(data) is not None


def is_error(data: bytes) -> bool:
    """Whether that is a JSON object with an error and nothing of an answer."""
    found = _fields(data) or {}
    return bytes(found.get("error", b"null")) != b"null" and not ANSWER_FIELDS & found.keys()


def _fields(data: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def code_of(data: bytes) -> object:
    """The code of an error, if that is one with a code."""
    try:
        return msgspec.json.decode(data)["error"]["code"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return None


def words_for(failure: Failure) -> str:
    """Of the log."""
    return f"status {failure.status}" if isinstance(failure, web.Response) else str(failure)


def nobody(targets: Sequence[Target]) -> ApiError:
    reasons = ", ".join(f"{target.id}: {target.why_not}" for target in targets)
    if rests := [target.rests_s for target in targets if target.rests_s]:
        message = f"Targets asked for fewer requests ({reasons})."
        return ApiError("overloaded", message, code="rate_limit_exceeded", retry_after_s=max(1, round(min(rests))))
    return ApiError("unavailable", f"No target takes requests ({reasons}).", code="not_ready", retry_after_s=2)


def refused_key(target: Target, status: int) -> ApiError:
    """``status``: 401, 403, or 402 where its account is empty."""
    key = "gateway.key_env" if target.provider is None else f"gateway.providers.{target.id}.key_env"
    return HttpError(502, f"A target refused the gateway's key with {status} ({key}).", code="bad_gateway")


def unread() -> ConnectionError:
    return ConnectionResetError("the client does not read its stream")


def unreachable() -> ApiError:
    return HttpError(502, "The server for this request cannot be reached.", code="bad_gateway")


def broke_off() -> ApiError:
    return HttpError(502, "The server broke off while it answered this request.", code="bad_gateway")


def no_answer() -> ApiError:
    return HttpError(502, "The server answered this request with what is no answer.", code="bad_gateway")


def timed_out(why: str) -> ApiError:
    """``why``: as :attr:`engine.http.gateway.passing.Passing` has it."""
    if why == "silent":
        return HttpError(504, "The server that answers this request fell silent.", code="target_silent")
    if why == "late":
        return HttpError(504, "The request took longer than one may (gateway.total_s).", code="request_timeout")
    return HttpError(504, "No server began to answer this request in time.", code="target_timeout")
