"""The process of a gateway: listen, ask targets whether they are ready, drain at a signal."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from aiohttp import web

from engine.contracts.config import Settings
from engine.contracts.exporter import Exporter
from engine.contracts.router import Router
from engine.http.gateway.app import build_gateway
from engine.http.gateway.probing import probe
from engine.http.gateway.state import GATEWAY, GatewayState
from engine.http.listener import Listener, to_stderr
from engine.service import logs

SAYS_S = 5.0
"""While no target is ready, the gateway says so this often."""


class Gateway(Listener):
    """One listener, and servers elsewhere behind it."""

    files_each = 2
    """A client, and the target that answers it."""

    def __init__(
        self,
        settings: Settings,
        make_router: Callable[[], Router],
        exporters: Sequence[Exporter],
        *,
        say: Callable[[str], None] = to_stderr,
    ) -> None:
        super().__init__(settings.server, say)
        self._parts = (settings, make_router, exporters)

    @property
    def state(self) -> GatewayState:
        return self.app[GATEWAY]

    def build(self) -> web.Application:
        return build_gateway(*self._parts, os.environ)

    async def work(self) -> int:
        """Does not return."""
        async with asyncio.TaskGroup() as working:
            working.create_task(probe(self.state))
            working.create_task(self._announce())
        return 0

    def leave(self) -> None:
        """Nothing begins here that would have to be kept from it."""

    async def end(self) -> None:
        """Targets go on."""

    async def _announce(self) -> None:
        """Say that the gateway is ready, and which targets are."""
        clock = asyncio.get_running_loop().time
        said_s = clock()
        while (why_not := self.state.not_ready()) is not None:
            await asyncio.sleep(0.05)
            if clock() - said_s > SAYS_S:
                said_s = clock()
                self._say(f"waiting: {why_not}")
        for target in self.state.targets.values():
            self._say(f"target {target.id}: {target.why_not or ', '.join(target.models)}")
        self._say(f"ready: gateway at {self.url}/v1")


def serve_gateway(settings: Settings, make_router: Callable[[], Router], exporters: Sequence[Exporter]) -> int:
    """Serve until a signal says otherwise; returns the process's exit code."""
    logs.configure()
    return asyncio.run(Gateway(settings, make_router, exporters).run())
