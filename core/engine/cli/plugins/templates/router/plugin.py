"""Router ``mine``: every request to the first engine that is alive."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import SlotConfig, at_least
from engine.contracts.provider import BuildContext, Provider
from engine.contracts.router import Answer, ApiRequest, EngineView, Reject, Route, ToEngine
from engine.hookspecs import hookimpl


@dataclass(frozen=True)
class MineRouterConfig(SlotConfig):
    """The keys ``router.<field>``."""

    retry_after_s: int = 5
    """How long a client is asked to wait while no engine is alive."""

    def __post_init__(self) -> None:
        at_least("router.retry_after_s", self.retry_after_s, 0)


@hookimpl
def engine_router() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.router.plugin:MineRouter",
            config=MineRouterConfig,
            doc="Every request to the first engine that is alive.",
        )
    ]


class MineRouter:
    """Lives in the process that answers HTTP requests, so no method may block."""

    def __init__(self, config: MineRouterConfig, context: BuildContext) -> None:
        self._retry_after_s = config.retry_after_s

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        """An engine, another server (``ToUrl``), a stored ``Answer`` to this very request, or ``Reject``."""
        for engine in fleet:
            if engine.alive:
                return ToEngine(engine.engine_id)
        return Reject(503, "no engine is running; it may be starting or restarting", self._retry_after_s)

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        """The request was answered in full: what a router that stores answers keeps."""
