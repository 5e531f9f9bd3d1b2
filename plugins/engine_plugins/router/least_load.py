"""Router ``least_load``: the engine with the fewest sequences, and of these the one with the fewest tokens in flight
(prompts that wait and what runs). Engines that are equal take turns.

It counts what was sent to an engine and has not ended, which is never late, and knows nothing of prefix caches.
"""

from __future__ import annotations

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.contracts.router import Answer, ApiRequest, Attempts, EngineView, Route
from engine_plugins.router.direct import NOBODY
from engine_plugins.router.round_robin import rotated


class LeastLoadRouter:
    """The plugin."""

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        self._turn = 0

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        engines = sorted(rotated(fleet, self._turn), key=_load)
        if not engines:
            return NOBODY
        sequences, tokens = _load(engines[0])
        reason = f"{sequences_of(sequences)}, {tokens:,} tokens in flight"
        return Attempts(tuple([engine.engine_id for engine in engines]), reason)

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self._turn += 1

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        """Nothing to remember."""


def sequences_of(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


def _load(engine: EngineView) -> tuple[int, int]:
    return engine.sequences, engine.queued_tokens + engine.running_tokens
