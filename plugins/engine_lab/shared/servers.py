"""Engines as child processes on loopback, and what they take."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from socket import socket
from typing import Any

import aiohttp

Overrides = tuple[str, ...]
"""Of an engine's configuration."""
Key = tuple[Overrides, int]
"""An engine's overrides, and which of several with the same ones it is."""
START_S = 600.0
STOP_S = 60.0
POLL_S = 0.1
LAST_LINES = 12


class Refused(RuntimeError):
    """``engine serve`` did not start; the message is what it said."""


class Servers:
    """The engines that are resident now: those of one comparison. Only one has requests at a time."""

    def __init__(self, session: aiohttp.ClientSession, config_dirs: Sequence[str], logs: Path) -> None:
        """``logs``: a folder for what they print."""
        self._session, self._config_dirs, self._logs = session, config_dirs, logs
        self._running: dict[Key, tuple[asyncio.subprocess.Process, str]] = {}

    def running(self) -> frozenset[asyncio.subprocess.Process]:
        """The processes there are."""
        return frozenset(process for process, _ in self._running.values())

    async def keep(self, wanted: Sequence[Key]) -> list[str]:
        """Their URLs: starts those that do not run and stops all others first. Raises :class:`Refused`."""
        for key in [key for key in self._running if key not in wanted]:
            await self._stop(key)
        return [await self._url(key) for key in wanted]

    async def _url(self, key: Key) -> str:
        if key not in self._running:
            self._running[key] = await self._start(key[0])
        process, url = self._running[key]
        if process.returncode is not None:
            raise Refused(f"the engine of {' '.join(key[0])} ended with status {process.returncode}")
        return url

    async def _start(self, overrides: Overrides) -> tuple[asyncio.subprocess.Process, str]:
        port = _free_port()
        dirs = [word for path in self._config_dirs for word in ("--config-dir", path)]
        words = ("serve", *dirs, *overrides, "server.host=127.0.0.1", f"server.port={port}", "server.api_key=null")
        with tempfile.NamedTemporaryFile(dir=self._logs, suffix=".log", delete=False) as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "engine.cli.main",
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        url = f"http://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(START_S):
                while not await self._is_ready(url):
                    if process.returncode is not None:
                        raise Refused(last_lines(Path(log.name)))
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            await _end(process)
            raise Refused(f"not ready within {START_S:.0f} s: {last_lines(Path(log.name))}") from error
        except BaseException:
            await _end(process)
            raise
        return process, url

    async def _is_ready(self, url: str) -> bool:
        try:
            async with self._session.get(f"{url}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def _stop(self, key: Key) -> None:
        process, _ = self._running.pop(key)
        await _end(process)

    async def close(self) -> None:
        for key in list(self._running):
            await self._stop(key)


def facts_of(answer: dict[str, Any]) -> dict[str, float | None]:
    """What ``/engine/plan`` says an engine takes, in bytes, and how many KV tokens it keeps."""
    engine = answer["engine"]
    return {
        "weights_bytes": engine["weights_bytes"],
        "kv_bytes": engine["kv_bytes"],
        "kv_tokens": engine["kv_tokens"],
        "planned_bytes": engine["ledger"]["total_bytes"] if engine["ledger"] else None,
        "resident_bytes": None if engine.get("host") else resident_bytes(engine["pid"]),
    }


def resident_bytes(pid: int) -> int | None:
    """Memory of a process; ``None`` where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:")), None)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def last_lines(log: Path) -> str:
    """What an engine said last, without its log of requests."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines()]
    return "\n".join([line for line in lines if line and not line.startswith("{")][-LAST_LINES:])


def _free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
