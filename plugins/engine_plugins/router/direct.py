"""Router ``direct``: the first engine that is alive."""

from __future__ import annotations

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.contracts.router import Answer, ApiRequest, EngineView, Reject, Route, ToEngine

RETRY_AFTER_S = 5
"""Seconds a client is asked to wait while no engine is alive: about the time a small model takes to
restart."""


def first_alive(fleet: tuple[EngineView, ...]) -> Route:
    """The first engine that is alive, or 503."""
    for engine in fleet:
        if engine.alive:
            return ToEngine(engine.engine_id)
    return Reject(503, "no engine is running; it may be starting or restarting", RETRY_AFTER_S)


class DirectRouter:
    """The plugin."""

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        pass

    def route(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        return first_alive(fleet)

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        """Nothing to remember."""
