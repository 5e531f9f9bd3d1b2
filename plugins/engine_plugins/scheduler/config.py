"""Settings of schedulers that have more than the common ones."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import SchedulerConfig, at_least


@dataclass(frozen=True)
class ChunkedPrefillConfig(SchedulerConfig):
    min_chunk: int = 64
    """Prompt tokens that a step computes at least, if the token budget has room for them, however tight
    ``itl_target_ms`` is: a late token is better than a prompt that never gets on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("scheduler.min_chunk", self.min_chunk, 1)
