"""Commands that read this engine and print findings, run beside it for who asks: the page at ``/ui/``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping

import msgspec

from engine.contracts.command import CommandProvider
from engine.service.errors import ApiError

LIMIT_S = 180.0
MOST_BYTES = 1 << 20
"""Of what a command prints."""
COMMAND = (sys.executable, "-m", "engine.cli.main")


class Finders:
    """Runs one command at a time. ``commands``: by the name that calls each; ``api_key``: what the server asks for."""

    def __init__(self, commands: Mapping[str, CommandProvider], api_key: str | None) -> None:
        self.commands = commands
        self._api_key = api_key
        self._running = ""

    async def run(self, name: str, url: str) -> bytes:
        """The JSON that the command printed about the engine at ``url``. Ends the command if the caller is cancelled.
        Raises :class:`ApiError`: 404 for a command that finds nothing, 409 while one runs, 500 where one fails."""
        if name not in self.commands:
            raise ApiError(404, f"No command {name[:64]!r} prints findings; GET /engine/findings lists those that do.")
        if self._running:
            raise ApiError(409, f"engine {self._running} is running already; ask again when it has ended.")
        self._running = name
        try:
            return await self._printed(name, url)
        finally:
            self._running = ""

    async def _printed(self, name: str, url: str) -> bytes:
        words = (*COMMAND, name, *self.commands[name].finds_with, "--url", url)
        key = {} if self._api_key is None else {"ENGINE_API_KEY": self._api_key}
        environment = os.environ | key
        process = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=PIPE, env=environment)
        try:
            async with asyncio.timeout(LIMIT_S):
                out, err = await process.communicate()
        except TimeoutError:
            raise ApiError(500, f"engine {name} did not end within {LIMIT_S:.0f} s.") from None
        finally:
            await _ended(process)
        if process.returncode or len(out) > MOST_BYTES:
            said = err.decode(errors="replace").strip().splitlines()
            raise ApiError(500, said[-1] if said else f"engine {name} ended with {process.returncode}.")
        try:
            msgspec.json.decode(out, type=Printed)
        except msgspec.MsgspecError as error:
            raise ApiError(500, f"engine {name} printed no findings: {error}.") from None
        return out


class Printed(msgspec.Struct):
    """What the page reads of each finding; there may be more."""

    findings: list[Finding]


class Finding(msgspec.Struct):
    cause: str
    says: str
    evidence: dict[str, list[float]] = {}
    overrides: list[str] = []
    advice: str = ""
    falsifier: str = ""


async def _ended(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.shield(process.wait())
