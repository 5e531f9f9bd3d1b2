"""Configuration of the built-in drafters (importable without torch)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import DrafterConfig, at_least, between
from engine.contracts.model import DeviceFacts, ModelFacts
from engine_plugins.drafter.shipped import not_shipped


@dataclass(frozen=True)
class NoDrafterConfig(DrafterConfig):
    """No speculation: the device tables need no space for drafts."""

    max_width: int = 0


@dataclass(frozen=True)
class NgramConfig(DrafterConfig):
    """Prompt lookup: the last tokens are searched for earlier in the same request."""

    max_match: int = 4
    """Longest suffix, in tokens, that is looked up."""
    min_match: int = 2
    """Shortest suffix, in tokens, worth trusting."""
    window: int = 0
    """How many of the latest tokens are searched; 0: the whole request."""

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        at_least("drafter.min_match", self.min_match, 1)
        at_least("drafter.max_match", self.max_match, self.min_match)
        at_least("drafter.window", self.window, 0)


@dataclass(frozen=True)
class SuffixConfig(DrafterConfig):
    """The last tokens are searched for in the same request and in the latest outputs of others of its tenant."""

    max_width: int = 8
    min_match: int = 2
    """Shortest suffix, in tokens, worth trusting."""
    max_match: int = 32
    """Tokens from which on a match is as good as a longer one."""
    min_confidence: float = 0.3
    """A draft ends where the chance that all of it is right falls below this."""
    remembered_tokens: int = 131072
    """Output tokens of finished requests that are kept, of all tenants together; up to 300 bytes each. 0: none."""

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        at_least("drafter.min_match", self.min_match, 1)
        at_least("drafter.max_match", self.max_match, self.min_match)
        between("drafter.min_confidence", self.min_confidence, 0.0, 1.0)
        at_least("drafter.remembered_tokens", self.remembered_tokens, 0)


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
