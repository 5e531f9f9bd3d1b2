"""Router ``direct``: the first engine that is alive."""

from __future__ import annotations

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.contracts.router import Answer, ApiRequest, Attempts, EngineView, Reject, Route

RETRY_AFTER_S = 5
"""Seconds a client is asked to wait while no engine is alive: about the time a small model takes to
restart."""
NOBODY = Reject(503, "no engine is running; it may be starting or restarting", RETRY_AFTER_S)


def alive_in(fleet: tuple[EngineView, ...]) -> Attempts | Reject:
    """The engines that are alive, in order, or 503."""
    alive = tuple([engine.engine_id for engine in fleet if engine.alive])
    return Attempts(alive, "the first") if alive else NOBODY


class DirectRouter:
    """The plugin."""

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        pass

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        return alive_in(fleet)

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        """Nothing to remember."""
