"""What every plugin of a slot has in its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine.contracts.config.checks import at_least, between, one_of

if TYPE_CHECKING:
    from engine.contracts.model import DeviceFacts, ModelFacts


@dataclass(frozen=True)
class SlotConfig:
    """Base of every plugin's config."""

    def unsupported(self, model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
        """Why these values do not go with this model or device (empty: they do); asked after the provider's own
        ``unsupported``. It must not import torch."""
        return ()

    def requires(self) -> Mapping[str, tuple[str, ...]]:
        """Capabilities that these values need of the plugins of other slots, by slot, beside the provider's own
        ``requires``."""
        return {}


@dataclass(frozen=True)
class SchedulerConfig(SlotConfig):
    max_requests: int = 32
    """Most requests running at once (rows of the device tables)."""
    token_budget: int = 2048
    """Most tokens in one step."""
    itl_target_ms: float = 0.0
    """A step that holds decoding requests should take no longer than this; 0 means no target."""

    def __post_init__(self) -> None:
        at_least("scheduler.max_requests", self.max_requests, 1)
        at_least("scheduler.token_budget", self.token_budget, 1)
        at_least("scheduler.itl_target_ms", self.itl_target_ms, 0)


BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
"""That a KV block may have, in tokens."""


@dataclass(frozen=True)
class KVAllocatorConfig(SlotConfig):
    block_size: int = 16
    """Tokens per KV block, of each rank that caches other ones (``parallelism.dcp``): a power of two, 8 to 256."""

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"kv_allocator.block_size={self.block_size}: expected a power of two from 8 to 256")


@dataclass(frozen=True)
class DrafterConfig(SlotConfig):
    path: str = "auto"
    """Checkpoint of drafters that have weights; ``auto`` finds the one that ships with the model."""
    max_width: int = 4
    """Most draft tokens per request and step; the engine chooses 0..max_width online."""
    adaptive: bool = True
    """False: always draft ``max_width`` tokens."""

    def __post_init__(self) -> None:
        between("drafter.max_width", self.max_width, 0, 32)


@dataclass(frozen=True)
class QuantizerConfig(SlotConfig):
    weight_bits: ClassVar[int | None] = None
    """Bits of a weight in a linear layer, scales apart, where the plugin rounds on load; ``None``: it does not. A model
    that does not fit is told about plugins with fewer bits."""
    activations: str = "bf16"
    """``bf16`` (weight-only), ``int8`` or ``fp8``."""

    def __post_init__(self) -> None:
        one_of("quantizer.activations", self.activations, ("bf16", "int8", "fp8"))


@dataclass(frozen=True)
class CommunicatorConfig(SlotConfig):
    """How long a call may take is ``parallelism.timeout_s``, whatever carries it."""


@dataclass(frozen=True)
class ConstraintConfig(SlotConfig):
    """What a request's grammar may be. A request beyond these limits is refused."""

    max_bytes: int = 128 * 1024
    """Most bytes of a grammar."""
    max_properties: int = 500
    """Most properties of a JSON schema, of all of its objects together."""
    max_enum: int = 5000
    """Most values of the enums of a JSON schema, of all of them together."""
    max_depth: int = 64
    """How deep a JSON schema may be nested."""
    max_text: int = 8192
    """Most characters of a choice, of a constant, a name or a pattern of a JSON schema, of a text of another grammar,
    and of a regular expression: a mask may take time for each."""
    compile_s: float = 2.0
    """CPU time that a grammar may take to be compiled."""
    mask_ms: float = 5.0
    """CPU time that the masks of a request may take in the mean, beyond a tenth of a second in all."""
    max_cached: int = 64
    """Verdicts on grammars that are kept for further requests, and compiled ones for requests that have not begun."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_properties", "max_enum", "max_depth", "max_text", "max_cached"):
            at_least(f"constraint.{name}", getattr(self, name), 1)
        at_least("constraint.compile_s", self.compile_s, 0.1)
        at_least("constraint.mask_ms", self.mask_ms, 0.1)
