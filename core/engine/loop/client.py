"""How the API process talks to an engine: one small asyncio interface, whichever process the engine lives in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from engine.contracts.events import Event
from engine.contracts.request import EngineRequest, FinishReason, TokensOut
from engine.loop.messages import CauseOfDeath, EngineInfo, EngineStats, Heartbeat, Progress


class EngineDead(RuntimeError):
    """The engine process is gone; the request may be retried when :attr:`EngineClient.alive` is true again."""

    def __init__(self, why: str, cause: CauseOfDeath = "engine_dead") -> None:
        super().__init__(why)
        self.cause: CauseOfDeath = cause


class EngineRefused(EngineDead):
    """The engine did not start because the configuration cannot run here; the message says what would help."""


class OutputStream(Protocol):
    """The outputs of one submitted sequence, in order; ends after the one with a ``finish_reason``."""

    def __aiter__(self) -> AsyncIterator[TokensOut]: ...

    async def __anext__(self) -> TokensOut:
        """Raises :class:`EngineDead` if the engine died before the sequence ended."""
        ...

    def abort(self, reason: FinishReason = "abort") -> None:
        """Stop the sequence; its blocks are free within one step. One last output (with ``finish_reason`` =
        ``reason`` and timings) still comes. Idempotent; does nothing after the end."""
        ...


class EngineClient(Protocol):
    """An engine, as the server sees it. All methods are called on the event loop's thread."""

    alive: bool
    """Started and not dead."""
    stats: EngineStats
    """The latest the engine reported."""
    info: EngineInfo | None
    heartbeat: Heartbeat
    """The latest the engine answered to a :meth:`ping`."""
    num_messages: int
    """How many messages the engine has sent: moves while it is alive and pinged."""
    cause_of_death: str
    """Why the engine is not alive, once it has died."""

    async def start(self, on_progress: Callable[[Progress], None] | None = None) -> EngineInfo:
        """Start the engine and wait until it is ready. Raises :class:`EngineDead` (or
        :class:`EngineRefused`) with the engine's own words."""
        ...

    def submit(self, request: EngineRequest) -> OutputStream:
        """Queue a sequence. Raises :class:`EngineDead` if the engine is not alive."""
        ...

    def on_events(self, callback: Callable[[Sequence[Event]], None]) -> None:
        """Have the engine's events delivered, batch by batch."""
        ...

    def ping(self) -> None:
        """Ask for a sign of life; from the moment of :meth:`start` on. Never raises."""
        ...

    def kill(self, why: str) -> None:
        """End an engine that hangs: its stacks are written to stderr, then it is dead, of ``why``."""
        ...

    async def expert_load(self) -> Mapping[int, tuple[int, ...]]:
        """See :attr:`engine.loop.messages.ExpertLoad.layers`. Raises :class:`EngineDead`."""
        ...

    async def reset_prefix_cache(self) -> None: ...

    async def close(self) -> None:
        """Abort everything and end the engine process."""
        ...
