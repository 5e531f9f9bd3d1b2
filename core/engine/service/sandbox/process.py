"""A sandbox, seen from the process that asks it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from engine.service.sandbox.child import OUT_OF_MEMORY
from engine.service.sandbox.frames import FrameTooLarge, Incoming, packed
from engine.startup.engine_process import describe_exit

T = TypeVar("T")

WALL_S = 30.0
"""How long a child may take that does not run at all; what it computes is limited in CPU time."""
DYING_S = 5.0
"""How long a child that has closed its socket may take to end."""
SETUP_BYTES = 4096
"""Most bytes of the answer to the first frame."""
KEPT = ("TZ", "LD_LIBRARY_PATH", "PYTHONHOME")
"""Environment variables that the child needs to start and to tell the time; it gets no others."""
_FAILURES = (EOFError, OSError, FrameTooLarge)
"""How the loss of a child, or of the patience with it, shows."""


class SandboxEnded(RuntimeError):
    """A child died, or could not be started; the message is what it did: "crashed (signal 9)"."""


class Crashed(SandboxEnded):
    """A child was ended by a signal, as where its stack overflows: "crashed (signal 11)"."""


class LimitBroken(SandboxEnded):
    """The task is to blame: "took more than 1 s of CPU time"."""


class Sandbox:
    """Children that answer one thing at a time.

    They are not trusted: of what they send, only the size is checked here.
    """

    def __init__(
        self,
        module: str,
        memory_mb: int,
        *,
        num_children: int = 1,
        arguments: tuple[str, ...] = (),
        setup: bytes = b"",
        check: Callable[[bytes], object] | None = None,
    ) -> None:
        """``module``: what a child runs, see :func:`engine.service.sandbox.child.main`, with more ``arguments``.
        ``setup``: its first frame, whose answer ``check`` may refuse by raising."""
        self._children = [_Child(module, memory_mb, arguments, setup, check) for _ in range(num_children)]
        self._free = list(self._children)
        self._waiting: deque[Future[_Child]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # Whatever takes long; and the kernel ends a child with the thread that started it.
        self._threads = ThreadPoolExecutor(num_children, thread_name_prefix=module.rpartition(".")[2])

    @property
    def pids(self) -> list[int]:
        """Process ids of the children there are now."""
        return [child.pid for child in self._children if child.pid is not None]

    def start(self, cpu_s: float) -> list[Future[None]]:
        """Have the children ready. ``cpu_s``: what the setup of each may take."""
        return [self._in_thread(self._start, self._take().result(), cpu_s) for _ in self._children]

    async def ask(self, frame: bytes, cpu_s: float, max_reply: int) -> bytes:
        """The answer, without a thread between the event loop and the child. ``max_reply``: bytes. A child that dies
        without breaking a limit may not have died of this task: another one is asked.

        Raises :class:`SandboxEnded`, and what ``check`` does.
        """
        try:
            return await self._ask_once(frame, cpu_s, max_reply)
        except LimitBroken:
            raise
        except SandboxEnded:
            return await self._ask_once(frame, cpu_s, max_reply)

    def ask_now(self, frame: bytes, cpu_s: float, max_reply: int) -> bytes:
        """:meth:`ask` of one child, blocking the calling thread."""
        child = self._take().result()
        try:
            if not child.is_ready:
                self._in_thread(child.make_ready, cpu_s).result()
            try:
                return child.ask_now(frame, cpu_s, max_reply)
            except _FAILURES as failure:
                raise self._in_thread(child.replace, failure, cpu_s).result() from None
        finally:
            self._give_back(child)

    def close(self) -> None:
        """End the children; whoever waits for an answer is told."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
            for waiter in self._waiting:
                if waiter.set_running_or_notify_cancel():
                    waiter.set_exception(SandboxEnded("was closed"))
            self._waiting.clear()
        for child in self._children:
            child.kill()
        self._threads.shutdown()
        for child in free:
            child.end()

    async def _ask_once(self, frame: bytes, cpu_s: float, max_reply: int) -> bytes:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._vacant = loop, asyncio.Semaphore(len(self._children))
        await self._vacant.acquire()
        asking = asyncio.ensure_future(self._ask(self._vacant, frame, cpu_s, max_reply))
        asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps nobody else looks
        return await asyncio.shield(asking)  # a caller who leaves leaves a child that is about to answer

    async def _ask(self, vacant: asyncio.Semaphore, frame: bytes, cpu_s: float, max_reply: int) -> bytes:
        try:
            taken = self._take()
            child = taken.result() if taken.done() else await asyncio.wrap_future(taken)
            try:
                if not child.is_ready:
                    await asyncio.wrap_future(self._in_thread(child.make_ready, cpu_s))
                try:
                    return await child.ask(frame, cpu_s, max_reply)
                except _FAILURES as failure:
                    raise await asyncio.wrap_future(self._in_thread(child.replace, failure, cpu_s)) from None
            finally:
                self._give_back(child)
        finally:
            vacant.release()

    def _start(self, child: _Child, cpu_s: float) -> None:
        try:
            child.make_ready(cpu_s)
        finally:
            self._give_back(child)

    def _take(self) -> Future[_Child]:
        """A child that nobody else asks, as soon as there is one."""
        taken: Future[_Child] = Future()
        with self._lock:
            if self._closed:
                raise SandboxEnded("was closed")
            if self._free:
                taken.set_result(self._free.pop())
            else:
                self._waiting.append(taken)
        return taken

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._closed:
                while self._waiting:
                    waiter = self._waiting.popleft()
                    if waiter.set_running_or_notify_cancel():
                        waiter.set_result(child)
                        return
                self._free.append(child)
                return
        child.end()

    def _in_thread(self, function: Callable[..., T], *args: object) -> Future[T]:
        try:
            return self._threads.submit(function, *args)
        except RuntimeError:
            raise SandboxEnded("was closed") from None


