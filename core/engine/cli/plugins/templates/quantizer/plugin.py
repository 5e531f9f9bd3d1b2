"""Quantizer ``mine``: weights in the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.contracts.config import QuantizerConfig
from engine.contracts.model import DeviceFacts, ModelFacts
from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext, Provider
from engine.contracts.quantizer import PlainWeight, StoredTensor, Weight, WeightFormat
from engine.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MineQuantizerConfig(QuantizerConfig):
    """The keys ``quantizer.<field>``; those of the base are there for every quantizer.

    One that rounds sets ``weight_bits: ClassVar[int | None] = 8``: where a model does not fit, it is then suggested.
    """

    def unsupported(self, model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
        """Why these values do not go with this model or device."""
        if self.activations != "bf16":
            return (f"quantizer.activations={self.activations}: it has weights alone; use quantizer.activations=bf16",)
        return ()


def only_plain_checkpoints(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    """Why the plugin cannot serve this model on this device; empty: it can."""
    if model.quantization is not None:
        return ("the checkpoint is already quantized",)
    return ()


@hookimpl
def engine_quantizer() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.quantizer.plugin:MineQuantizer",
            config=MineQuantizerConfig,
            unsupported=only_plain_checkpoints,
            doc="Weights in the compute dtype.",
        )
    ]


class MineQuantizer:
    """Turns the checkpoint tensors of a linear layer into a weight; the core's kernels multiply by it."""

    lossless = True
    """Whether weights keep the checkpoint's values. If not, tests say how far off they may be: ``weight_error``."""

    def __init__(self, config: MineQuantizerConfig, context: BuildContext) -> None:
        pass

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        """The checkpoint tensors that each part of a layer has, and how each may be cut for tensor parallelism."""
        return (StoredTensor("weight", {"out": 0, "in": 1}), StoredTensor("bias", {"out": 0}, optional=True))

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        """What :meth:`pack` will make of a layer, to plan memory with; ``None``: a weight in the compute dtype."""
        return None

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> Weight:
        """``parts``: tensors by suffix of each part (q, k, v), on the CPU as stored. Quantize here: for one that does,
        there are ``QuantizedWeight``, whose kernels the core has, and ``CustomWeight``."""
        import torch  # here, or listing the plugin would load torch

        weights = [part["weight"] for part in parts]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)  # a tied weight stays shared
        if not any("bias" in part for part in parts):
            return PlainWeight(weight)
        biases = [part.get("bias", part["weight"].new_zeros(len(part["weight"]))) for part in parts]
        return PlainWeight(weight, torch.cat(biases))
