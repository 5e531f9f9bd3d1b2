"""Files and batches as plain data, with the words of OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OVER = ("failed", "completed", "expired", "cancelled")
"""States in which nothing happens to a batch any more."""
Purpose = Literal["batch", "batch_output"]
WINDOW_S = 24 * 3600
"""The one completion window there is: ``24h``."""


class Problem(msgspec.Struct, frozen=True):
    """Why a batch failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """From 1."""


class File(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    """Whose it is; empty: keys are not told apart."""
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int

    def public(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in ("id", "bytes", "created_at", "filename", "purpose")}
        return {"object": "file", **shown, "status": "processed", "expires_at": None}


class Batch(msgspec.Struct, frozen=True):
    """Times are seconds since 1970."""

    id: str
    tenant: str
    model: str
    """Of the server that took it: others do not run it."""
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    max_sequences: int | None = None
    """As :attr:`engine.service.keys.Caller.max_sequences` of who sent it."""
    errors: tuple[Problem, ...] = ()
    total: int = 0
    """Lines of its file."""
    completed: int = 0
    failed: int = 0
    times: dict[str, int] = {}
    """When it came to each state, by ``STATUS_at``."""
    ends_as: Status = "completed"
    """What it is after ``finalizing`` or ``cancelling``."""
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def public(self, paused: str | None = None) -> dict[str, Any]:
        """``paused``: why it does not go on."""
        states = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        errors = [msgspec.to_builtins(each) for each in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{state}_at": self.times.get(f"{state}_at") for state in states},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
            **({"paused": paused} if paused and not self.is_over else {}),
        }
