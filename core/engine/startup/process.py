"""An engine in a process of its own, behind a socket pair that only the two of them hold.

The first frame to the child is the plan as JSON; all others are msgpack messages (see :mod:`engine.loop.messages`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping

import msgspec

from engine.assembly.plan import EnginePlan
from engine.contracts.parallelism import SECRET
from engine.loop.client import EngineDead
from engine.loop.environment import with_defaults
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

HEADER = struct.Struct("<I")
CLOSE_TIMEOUT_S = 5.0
"""How long a process may take to end by itself. Whoever limits the time of :meth:`ProcessEngineClient.close` must give
more than this: a close that is cut off cannot kill."""
CLOSED = "the engine was closed"
STACKS_S = 2.0
"""How long a process that is killed may take to write its stacks."""


class ProcessEngineClient(ClientBase):
    """See :class:`engine.loop.client.EngineClient`. May be started again after the engine died."""

    def __init__(self, plan: EnginePlan, environment: Mapping[str, str] | None = None) -> None:
        """``environment``: variables of the process, beside those of this one."""
        super().__init__()
        self._plan = plan
        self._environment = environment or {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._killed = ""
        """Why this process was killed from here."""
        self._closed = False
        """This process was ended from here on purpose."""
        self._secret = secrets.token_urlsafe(16)

    async def start(self, on_progress: Callable[[Progress], None] | None = None) -> EngineInfo:
        await self._reap()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.startup.child", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=with_defaults({**os.environ, **self._environment, SECRET: self._secret}, self._plan.device.kind),
                stdin=subprocess.DEVNULL,
            )
        self._killed = self.own_words = ""
        self._closed = False
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**20)
        self._ready, self._on_progress = asyncio.get_running_loop().create_future(), on_progress
        self._write(self._plan.to_json())
        self._reading = asyncio.create_task(self._read(reader, self._process))
        return await self._ready

    def send(self, message: ToEngine) -> None:
        self._write(self._encode(message))

    def ping(self) -> None:
        with contextlib.suppress(EngineDead):
            self.send(Ping())

    def kill(self, why: str) -> None:
        process = self._process
        if process is None:
            return
        self._killed = why
        process.send_signal(signal.SIGABRT)  # the child writes its stacks before it dies of this
        process.send_signal(signal.SIGCONT)  # a stopped one, too
        asyncio.get_running_loop().call_later(STACKS_S, process.kill)

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

    async def _read(self, reader: asyncio.StreamReader, process: subprocess.Popen[bytes]) -> None:
        """Deliver messages until the connection ends, which is how an engine's death shows."""
        try:
            while True:
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                if size > MAX_FRAME:
                    raise msgspec.DecodeError(f"a frame of {size} bytes")
                self.deliver(self._decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await asyncio.to_thread(process.wait)
            if self._closed:
                self.died(CLOSED, cause="engine_closed")
            elif self._killed:
                self.died(self._killed, cause="engine_stalled")
            else:
                self.died(self.own_words or f"the engine process ended with {describe_exit(code)}")
        except Exception as error:
            # Unreadable frames, or a callback that raised: nothing can be delivered any more, so the engine is given
            # up rather than left looking alive.
            process.kill()
            self.died(f"messages of the engine process could not be taken in: {type(error).__name__}: {error}")
        if self._writer is not None:
            self._writer.close()

    async def _reap(self) -> None:
        """Wait for a former process to be gone; kill it if it does not go."""
        process = self._process
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
            self._process = None  # not before: who is cancelled here leaves it to the next one
        if self._reading is not None:
            await self._reading
            self._reading = None


def describe_exit(code: int) -> str:
    """``exit code 1`` or ``signal 9``."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
