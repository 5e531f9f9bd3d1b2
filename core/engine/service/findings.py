"""Commands that find what is wrong with an engine, run in the server's process for who asks: the page at ``/ui/``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from engine.assembly import values
from engine.contracts.command import CommandProvider
from engine.contracts.findings import EngineReader, Findings
from engine.plugin_guard.calls import error_line, quote
from engine.service.errors import ApiError

LIMIT_S = 180.0

log = structlog.get_logger("engine.findings")


class Finders:
    """Runs one command at a time. ``commands``: by the name that calls each."""

    def __init__(self, commands: Mapping[str, CommandProvider]) -> None:
        self.commands = commands
        self._running = ""

    async def run(self, name: str, engine: EngineReader) -> Findings:
        """What the command finds. Ends it if the caller is cancelled. Raises :class:`ApiError`: ``not_found`` for
        a command that finds nothing, ``conflict`` while one runs, ``failed`` where one fails."""
        if name not in self.commands:
            raise ApiError(
                "not_found", f"No command {name[:64]!r} has findings; GET /engine/findings lists those that do."
            )
        if self._running:
            raise ApiError("conflict", f"engine {self._running} is running already; ask again when it has ended.")
        self._running = name
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
        return found
