"""Settings of schedulers that have more than the common ones."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import SchedulerConfig, at_least


@dataclass(frozen=True)
class ChunkedPrefillConfig(SchedulerConfig):
    min_chunk: int = 64
    """Prompt tokens that a step computes at least, if the token budget has room, however tight ``itl_target_ms``
    is; also the smallest chunk worth starting another prompt for."""

    def __post_init__(self) -> None:
        # Not super(): zero-argument super() is unreliable in dataclasses that are rebuilt with slots.
        SchedulerConfig.__post_init__(self)
        at_least("scheduler.min_chunk", self.min_chunk, 1)
