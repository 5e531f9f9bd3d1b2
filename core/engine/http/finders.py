"""Commands that read this engine and print findings, run beside it for who asks: the page at ``/ui/``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping

import msgspec

from engine.contracts.command import CommandProvider
from engine.service.errors import ApiError

LIMIT_S = 180.0
END_S = 5.0
"""How long a command that was killed may take to be gone."""
MOST_BYTES = 1 << 20
"""Of what a command prints."""
MOST_SAID = 500
"""Characters of what a command says of its failure."""
COMMAND = (sys.executable, "-P", "-m", "engine.cli.main")


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
            return await self._run(name, url)
        finally:
            self._running = ""

    async def _run(self, name: str, url: str) -> bytes:
        words = (*COMMAND, name, *self.commands[name].finds_with, "--url", url)
        key = {} if self._api_key is None else {"ENGINE_API_KEY": self._api_key}
        process = await asyncio.create_subprocess_exec(
            *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=os.environ | key, start_new_session=True
        )
        assert process.stdout is not None and process.stderr is not None
        try:
            async with asyncio.timeout(LIMIT_S):
                out, said = await asyncio.gather(_all_of(process.stdout), _end_of(process.stderr))
                code = await process.wait()
        except TimeoutError:
            raise ApiError(500, f"engine {name} did not end within {LIMIT_S:.0f} s.") from None
        except OverflowError:
            raise ApiError(500, f"engine {name} printed more than {MOST_BYTES} bytes.") from None
        finally:
            await _end(process)
        if code:
            raise ApiError(500, said or f"engine {name} ended with {code}.")
        try:
            msgspec.json.decode(out, type=Printed)
        except msgspec.MsgspecError as error:
            raise ApiError(500, f"engine {name} printed no findings: {error}.") from None
        return out


class Printed(msgspec.Struct):
    """What the page reads of what a command prints; there may be more."""

    findings: list[Finding]
    meanings: dict[str, str] = {}
    notes: list[str] = []


class Finding(msgspec.Struct):
    cause: str
    says: str
    evidence: dict[str, list[float | None]] = {}
    overrides: list[str] = []
    replaces: list[str] = []
    advice: str = ""
    predicts: str = ""
    falsifier: str = ""


async def _all_of(stream: asyncio.StreamReader) -> bytes:
    """Raises ``OverflowError`` beyond :data:`MOST_BYTES`."""
    found = bytearray()
    while part := await stream.read(1 << 16):
        found += part
        if len(found) > MOST_BYTES:
            raise OverflowError
    return bytes(found)


async def _end_of(stream: asyncio.StreamReader) -> str:
    """The last line."""
    kept = b""
    while part := await stream.read(1 << 16):
        kept = (kept + part)[-4 * MOST_SAID :]
    lines = kept.decode(errors="replace").strip().splitlines()
    return lines[-1][-MOST_SAID:] if lines else ""


async def _end(process: Process) -> None:
    """The command, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_S)
