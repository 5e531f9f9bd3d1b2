"""A process that answers HTTP from start to end: listen, work, drain at a signal, stop."""

from __future__ import annotations

import asyncio
import errno
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from aiohttp import web

from engine.contracts.config import ServerSettings
from engine.http.connections import Connections, TooFewFiles, most_connections
from engine.http.state import LISTENER, ListenerState
from engine.service import logs
from engine.service.errors import ApiError
from engine.service.transport import CannotListen

ABORT_S = 1.0
"""How long requests that were ended may take to write their error event."""


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Listener(ABC):
    """One listener, and what it answers for."""

    files_each: ClassVar[int] = 1
    """Open files that a connection may take."""

    def __init__(self, settings: ServerSettings, say: Callable[[str], None] = to_stderr) -> None:
        """``say`` shows a line to the person who started the process."""
        self._settings = settings
        self._say = say
        self._signals = 0
        self._interrupted = False
        self._first_signal = asyncio.Event()
        self._second_signal = asyncio.Event()
        self.port = 0
        """The port that is listened on, once :meth:`listen` has returned."""

    @abstractmethod
    def build(self) -> web.Application:
        """The application. Called inside the event loop."""

    @abstractmethod
    async def work(self) -> int:
        """What goes on behind the listener until it cannot: returns the exit code then."""

    @abstractmethod
    def leave(self) -> None:
        """A signal has come."""

    @abstractmethod
    async def end(self) -> None:
        """End what is behind the listener, which takes no more connections."""

    async def run(self) -> int:
        """Serve until signalled. Returns 0 after a signal, otherwise what :meth:`work` does; 1 or 2 where it cannot
        listen."""
        try:
            await self.listen()
        except TooFewFiles as error:
            self._say(f"error: {error}")
            return 2
        except CannotListen as error:
            self._say(f"error: {error}")
            return 1
        except OSError as error:
            settings = self._settings
            where = f"server.host={settings.host} server.port={settings.port}"
            other = "server.port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "server.host"
            self._say(f"error: cannot listen on {where}: {error.strerror or 'failed'}. Choose another {other}.")
            return 1
        self._catch_signals()
        code = 0
        try:
            code = await self._serve()
        finally:
            await self.close()
        return code

    async def listen(self) -> None:
        """Open the listener. Raises ``OSError``, :class:`engine.http.connections.TooFewFiles`."""
        settings = self._settings
        limit = most_connections(settings.max_connections, self.files_each)
        asyncio.get_running_loop().set_exception_handler(logs.on_loop_error)
        self.app = self.build()
        self._runner = web.AppRunner(self.app, handler_cancellation=True, shutdown_timeout=ABORT_S)
        await self._runner.setup()
        assert self._runner.server is not None
        self.connections = Connections(self._runner.server, limit)
        try:
            self._listener = await self.connections.listen(settings.host, settings.port)
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = self._listener.sockets[0].getsockname()[1]

    def signalled(self, number: int = signal.SIGTERM) -> None:
        """A request to end: the first drains, the second does not wait. SIGINT comes from somebody who waits: there is
        no lame duck."""
        self._signals += 1
        self._interrupted = self._interrupted or number == signal.SIGINT
        (self._first_signal if self._signals == 1 else self._second_signal).set()

    async def close(self) -> None:
        """End the listener, and what is behind it."""
        self._listener.close()
        await self.end()
        await self._runner.cleanup()
        self.connections.close()

    @property
    def url(self) -> str:
        host = self._settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def _state(self) -> ListenerState:
        return self.app[LISTENER]

    async def _serve(self) -> int:
        stopping = asyncio.create_task(self._first_signal.wait())
        working = asyncio.create_task(self.work())
        try:
            await asyncio.wait({stopping, working}, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                return working.result()
            await self._drain()
            return 0
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.gather(stopping, working, return_exceptions=True)

    async def _drain(self) -> None:
        admission, settings = self._state.admission, self._settings
        self.leave()
        hurry = asyncio.create_task(self._second_signal.wait())
        if settings.lame_duck_s and not self._interrupted:
            admission.lame_duck = True
            self._say(f"lame duck: /ready is 503, requests are taken for {settings.lame_duck_s:g} s more")
            await asyncio.wait({hurry}, timeout=settings.lame_duck_s)
        admission.draining = True
        self._say(f"draining: {admission.in_flight} sequences in flight")
        idle = asyncio.create_task(admission.until_idle(settings.drain_s))
        await asyncio.wait({hurry, idle}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if idle.done() and idle.result():
            return
        idle.cancel()
        admission.fail_all(
            ApiError(
                "unavailable", "The server shut down before this request was done.", code="shutdown", retry_after_s=5
            )
        )
        await admission.until_idle(ABORT_S)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signalled, number)
