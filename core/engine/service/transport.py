"""Transports beside HTTP: what they need of a server, and what a server does with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from engine.contracts.config import ServerSettings, SloSettings
from engine.service.admission import Admission
from engine.service.bus import EventBus
from engine.service.dispatch import Dispatcher
from engine.service.engines import EngineHandle
from engine.service.keys import Keys
from engine.service.scaler import Scaler


class CannotListen(Exception):
    """The message says where, why and what to change."""


class Backend(Protocol):
    """A server of engines, whatever brings requests to it. All of them share one admission. Use on the event loop's
    thread only."""

    settings: ServerSettings
    slo: SloSettings
    keys: Keys | None
    admission: Admission
    bus: EventBus
    engines: Mapping[str, EngineHandle]
    dispatcher: Dispatcher
    scaler: Scaler

    @property
    def engine(self) -> EngineHandle:
        """The first of :attr:`engines`, whose model the server offers."""
        ...

    def not_ready(self) -> str | None:
        """Why no request is taken now; ``None``: some engine takes them."""
        ...


class Transport(Protocol):
    """One that listens."""

    @property
    def address(self) -> str:
        """Where, as it is shown to people."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Take no more requests, and end those that are left after ``grace_s`` seconds."""
        ...


Listen = Callable[[Backend], Awaitable[Transport]]
"""Opens a transport. Raises :class:`CannotListen`."""
