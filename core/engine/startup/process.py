"""An engine in a process of its own, on this machine or where a launcher finds one.

Frames are msgpack messages (see :mod:`engine.loop.messages`), each after its length. The first one to an engine on this
machine is the plan as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping

import msgspec

from engine.assembly.plan import EnginePlan
from engine.loop.client import EngineDead
from engine.loop.messages import (
    MAX_FRAME,
    EngineInfo,
    FromEngine,
    Ping,
    Progress,
    ResetPrefixCache,
    Shutdown,
    ToEngine,
)
from engine.loop.streams import ClientBase
from engine.startup.engine_process import HEADER, EngineProcess, LocalProcess
from engine.startup.launched import LaunchedProcess
from engine.startup.segments import Segments

CLOSE_TIMEOUT_S = 5.0
"""How long a process may take to end by itself. Whoever limits the time of :meth:`ProcessEngineClient.close` must give
more than this: a close that is cut off cannot kill."""
CLOSED = "the engine was closed"


class ProcessEngineClient(ClientBase):
    """See :class:`engine.loop.client.EngineClient`. May be started again after the engine died."""

    def __init__(
        self, plan: EnginePlan, environment: Mapping[str, str] | None = None, segments: Segments | None = None
    ) -> None:
        """``environment``: variables of the process, beside those of this one, where it is on this machine;
        ``segments``: memory that outlives the process."""
        super().__init__()
        self._plan = plan
        self._environment = environment or {}
        self._segments = segments
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._process: EngineProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._killed = ""
        """Why this process was killed from here."""
        self._closed = False
        """This process was ended from here on purpose."""
        self._secret = secrets.token_urlsafe(16)

    async def start(self, on_progress: Callable[[Progress], None] | None = None) -> EngineInfo:
        await self._reap()
        self._killed = self.own_words = ""
        self._closed = False
        self._ready, self._on_progress = asyncio.get_running_loop().create_future(), on_progress
        process = self._process = self._begin()
        connection = await process.connect(self.deliver)
        if connection is None:
            await self._ended(process)
        else:
            reader, self._writer = await asyncio.open_connection(sock=connection, limit=2**20)
            self._reading = asyncio.create_task(self._read(reader, process))
        return await self._ready

    def _begin(self) -> EngineProcess:
        if self._plan.launcher is not None:
            return LaunchedProcess(self._plan)
        return LocalProcess(self._plan, self._environment, self._secret, self._segments)

    def send(self, message: ToEngine) -> None:
        self._write(self._encode(message))

    def ping(self) -> None:
        with contextlib.suppress(EngineDead):
            self.send(Ping())

    def kill(self, why: str) -> None:
        if self._process is not None:
            self._killed = why
            self._process.abort()

    async def reset_prefix_cache(self) -> None:
        self.send(ResetPrefixCache())

    async def close(self) -> None:
        self._closed = True
        if self._writer is not None and not self._writer.is_closing():
            self.send(Shutdown())
            self._writer.close()
        await self._reap()
        self.died(CLOSED, cause="engine_closed")

    def _write(self, body: bytes) -> None:
        if self._writer is None or self._writer.is_closing():
            raise EngineDead("the engine is not running")
        self._writer.write(HEADER.pack(len(body)) + body)

    async def _read(self, reader: asyncio.StreamReader, process: EngineProcess) -> None:
        """Deliver messages until the connection ends, which is how an engine's death shows."""
        try:
            while (body := await _next_frame(reader)) is not None:
                self.deliver(self._decode(body))
            await self._ended(process)
        except Exception as error:
            # Unreadable frames, or a callback that raised: nothing can be delivered any more, so the engine is given
            # up rather than left looking alive.
            process.kill()
            self.died(f"messages of the engine process could not be taken in: {type(error).__name__}: {error}")
        if self._writer is not None:
            self._writer.close()

    async def _ended(self, process: EngineProcess) -> None:
        how = await process.ended()
        if self._closed:
            self.died(CLOSED, cause="engine_closed")
        elif self._killed:
            self.died(self._killed, cause="engine_stalled")
        else:
            self.died(self.own_words or how)

    async def _reap(self) -> None:
        """Wait for a former process to be gone; kill it if it does not go."""
        process = self._process
        if process is not None:
            try:
                await process.ended(CLOSE_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.ended()
            self._process = None  # not before: who is cancelled here leaves it to the next one
        if self._reading is not None:
            await self._reading
            self._reading = None


async def _next_frame(reader: asyncio.StreamReader) -> bytes | None:
    """``None``: the connection ended. Raises ``msgspec.DecodeError``."""
    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        if size > MAX_FRAME:
            raise msgspec.DecodeError(f"a frame of {size} bytes")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError):
        return None
