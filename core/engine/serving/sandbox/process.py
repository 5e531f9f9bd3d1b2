"""A sandbox, seen from the process that asks it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from engine.serving.sandbox.child import OUT_OF_MEMORY
from engine.serving.sandbox.frames import FrameTooLarge, receive, send
from engine.startup.process import describe_exit

WALL_S = 30.0
"""For a child that does not run at all; what it computes is limited in CPU time."""
DYING_S = 5.0
"""How long a child that has closed its socket may take to end."""
SETUP_BYTES = 4096
"""Most of the answer to the first frame."""
KEPT = ("TZ", "LD_LIBRARY_PATH", "PYTHONHOME")
"""Environment variables that the child needs to start and to tell the time; it gets no others."""


class SandboxEnded(RuntimeError):
    """The child broke a limit or died; the message is what it did: "took more than 1 s of CPU time"."""


class Sandbox:
    """Children that answer one thing at a time, each asked by a thread of its own.

    They are not trusted: of what they send, only the size is checked here.
    """

    def __init__(
        self,
        module: str,
        memory_mb: int,
        *,
        num_children: int = 1,
        setup: bytes = b"",
        check: Callable[[bytes], object] | None = None,
    ) -> None:
        """``module``: what a child runs, see :func:`engine.serving.sandbox.child.main`. ``setup``: its first frame,
        whose answer ``check`` may refuse by raising."""
        self._make = partial(_Child, module, memory_mb, setup, check)
        self._num_children = num_children
        self._children: list[_Child] = []
        # The kernel ends a child with the thread that started it.
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(num_children, thread_name_prefix=module.rpartition(".")[2])

    @property
    def pids(self) -> list[int]:
        """Of the children there are now."""
        return [child.pid for child in self._children if child.pid is not None]

    def start(self, cpu_s: float) -> list[Future[None]]:
        """Have the children ready. ``cpu_s``: what the setup of each may take."""
        return [self._threads.submit(self._start, cpu_s) for _ in range(self._num_children)]

    def ask(self, frame: bytes, cpu_s: float, max_reply: int) -> Future[bytes]:
        """The answer. ``max_reply``: bytes. The future raises :class:`SandboxEnded`, or what ``check`` does."""
        return self._threads.submit(self._ask, frame, cpu_s, max_reply)

    def close(self) -> None:
        """End the children; whoever waits for an answer is told."""
        for child in tuple(self._children):
            child.close()
        self._threads.shutdown()
        for child in self._children:
            child.end()

    def _start(self, cpu_s: float) -> None:
        self._child().ready(cpu_s)

    def _ask(self, frame: bytes, cpu_s: float, max_reply: int) -> bytes:
        return self._child().ask(frame, cpu_s, max_reply)

    def _child(self) -> _Child:
        """This thread's own."""
        child: _Child | None = getattr(self._own, "child", None)
        if child is None:
            child = self._own.child = self._make()
            self._children.append(child)
        return child


class _Child:
    """One process after the other, each replacing one that ended. Use from one thread, but for :meth:`close`."""

    def __init__(self, module: str, memory_mb: int, setup: bytes, check: Callable[[bytes], object] | None) -> None:
        self._module = module
        self._memory_mb = memory_mb
        self._setup = setup
        self._check = check
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_set_up = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def close(self) -> None:
        """From any thread: the process ends, and is not replaced."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def ask(self, frame: bytes, cpu_s: float, max_reply: int) -> bytes:
        self.ready(cpu_s)
        try:
            return self._exchange(frame, cpu_s, max_reply)
        except SandboxEnded:
            with suppress(OSError, SandboxEnded):  # whoever needs it next tries again
                self._spawn()
            raise

    def ready(self, cpu_s: float) -> None:
        """Raises :class:`SandboxEnded`, and what ``check`` raises."""
        if self._process is None or self._process.poll() is not None:
            try:
                self._spawn()
            except OSError as error:
                raise SandboxEnded(f"could not be started: {error.strerror}") from None
        if self._setup and not self._is_set_up:
            reply = self._exchange(self._setup, cpu_s, SETUP_BYTES)
            if self._check is not None:
                self._check(reply)
            self._is_set_up = True

    def end(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()

    def _spawn(self) -> None:
        self.end()
        if self._closed:
            raise SandboxEnded("was closed")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(os.getpid()), str(self._memory_mb)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
            )
        self._connection, self._is_set_up = ours, False

    def _exchange(self, frame: bytes, cpu_s: float, max_reply: int) -> bytes:
        assert self._connection is not None
        deadline = time.monotonic() + WALL_S
        try:
            send(self._connection, frame, cpu_s, deadline)
            return receive(self._connection, max_reply, deadline)[0]
        except TimeoutError:
            why = f"did not answer for {WALL_S:.0f} s"
        except FrameTooLarge:
            why = "answered too much"
        except (EOFError, OSError):
            why = self._cause_of_death(cpu_s)
        self.end()
        raise SandboxEnded(why)

    def _cause_of_death(self, cpu_s: float) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(DYING_S)
        match self._process.returncode:
            case None:
                return "hung up"
            case code if code == -signal.SIGPROF:
                return f"took more than {cpu_s:g} s of CPU time"
            case code if code == OUT_OF_MEMORY:
                return f"took more than {self._memory_mb} MB of memory"
            case code:
                return f"crashed ({describe_exit(code)})"


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
