"""A server for commands that have an event loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.http.fakes import Running, running


@dataclass
class Served:
    """A server over a scripted engine, in a thread."""

    running: Running
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.running.url

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Wait for work in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)


@pytest.fixture
def served() -> Iterator[Served]:
    """Its log stays out of what the command prints."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = running()
    try:
        with capture_logs():
            found = Served(asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(10), loop)
            yield found
            found.do(context.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
