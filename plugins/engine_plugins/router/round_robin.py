"""Router ``round_robin``: the engines that are alive in turn, whatever they have to do."""

from __future__ import annotations

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.contracts.router import Answer, ApiRequest, Attempts, EngineView, Route
from engine_plugins.router.direct import NOBODY


def rotated(fleet: tuple[EngineView, ...], turn: int) -> list[EngineView]:
    """The engines that are alive; which is the first one goes round with ``turn``."""
    alive = [engine for engine in fleet if engine.alive]
    first = turn % len(alive) if alive else 0
    return alive[first:] + alive[:first]


class RoundRobinRouter:
    """The plugin."""

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        self._turn = 0

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        names = tuple([engine.engine_id for engine in rotated(fleet, self._turn)])
        return Attempts(names, "its turn") if names else NOBODY

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self._turn += 1

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        """Nothing to remember."""
