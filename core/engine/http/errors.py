"""Errors over HTTP: a status code for each kind, and one JSON object of exactly four keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from aiohttp import web

from engine.service.errors import ApiError, Kind, Rejected

ErrorBody = Callable[[ApiError], bytes]
"""Makes the JSON of an error."""

STATUS: Mapping[Kind, int] = {
    "invalid": 400,
    "not_found": 404,
    "conflict": 409,
    "overloaded": 429,
    "failed": 500,
    "unavailable": 503,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_INVALID = (400, 404, 405, 408, 409, 413, 415, 417)


class HttpError(ApiError):
    """What only HTTP knows, with its status."""

    def __init__(self, status: int, message: str, *, code: str) -> None:
        super().__init__("invalid" if status < 500 else "failed", message, code=code)
        self.status = status


def status_of(error: ApiError) -> int:
    return error.status if isinstance(error, HttpError | Rejected) else STATUS[error.kind]


def error_body(error: ApiError) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}`` as UTF-8 JSON."""
    status = status_of(error)
    kind = "invalid_request_error" if status in _INVALID else _TYPES.get(status, "server_error")
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
    )


def error_response(error: ApiError, body: ErrorBody = error_body) -> web.Response:
    """``retry_after_s`` becomes the ``Retry-After`` header."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return web.Response(body=body(error), status=status_of(error), headers=headers, content_type="application/json")


def http_error_response(error: web.HTTPException, method: str, body: ErrorBody = error_body) -> web.Response:
    """What aiohttp refuses by itself, as this server's errors look."""
    if error.status == 404:
        shown: ApiError = ApiError("not_found", "There is no such path on this server.", code="not_found")
    elif error.status == 405:
        shown = HttpError(405, f"This path does not take {method[:16]}.", code="method_not_allowed")
    elif error.status == 417:
        shown = HttpError(417, "The only Expect header supported is 100-continue.", code="expectation_failed")
    else:
        shown = HttpError(error.status, error.reason or "The request failed.", code="http_error")
    response = error_response(shown, body)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
