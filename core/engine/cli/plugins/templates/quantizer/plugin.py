"""Quantizer ``mine``: weights in the compute dtype, multiplied by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.contracts.config import QuantizerConfig
from engine.contracts.model import DeviceFacts, ModelFacts
from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext, Provider
from engine.contracts.quantizer import PackedLinear, StoredTensor
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
            doc="Weights in the compute dtype, multiplied by torch.",
        )
    ]


class MineQuantizer:
    """Turns the checkpoint tensors of a linear layer into one that is ready to run."""

    lossless = True
    """Whether weights keep the checkpoint's values. If not, tests say how far off they may be: ``weight_error``."""

    def __init__(self, config: MineQuantizerConfig, context: BuildContext) -> None:
        pass

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        """The checkpoint tensors that each part of a layer has, and how each may be cut for tensor parallelism."""
        return (StoredTensor("weight", {"out": 0, "in": 1}), StoredTensor("bias", {"out": 0}, optional=True))

    def packed_bytes(self, spec: LinearSpec, dtype: Any, device: str, tied: bool) -> int:
        """What :meth:`pack` will add to memory, from shapes alone. ``tied``: the weight is the embedding's."""
        weights = 0 if tied else spec.out_features * spec.in_features  # one that stays as it is adds nothing
        biases = spec.out_features if any(part.bias for part in spec.parts) else 0
        return int((weights + biases) * dtype.itemsize)

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> PackedLinear:
        """``parts``: tensors by suffix of each part (q, k, v), on the CPU as stored. Quantize here."""
        import torch.nn.functional as F  # here, or listing the plugin would load torch

        weight = _joined([part["weight"] for part in parts], dtype, device)
        tensors = {"weight": weight}
        if any("bias" in part for part in parts):
            biases = [
                part["bias"] if "bias" in part else part["weight"].new_zeros(len(part["weight"])) for part in parts
            ]
            tensors["bias"] = _joined(biases, dtype, device)

        def linear(x: Tensor) -> Tensor:
            """``[M, in] -> [M, out]`` in the dtype of ``x``, in new memory."""
            return F.linear(x, weight, tensors.get("bias"))

        return PackedLinear(tensors, reference=linear, apply=linear, out_features=len(weight), label="F.linear")


def _joined(tensors: Sequence[Tensor], dtype: Any, device: str) -> Tensor:
    """One after another; a single one is not copied, so that a tied weight stays shared."""
    import torch

    moved = [tensor.to(device, dtype) for tensor in tensors]
    return moved[0] if len(moved) == 1 else torch.cat(moved)
