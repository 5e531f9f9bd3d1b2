"""Configuration of the built-in routers."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import SlotConfig, at_least


@dataclass(frozen=True)
class ResponseCacheConfig(SlotConfig):
    """Stored answers of deterministic requests."""

    max_entries: int = 1024
    """Most answers kept."""
    max_bytes: int = 64 * 1024 * 1024
    """Most bytes of answers kept."""

    def __post_init__(self) -> None:
        at_least("router.max_entries", self.max_entries, 1)
        at_least("router.max_bytes", self.max_bytes, 1)
