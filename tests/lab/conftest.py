"""A server for commands that have an event loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.http.fakes import Running, running
from tests.http.routes.test_fleet import two
from tests.service.fakes import ScriptedClient


@dataclass
class Served:
    """A server over a scripted engine, in a thread."""

    running: Running
    loop: asyncio.AbstractEventLoop
    clients: dict[str, ScriptedClient] = field(default_factory=dict)
    """Of the engines, by id, where there are several."""

    @property
    def url(self) -> str:
        return self.running.url

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Wait for work in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)


@contextmanager
def in_a_thread(context: AbstractAsyncContextManager[Any]) -> Iterator[tuple[Any, asyncio.AbstractEventLoop]]:
    """What ``context`` makes, in a loop of its own. Its log stays out of what the command prints."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with capture_logs():
            yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(10), loop
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with in_a_thread(running()) as (server, loop):
        yield Served(server, loop)


@pytest.fixture
def served_by_two() -> Iterator[Served]:
    """A server with the engines ``a`` and ``b``. Requests go to ``a`` while it is alive."""
    with in_a_thread(two()) as ((server, clients), loop):
        yield Served(server, loop, clients)
