"""Errors a client sees: one exception, one JSON object of exactly four keys."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from engine.loop.messages import CauseOfDeath

_PRIVATE = re.compile(r"0x[0-9a-fA-F]+|(?:/[\w.\-]+){2,}")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A refusal or failure with its HTTP status. ``retry_after_s`` becomes the ``Retry-After`` header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        # Some clients sleep however long they are told, so the value is kept within 1..30 s.
        self.retry_after_s = None if retry_after_s is None else max(1, min(30, retry_after_s))

    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}`` as UTF-8 JSON."""
        kind = _KINDS.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: what the client sent cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


_DIED: Mapping[CauseOfDeath, str] = {
    "engine_dead": "The engine stopped",
    "engine_stalled": "The engine hung and was ended",
    "rank_failed": "A rank of the engine failed",
    "device_failed": "The engine's device failed",
    "plugin_failed": "A plugin of the engine failed",
}


def engine_died(cause: CauseOfDeath = "engine_dead") -> ApiError:
    """503: the engine ended under this request; a new one is being started."""
    words = f"{_DIED[cause]} while it worked on this request; it is being restarted."
    return ApiError(503, words, code=cause, retry_after_s=5)


def engine_failed(detail: str) -> ApiError:
    """500: the engine gave up on this one request. ``detail`` loses addresses and paths on the way out."""
    line = _PRIVATE.sub("...", detail.splitlines()[0] if detail else "no detail given")
    return ApiError(500, f"The engine failed on this request: {line[:300]}", code="generation_failed")
