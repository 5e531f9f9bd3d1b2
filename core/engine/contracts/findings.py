"""What a command finds wrong with a running engine, and what it reads for that."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class EngineReader(Protocol):
    """A running engine: over HTTP for a command, in its own server for the page at ``/ui/``. Of a server with several
    it is one of them, and everything read is of that one."""

    async def json(self, path: str) -> Any:
        """What ``GET path`` answers: ``/engine/plan``, ``/engine/stats``, ``/engine/counters``, ``/engine/latency``,
        ``/engine/requests?count=N`` or ``/engine/requests/ID``. Raises ``ValueError`` where it has no answer."""
        ...


class Finding(msgspec.Struct, frozen=True):
    cause: str
    says: str
    evidence: dict[str, list[float | None]] = {}
    """Numbers in order of time, by name."""
    overrides: list[str] = []
    """What may help."""
    replaces: list[str] = []
    """What the engine has instead."""
    advice: str = ""
    predicts: str = ""
    falsifier: str = ""
    first_seen_s: float = 0.0
    """Seconds since 1970; set by the server: when the first of the runs in a row that had this cause began."""
    last_seen_s: float = 0.0
    """When the last of them ended."""


class Findings(msgspec.Struct, frozen=True):
    findings: list[Finding]
    meanings: dict[str, str] = {}
    """Words, by name in ``evidence``."""
    notes: list[str] = []
    """Sentences."""
    began_s: float = 0.0
    """Seconds since 1970; set by the server, as ``ended_s``: what the command watched was between them."""
    ended_s: float = 0.0
