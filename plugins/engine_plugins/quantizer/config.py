"""Configuration of the built-in quantizers (importable without torch): what each can do with activations."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import QuantizerConfig, one_of


@dataclass(frozen=True)
class UnquantizedConfig(QuantizerConfig):
    """Weights are multiplied in the compute dtype, and so are activations."""

    def __post_init__(self) -> None:
        one_of("quantizer.activations", self.activations, ("bf16",))


@dataclass(frozen=True)
class Int8Config(QuantizerConfig):
    """``activations``: ``bf16`` loses nothing their dtype holds; ``int8`` rounds each token's to 8 bits too, which is
    faster for long prompts."""

    def __post_init__(self) -> None:
        one_of("quantizer.activations", self.activations, ("bf16", "int8"))
