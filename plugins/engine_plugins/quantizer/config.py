"""Configuration of the built-in quantizers (importable without torch): what each can do with activations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from engine.checkpoint.files import shown
from engine.contracts.config import QuantizerConfig, one_of
from engine.contracts.model import DeviceFacts, ModelFacts


@dataclass(frozen=True)
class UnquantizedConfig(QuantizerConfig):
    """Weights are multiplied in the compute dtype, and so are activations."""

    def __post_init__(self) -> None:
        one_of("quantizer.activations", self.activations, ("bf16",))


@dataclass(frozen=True)
class OnLoadConfig(QuantizerConfig):
    """What the quantizers share that round weights while loading."""

    head: str = "int8"
    """``int8``: the vocabulary projection too, one scale per token of the vocabulary; ``none``: it keeps the compute
    dtype."""
    cache: str = "auto"
    """Where rounded weights are kept for the next start: ``auto``: ``~/.cache/engine/weights`` (below
    ``$XDG_CACHE_HOME``, where that is set); ``none``: nowhere; or the path of a folder."""
    cache_gib: float = 100.0
    """Most that all models' rounded weights may take there; those that were not used for longest are removed."""
    heads: ClassVar[tuple[str, ...]] = ("int8", "none")

    def __post_init__(self) -> None:
        one_of("quantizer.head", self.head, self.heads)
        if self.cache not in ("auto", "none") and not Path(self.cache).is_absolute():
            raise ValueError(f"quantizer.cache={self.cache}: expected auto, none or an absolute path")
        if not 0 < self.cache_gib < float("inf"):
            raise ValueError(
                f"quantizer.cache_gib={self.cache_gib}: expected a number above 0 (or quantizer.cache=none)"
            )


@dataclass(frozen=True)
class Int8Config(OnLoadConfig):
    """``activations``: ``bf16`` loses nothing their dtype holds; ``int8`` rounds each token's to 8 bits too, which is
    faster for long prompts."""

    weight_bits: ClassVar[int | None] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("quantizer.activations", self.activations, ("bf16", "int8"))


@dataclass(frozen=True)
class Int4Config(OnLoadConfig):
    """``activations`` as for int8. ``head=int4`` rounds the vocabulary projection as every other layer: errors there
    show in every token, so compare with ``engine eval``."""

    weight_bits: ClassVar[int | None] = 4
    group_size: int = 128
    """Input features that share a scale."""
    heads: ClassVar[tuple[str, ...]] = ("int8", "int4", "none")

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("quantizer.activations", self.activations, ("bf16", "int8"))
        one_of("quantizer.group_size", self.group_size, (32, 64, 128, 256))


@dataclass(frozen=True)
class FP8Config(OnLoadConfig):
    """``activations``: ``fp8`` rounds each token's to 8 bits too, for the FP8 units of cards that have them."""

    weight_bits: ClassVar[int | None] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("quantizer.activations", self.activations, ("bf16", "fp8"))


def only_plain_checkpoints(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    if model.quantization is None:
        return ()
    method = shown(model.quantization.get("quant_method", "unknown"))
    return (f"the checkpoint is already quantized (quant_method={method}); quantizer=checkpoint reads that",)
