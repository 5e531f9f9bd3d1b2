"""Configuration of the built-in drafters (importable without torch)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import DrafterConfig, at_least
from engine.contracts.model import DeviceFacts, ModelFacts
from engine_plugins.drafter.shipped import not_shipped


@dataclass(frozen=True)
class EarlyExitConfig(DrafterConfig):
    """The target's own first layers draft."""

    layers: int = 0
    """How many; 0: a quarter of them."""

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        at_least("drafter.layers", self.layers, 0)


@dataclass(frozen=True)
class DraftModelConfig(DrafterConfig):
    """A smaller model with the same tokenizer, at ``drafter.path``."""

    max_width: int = 6

    def unsupported(self, model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
        return not_shipped("draft_model", self.path, model)


@dataclass(frozen=True)
class Eagle3Config(DrafterConfig):
    """An EAGLE3 head for this model, at ``drafter.path``."""

    max_width: int = 6

    def unsupported(self, model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
        return not_shipped("eagle3", self.path, model)


@dataclass(frozen=True)
class ParallelBlockConfig(DrafterConfig):
    """A DFlash head for this model, at ``drafter.path``. Its own block may have fewer drafts than ``max_width``."""

    def unsupported(self, model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
        return not_shipped("parallel_block", self.path, model)
