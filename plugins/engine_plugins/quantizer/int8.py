"""Weights in 8 bits, symmetric, one scale per output channel; quantized while loading.

The head and everything that is not a linear layer keep the compute dtype: the head is a fourteenth of the weights of
a small model and the layer whose errors show up in every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import PackedLinear, StoredTensor
from engine_plugins.quantizer.config import Int8Config
from engine_plugins.quantizer.int8_cpu import has_int8_units, limb_linear, pack_int8, unpack_int8
from engine_plugins.quantizer.unquantized import STORED, joined_bias, joined_weight, pack_plain, plain_bytes


class Int8WeightOnly:
    """See :class:`engine.contracts.quantizer.Quantizer`."""

    lossless = False

    def __init__(self, config: Int8Config, context: BuildContext) -> None:
        self._int8_activations = config.activations == "int8"

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return STORED

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> PackedLinear:
        if spec.kind == "head":
            return pack_plain(spec, parts, dtype, device)
        weight, scale = quantize_rows(joined_weight(parts))
        bias = joined_bias(parts)
        scale = scale.to(device)
        bias = None if bias is None else bias.to(device=device, dtype=torch.float32)
        if torch.device(device).type == "cpu" and has_int8_units():
            return self._pack_cpu(weight, scale, bias, dtype)
        return self._pack_plain(weight.to(device), scale, bias)

    def packed_bytes(self, spec: LinearSpec, dtype: Any, device: str, tied: bool) -> int:
        if spec.kind == "head":
            return plain_bytes(spec, dtype, device, tied)
        floats = 2 if any(part.bias for part in spec.parts) else 1  # scales, and the bias
        return spec.out_features * (spec.in_features + floats * torch.float32.itemsize)

    def _pack_cpu(self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        limbs = 1 if self._int8_activations else limbs_for(dtype)
        packed = pack_int8(weight)
        activations = "int8 activations" if limbs == 1 else f"activations as {limbs} int8 limbs"
        return PackedLinear(
            _tensors(packed, scale, bias),
            reference=self._reference(lambda: unpack_int8(packed), scale, bias),
            apply=limb_linear(packed, scale, bias, limbs),
            out_features=scale.shape[0],
            label=f"int8 oneDNN, {activations}",
        )

    def _pack_plain(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> PackedLinear:
        reference = self._reference(lambda: weight, scale, bias)
        return PackedLinear(
            _tensors(weight, scale, bias),
            reference=reference,
            apply=reference,
            out_features=scale.shape[0],
            label="int8, dequantized in every call",
        )

    def _reference(
        self, weight: Callable[[], Tensor], scale: Tensor, bias: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        """Dequantize, then multiply, in float32."""

        def reference(x: Tensor) -> Tensor:
            wide = rounded_to_int8(x.float()) if self._int8_activations else x.float()
            return F.linear(wide, weight().float() * scale[:, None], bias).to(x.dtype)

        return reference


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 ``[out, in]`` and float32 scales ``[out]``: ``weight ~ int8 * scale``."""
    wide = weight.float()
    scale = (wide.abs().amax(dim=1) / 127.0).clamp_min(1e-12)
    return (wide / scale[:, None]).round_().to(torch.int8), scale


def rounded_to_int8(x: Tensor) -> Tensor:
    """``x`` with each row rounded to 255 levels."""
    step = (x.abs().amax(dim=-1, keepdim=True) / 127.0).clamp_min(1e-20)
    return (x / step).round_() * step


def limbs_for(dtype: torch.dtype) -> int:
    """8-bit limbs that hold an activation of this dtype: bfloat16 has 8 significant bits, float16 11, float32 24."""
    return 3 if dtype == torch.float32 else 2


def _tensors(weight: Tensor, scale: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    return {"weight": weight, "scale": scale} | ({} if bias is None else {"bias": bias})
