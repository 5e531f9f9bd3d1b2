"""An engine that a launcher starts on another machine.

The launcher lives in a child of the server (:mod:`engine.startup.launching`), so that what it loads and what becomes of
it is nothing to the server. That child hands over its connection to the engine, and nothing of the engine's passes
through it afterwards. Between the two is a socket of packets. Those of the child are messages, one of them with the
connection; a packet to the child says that the engine hangs, and the end of packets that its connection has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable

import msgspec

from engine.assembly.plan import EnginePlan
from engine.loop.messages import Failed, FromEngine
from engine.startup.engine_process import STACKS_S, ChildProcess, describe_exit

MAX_PACKET = 65536
ABORT = b"abort"


class LaunchedProcess(ChildProcess):
    """See :class:`engine.startup.engine_process.EngineProcess`."""

    def __init__(self, plan: EnginePlan) -> None:
        super().__init__("engine.startup.launching", os.environ, socket.SOCK_SEQPACKET, subprocess.PIPE)
        self._ours.setblocking(False)
        self._plan = plan
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._connection: socket.socket | None = None
        self._ending: asyncio.Task[str] | None = None

    async def connect(self, deliver: Callable[[FromEngine], None]) -> socket.socket | None:
        await asyncio.to_thread(self._give_plan)
        while True:
            packet, descriptors = await self._receive()
            if descriptors:
                self._connection = socket.socket(fileno=descriptors[0])
                self._connection.setblocking(False)
                return self._connection
            if not packet:
                return None
            deliver(self._decode(packet))

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._ours.send(ABORT)
        asyncio.get_running_loop().call_later(STACKS_S, self.kill)

    def kill(self) -> None:
        super().kill()
        if self._connection is not None:
            with contextlib.suppress(OSError):  # its machine may be gone, and then nobody else ends it
                self._connection.shutdown(socket.SHUT_RDWR)

    async def ended(self, timeout_s: float | None = None) -> str:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await asyncio.wait_for(asyncio.shield(self._ending), timeout_s)

    async def _end(self) -> str:
        if self._connection is None:
            self.kill()  # nobody waits for an engine any more; what was started ends with it
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_WR)
        words, packet = "", b" "
        while packet:
            packet, descriptors = await self._receive()
            for descriptor in descriptors:
                os.close(descriptor)
            message = self._decode(packet) if packet and not descriptors else None
            words = message.error if isinstance(message, Failed) else words
        code = await self._exit_code(None)
        self._ours.close()
        return words or f"the process that had the engine started ended with {describe_exit(code)}"

    def _give_plan(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(self._plan.to_json())

    async def _receive(self) -> tuple[bytes, list[int]]:
        """The next packet, with what it hands over; empty: there are no more."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def can_read() -> None:
            if not arrived.done():
                arrived.set_result(None)

        loop.add_reader(self._ours, can_read)
        try:
            await arrived
        finally:
            loop.remove_reader(self._ours)
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._ours, MAX_PACKET, 1)
        except ConnectionError:
            return b"", []
        return packet, descriptors
