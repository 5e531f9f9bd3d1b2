"""Files of requests that are answered while nobody waits."""

from __future__ import annotations

import os.path
from dataclasses import dataclass

from engine.contracts.config.checks import at_least


@dataclass(frozen=True)
class BatchSettings:
    """Files of requests that are answered while nobody waits: ``/v1/files``, ``/v1/batches``."""

    path: str = "auto"
    """Where files, batches and results lie: ``auto``: ``~/.local/state/engine/batches`` (below ``$XDG_STATE_HOME``
    where that is set), ``none``: there are no batches, or an absolute path. One server has it at a time."""
    max_file_bytes: int = 200 * 1024 * 1024
    """Most bytes of one uploaded file."""
    max_lines: int = 50_000
    """Most requests of one batch."""
    total_bytes: int = 10 * 1024**3
    """A tenant whose files, those with results included, have more bytes uploads no more."""
    max_in_flight: int | None = None
    """Most sequences of batches that run at once; null: an eighth of ``scheduler.max_requests`` of each
    engine."""
    quiet_s: float = 1.0
    """Lines begin once no request of a client has waited or run for so long."""

    def __post_init__(self) -> None:
        if self.path not in ("auto", "none") and not os.path.isabs(self.path):
            raise ValueError(f"batches.path={self.path}: expected auto, none or an absolute path")
        for name in ("max_file_bytes", "max_lines", "total_bytes"):
            at_least(f"batches.{name}", getattr(self, name), 1)
        if self.max_in_flight is not None:
            at_least("batches.max_in_flight", self.max_in_flight, 1)
        at_least("batches.quiet_s", self.quiet_s, 0)
