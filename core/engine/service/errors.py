"""Errors a client sees: one exception, whose kind every transport turns into its own code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from engine.contracts.constraint import CANNOT_FOLLOW
from engine.loop.messages import CauseOfDeath

Kind = Literal["invalid", "not_found", "conflict", "overloaded", "failed", "unavailable"]
"""``invalid``: what was asked cannot be served as it is. ``conflict``: not now, beside what runs. ``overloaded``: more
is asked than is taken at a time. ``failed``: this one request went wrong. ``unavailable``: no request is served now."""

_PRIVATE = re.compile(r"0x[0-9a-fA-F]+|(?:/[\w.\-]+){2,}")


class ApiError(Exception):
    """A refusal or failure. ``retry_after_s``: when it makes sense to ask again."""

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message
        self.param = param
        self.code = code
        # Some clients sleep however long they are told, so the value is kept within 1..30 s.
        self.retry_after_s = None if retry_after_s is None else max(1, min(30, retry_after_s))


class Rejected(ApiError):
    """A router refused the request."""

    def __init__(self, status: int, message: str, retry_after_s: int | None) -> None:
        """``status``: what the router answers over HTTP, from 400 to 599."""
        super().__init__(
            "invalid" if status < 500 else "unavailable", message, code="rejected", retry_after_s=retry_after_s
        )
        self.status = status


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """``invalid``: what the client sent cannot be served as it is."""
    return ApiError("invalid", message, param=param, code=code)


_DIED: Mapping[CauseOfDeath, str] = {
    "engine_dead": "The engine stopped",
    "engine_stalled": "The engine hung and was ended",
    "engine_closed": "The engine was ended by an operator",
    "rank_failed": "A rank of the engine failed",
    "device_failed": "The engine's device failed",
    "plugin_failed": "A plugin of the engine failed",
}


def engine_died(cause: CauseOfDeath = "engine_dead") -> ApiError:
    """``unavailable``: the engine ended under this request; unless on purpose, a new one is being started."""
    next_step = "send the request again" if cause == "engine_closed" else "it is being restarted"
    words = f"{_DIED[cause]} while it worked on this request; {next_step}."
    return ApiError("unavailable", words, code=cause, retry_after_s=5)


def engine_failed(detail: str) -> ApiError:
    """``failed``: the engine gave up on this one request; ``invalid`` where its grammar is to blame. ``detail`` loses
    addresses and paths on the way out."""
    line = _PRIVATE.sub("...", detail.splitlines()[0] if detail else "no detail given")
    if line.startswith(CANNOT_FOLLOW):
        return bad_request(f"{line[:1].upper()}{line[1:300]}.".replace("..", "."), code="invalid_grammar")
    return ApiError("failed", f"The engine failed on this request: {line[:300]}", code="generation_failed")