class _Child:
    """One process after the other, each replacing one that ended. For one caller at a time, but for :meth:`kill`."""

    def __init__(
        self,
        module: str,
        memory_mb: int,
        arguments: tuple[str, ...],
        setup: bytes,
        check: Callable[[bytes], object] | None,
    ) -> None:
        self._module = module
        self._memory_mb = memory_mb
        self._arguments = arguments
        self._setup = setup
        self._check = check
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_set_up = False
        self._killed = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    @property
    def is_ready(self) -> bool:
        return self._is_set_up and self._process is not None and self._process.poll() is None

    def make_ready(self, cpu_s: float) -> None:
        """Raises :class:`SandboxEnded`, and what ``check`` raises."""
        if self._process is None or self._process.poll() is not None:
            try:
                self._spawn()
            except OSError as error:
                raise SandboxEnded(f"could not be started: {error.strerror}") from None
        if self._setup:
            try:
                reply = self.ask_now(self._setup, cpu_s, SETUP_BYTES)
            except _FAILURES as failure:
                raise self._bury(failure, cpu_s) from None
            if self._check is not None:
                self._check(reply)
        self._is_set_up = True

    async def ask(self, frame: bytes, cpu_s: float, max_reply: int) -> bytes:
        """The answer of a child that is ready. Raises one of ``_FAILURES``: it is of no use any more."""
        assert self._connection is not None
        loop, reply = asyncio.get_running_loop(), Incoming(max_reply)
        self._connection.setblocking(False)
        try:
            async with asyncio.timeout(WALL_S):
                await loop.sock_sendall(self._connection, packed(frame, cpu_s))
                while not reply.take(await loop.sock_recv(self._connection, reply.wanted)):
                    pass
        except asyncio.CancelledError:
            self.end()  # in the middle of an answer
            raise
        return reply.body

    def ask_now(self, frame: bytes, cpu_s: float, max_reply: int) -> bytes:
        """:meth:`ask`, blocking the calling thread."""
        assert self._connection is not None
        ends, reply = time.monotonic() + WALL_S, Incoming(max_reply)
        self._connection.settimeout(WALL_S)
        self._connection.sendall(packed(frame, cpu_s))
        while not reply.take(self._connection.recv(reply.wanted)):
            if time.monotonic() > ends:
                raise TimeoutError
        return reply.body

    def replace(self, failure: Exception, cpu_s: float) -> SandboxEnded:
        """Why there was no answer; another process is on its way."""
        ended = self._bury(failure, cpu_s)
        with suppress(OSError, SandboxEnded):  # whoever needs it next tries again
            self._spawn()
        return ended

    def kill(self) -> None:
        """From any thread: the process ends, and is not replaced."""
        self._killed = True
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._is_set_up = False
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()

    def _spawn(self) -> None:
        self.end()
        if self._killed:
            raise SandboxEnded("was closed")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(os.getpid()), str(self._memory_mb), *self._arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
            )
        self._connection = ours

    def _bury(self, failure: Exception, cpu_s: float) -> SandboxEnded:
        match failure:
            case TimeoutError():
                ended = SandboxEnded(f"did not answer for {WALL_S:.0f} s")
            case FrameTooLarge():
                ended = LimitBroken("answered too much")
            case _:
                ended = self._cause_of_death(cpu_s)
        self.end()
        return ended

    def _cause_of_death(self, cpu_s: float) -> SandboxEnded:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(DYING_S)
        match self._process.returncode:
            case None:
                return SandboxEnded("hung up")
            case code if code == -signal.SIGPROF:
                return LimitBroken(f"took more than {cpu_s:g} s of CPU time")
            case code if code == OUT_OF_MEMORY:
                return LimitBroken(f"took more than {self._memory_mb} MB of memory")
            case code:
                return (Crashed if code < 0 else SandboxEnded)(f"crashed ({describe_exit(code)})")


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
