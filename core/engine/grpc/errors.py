"""Errors over gRPC: a status code for each kind, and what else an error says as trailing metadata."""

from __future__ import annotations

from collections.abc import Mapping

from grpc import StatusCode

from engine.service.errors import ApiError, Kind, Rejected

STATUS: Mapping[Kind, StatusCode] = {
    "invalid": StatusCode.INVALID_ARGUMENT,
    "not_found": StatusCode.NOT_FOUND,
    "conflict": StatusCode.FAILED_PRECONDITION,
    "overloaded": StatusCode.RESOURCE_EXHAUSTED,
    "failed": StatusCode.INTERNAL,
    "unavailable": StatusCode.UNAVAILABLE,
}
HTTP_STATUS: Mapping[StatusCode, int] = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: 499,
    StatusCode.INTERNAL: 500,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
"""As ``google.rpc.Code`` maps them: metrics count refusals of all transports by one set of numbers."""
_OF_HTTP: Mapping[int, StatusCode] = {
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    429: StatusCode.RESOURCE_EXHAUSTED,
    501: StatusCode.UNIMPLEMENTED,
    504: StatusCode.DEADLINE_EXCEEDED,
}
"""What a router may refuse with."""


class GrpcError(ApiError):
    """What only gRPC knows, with its status."""

    def __init__(self, status: StatusCode, message: str, *, code: str) -> None:
        super().__init__("invalid" if HTTP_STATUS[status] < 500 else "failed", message, code=code)
        self.status = status


def unimplemented(message: str) -> GrpcError:
    return GrpcError(StatusCode.UNIMPLEMENTED, message, code="unimplemented")


def status_of(error: ApiError) -> StatusCode:
    if isinstance(error, GrpcError):
        return error.status
    if isinstance(error, Rejected):
        return _OF_HTTP.get(error.status, STATUS[error.kind])
    return STATUS[error.kind]


def trailing_metadata(error: ApiError) -> tuple[tuple[str, str], ...]:
    """``error-code`` and ``error-param`` as HTTP's errors have them, ``retry-after`` in seconds."""
    retry = None if error.retry_after_s is None else str(error.retry_after_s)
    param = error.param if error.param is None or error.param.isascii() else None
    found = {"error-code": error.code, "error-param": param, "retry-after": retry}
    return tuple((name, value) for name, value in found.items() if value)
