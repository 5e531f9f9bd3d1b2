"""Commands that find what is wrong with an engine, run in the server's process for who asks: the page at ``/ui/``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import structlog
from msgspec.structs import replace

from engine.assembly import values
from engine.contracts.command import CommandProvider
from engine.contracts.findings import EngineReader, Findings
from engine.plugin_guard.calls import error_line, quote
from engine.service.errors import ApiError

LIMIT_S = 180.0

log = structlog.get_logger("engine.findings")


class Finders:
    """Runs one command at a time. ``commands``: by the name that calls each."""

    def __init__(self, commands: Mapping[str, CommandProvider], clock: Callable[[], float] = time.time) -> None:
        """``clock``: in seconds since 1970."""
        self.commands = commands
        self._clock = clock
        self._running = ""
        self._latest: dict[tuple[str, str], Findings] = {}

    def latest(self, name: str, engine_id: str) -> Findings | None:
        """What the command found of an engine when it last ran."""
        return self._latest.get((name, engine_id))

    async def run(self, name: str, engine: EngineReader, engine_id: str) -> Findings:
        """What the command finds, and when. Ends it if the caller is cancelled. Raises :class:`ApiError`: ``not_found``
        for a command that finds nothing, ``conflict`` while one runs, ``failed`` where one fails."""
        if name not in self.commands:
            raise ApiError(
                "not_found", f"No command {name[:64]!r} has findings; GET /engine/findings lists those that do."
            )
        if self._running:
            raise ApiError("conflict", f"engine {self._running} is running already; ask again when it has ended.")
        self._running = name
        began_s = self._clock()
        try:
            async with asyncio.timeout(LIMIT_S):
                found = await values.load(self.commands[name].finds)(engine)
        except TimeoutError:
            raise ApiError("failed", f"engine {name} did not end within {LIMIT_S:.0f} s.") from None
        except Exception as error:  # a plugin may fail in any way; it is named
            log.warning("command failed", command=name, exc_info=error)
            raise ApiError("failed", f"engine {name}: {error_line(error)}") from error
        finally:
            self._running = ""
        if not isinstance(found, Findings):
            raise ApiError("failed", f"engine {name} returned {quote(found)}, expected Findings.")
        before = self._latest.get((name, engine_id))
        found = self._latest[name, engine_id] = _timed(found, before, began_s, self._clock())
        return found


def _timed(found: Findings, before: Findings | None, began_s: float, ended_s: float) -> Findings:
    """``before``: of the run before."""
    seen = {each.cause: each.first_seen_s for each in before.findings} if before else {}
    findings = [
        replace(each, first_seen_s=seen.get(each.cause, began_s), last_seen_s=ended_s) for each in found.findings
    ]
    return replace(found, findings=findings, began_s=began_s, ended_s=ended_s)
