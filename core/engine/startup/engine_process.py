"""The process of an engine, as the client of that engine holds it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.assembly.plan import EnginePlan
from engine.contracts.parallelism import SECRET
from engine.loop.environment import with_defaults
from engine.loop.messages import FromEngine
from engine.startup.segments import Segments

HEADER = struct.Struct("<I")
STACKS_S = 2.0
"""How long a process that is aborted may take to write its stacks."""


class EngineProcess(Protocol):
    """Was started when it was made. All methods are called on the event loop's thread."""

    pid: int
    """Of the process on this machine that ends with the engine."""

    async def connect(self, deliver: Callable[[FromEngine], None]) -> socket.socket | None:
        """The connection to the engine, over which it gets and sends frames; ``deliver`` takes what is to be known
        before. ``None``: the process ended."""
        ...

    def abort(self) -> None:
        """It hangs: have its stacks written, then kill it. Its connection ends soon."""
        ...

    def kill(self) -> None:
        """End it at once, and its connection."""
        ...

    async def ended(self, timeout_s: float | None = None) -> str:
        """Its connection ended, or is to end: wait for the process, and say what ended it. Raises ``TimeoutError``."""
        ...


class ChildProcess:
    """A child of this process, at the other end of a socket pair that only the two of them hold."""

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str],
        kind: socket.SocketKind,
        stdin: int = subprocess.DEVNULL,
        segments: Segments | None = None,
    ) -> None:
        """``module``: run as ``python -m MODULE --fd FD --parent PID``; ``kind``: of the socket pair; ``segments``:
        what the process inherits, and is told of."""
        words, files = ((), ()) if segments is None else (segments.words, segments.files)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        with theirs:
            ends = "--fd", str(theirs.fileno()), "--parent", str(os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *ends, *words],
                pass_fds=[theirs.fileno(), *files],
                env=environment,
                stdin=stdin,
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    async def _exit_code(self, timeout_s: float | None) -> int:
        """Raises ``TimeoutError``."""
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None


class LocalProcess(ChildProcess):
    """The engine process itself. See :class:`EngineProcess`."""

    def __init__(
        self, plan: EnginePlan, environment: Mapping[str, str], secret: str, segments: Segments | None = None
    ) -> None:
        environment = with_defaults({**os.environ, **environment, SECRET: secret}, plan.device.kind)
        super().__init__("engine.startup.child", environment, socket.SOCK_STREAM, segments=segments)
        self._plan = plan

    async def connect(self, deliver: Callable[[FromEngine], None]) -> socket.socket:
        body = self._plan.to_json()
        self._ours.setblocking(False)
        with contextlib.suppress(ConnectionError):  # it ended already, and whoever reads sees that
            await asyncio.get_running_loop().sock_sendall(self._ours, HEADER.pack(len(body)) + body)
        return self._ours

    def abort(self) -> None:
        self._process.send_signal(signal.SIGABRT)  # the child writes its stacks before it dies of this
        self._process.send_signal(signal.SIGCONT)  # a stopped one, too
        asyncio.get_running_loop().call_later(STACKS_S, self.kill)

    async def ended(self, timeout_s: float | None = None) -> str:
        return f"the engine process ended with {describe_exit(await self._exit_code(timeout_s))}"


def describe_exit(code: int) -> str:
    """``exit code 1`` or ``signal 9``."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
