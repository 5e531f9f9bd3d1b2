"""Router ``least_load``: the engine with the fewest sequences."""

from __future__ import annotations

from collections.abc import Sequence

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.contracts.router import Answer, ApiRequest, Attempts, EngineView, Reject
from engine_plugins.router.direct import NOBODY


class LeastLoadRouter:
    """The plugin. Of engines with as many sequences the one with fewer tokens in flight is taken, then the one that was
    sent a request least recently."""

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        self._turns = Turns()

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Attempts | Reject:
        alive = [engine for engine in fleet if engine.alive]
        if not alive:
            return NOBODY
        ordered = sorted(alive, key=lambda engine: (engine.sequences, tokens_of(engine), self._turns.of(engine)))
        return Attempts(tuple([engine.engine_id for engine in ordered]), f"{ordered[0].sequences} sequences")

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self._turns.took(engine_id)

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        """Nothing to remember."""


class Turns:
    """When each engine was sent a request last, as a number that grows: it decides between equals, since always the
    same one of them would get all."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._count = 0

    def of(self, engine: EngineView) -> int:
        return self._last.get(engine.engine_id, 0)

    def took(self, engine_id: str) -> None:
        self._count += 1
        self._last[engine_id] = self._count

    def keep(self, engine_ids: Sequence[str]) -> None:
        """Forget all others."""
        self._last = {name: turn for name, turn in self._last.items() if name in engine_ids}


def tokens_of(engine: EngineView) -> int:
    """In flight."""
    return engine.queued_tokens + engine.running_tokens
