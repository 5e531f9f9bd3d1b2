"""Router ``round_robin``: one engine after the other."""

from __future__ import annotations

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.contracts.router import Answer, ApiRequest, Attempts, EngineView, Reject
from engine_plugins.router.direct import alive_in


class RoundRobinRouter:
    """The plugin."""

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        self._last = ""

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Attempts | Reject:
        """The engine after the one that was sent a request last, as the fleet names them."""
        after = next((at + 1 for at, engine in enumerate(fleet) if engine.engine_id == self._last), 0)
        return alive_in(fleet[after:] + fleet[:after], "its turn")

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self._last = engine_id

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        """Nothing to remember."""
