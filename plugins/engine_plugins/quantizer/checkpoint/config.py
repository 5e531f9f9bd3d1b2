"""Configuration of ``quantizer=checkpoint`` (importable without torch)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import QuantizerConfig, one_of
from engine.contracts.model import DeviceFacts, ModelFacts
from engine_plugins.quantizer.checkpoint.methods import recipe_of


@dataclass(frozen=True)
class CheckpointConfig(QuantizerConfig):
    """``auto``: activations as the checkpoint says, FP8 only where the device multiplies it; ``bf16`` keeps them in
    the compute dtype; ``int8`` (integer weights) and ``fp8`` (FP8 weights) round each token's to 8 bits."""

    activations: str = "auto"

    def __post_init__(self) -> None:
        one_of("quantizer.activations", self.activations, ("auto", "bf16", "int8", "fp8"))

    def unsupported(self, model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
        """Rounded activations need weights of the same kind."""
        if self.activations in ("auto", "bf16"):
            return ()
        what = f"quantizer.activations={self.activations}"
        if model.quantization is None:
            return (f"{what}: expected one of bf16, auto: the checkpoint is not quantized (see quantizer=int8, fp8)",)
        kinds = {"fp8" if scheme.floating else "int8" for scheme in recipe_of(model.quantization).schemes}
        if self.activations not in kinds:
            others = ", ".join(("auto", "bf16", *sorted(kinds)))
            return (f"{what}: expected one of {others}: the checkpoint has no weights of that kind",)
        return ()
