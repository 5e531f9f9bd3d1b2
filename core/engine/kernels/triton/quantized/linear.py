"""A quantized linear layer on a GPU: which kernels multiply it, by the number of rows.

=================  ==========================================================================================
rows               what runs
=================  ==========================================================================================
up to 16           the core's fused kernels, which read the weights through the tile loader; of bfloat16 rows through
                   its words, if it has any (``fragments.py``)
17 to 64           the same product in tiles of 32 or 64 rows: weights are read once
more               weights dequantized into scratch memory, one layer at a time, and torch's product
17 and more, with  rows rounded to 8 bits (by the kernel that norms them, where there is one) and
8-bit activations  ``torch._int_mm`` or ``torch._scaled_mm``
=================  ==========================================================================================

``tools/gpu_check`` measures each; ``docs/measured.md`` has what it found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from engine.contracts.quantizer import QuantizedWeight, TileLoader
from engine.kernels.linear import PackedLinear
from engine.kernels.quantized import from_e2m1, multiplied
from engine.kernels.triton.fp8_units import has_fp8_units
from engine.kernels.triton.launch import Launch, SkinnyLinear, quantized_rows
from engine.kernels.triton.quantized.kernels import dequantized, scaled_sums
from engine.kernels.triton.quantized.layout import unpacked_int4, unpacked_nibbles
from engine.kernels.triton.quantized.loaders import tile_loader, why_unreadable
from engine.kernels.triton.tiles import MAX_ROWS, MOST_ROWS

ADA = (8, 9)
FP8_ON_ADA = "2.12"
"""Earlier versions of torch launch FP8 products on this capability beside the current stream (pytorch#177651)."""
WHOLE_8_BIT = 16
"""Both sizes of a weight that is multiplied in 8 bits are multiples of this."""

Rounding = Literal["int8", "fp8"]


@dataclass(frozen=True, slots=True)
class GpuLinear:
    """Tensors of a layer and the ways to multiply by them."""

    loader: TileLoader
    in_features: int
    out_features: int
    bits: int
    is_float: bool
    group_size: int
    order: Tensor | None
    rounding: Rounding | None
    """To what the rows of many are rounded; ``None``: they stay as they are."""
    launch: Launch

    def apply(self, x: Tensor) -> Tensor:
        """``[M, in] -> [M, out]``."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        x = x if x.stride(1) == 1 else x.contiguous()
        if self.rounding is not None and x.shape[0] > MAX_ROWS:
            return self.apply_quantized(*quantized_rows(x, None, self.rounding, self.launch), x.dtype)
        if x.shape[0] <= MOST_ROWS:
            return SkinnyLinear(self.launch, self.loader, self.in_features, self.out_features).store(x)
        dense = dequantized(self.loader, self.out_features, self.in_features, x.dtype, self.launch)
        bias = self.loader.bias
        return F.linear(x, dense, None if bias is None else bias.to(x.dtype))

    def apply_quantized(self, codes: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`PackedLinear`."""
        scale, bias = self.loader.channel_scale, self.loader.bias
        assert scale is not None
        if self.rounding == "int8":
            return scaled_sums(torch._int_mm(codes, self.loader.weight.T), step, scale, bias, dtype, self.launch)
        weight = self.loader.weight.view(torch.float8_e4m3fn)
        # Not every version of torch gives float16 with a scale for each row.
        wide = torch.bfloat16 if dtype == torch.float16 else dtype
        out: Tensor = torch._scaled_mm(codes, weight.T, scale_a=step, scale_b=scale[None], out_dtype=wide).to(dtype)
        return out if bias is None else out.add_(bias)

    def reference(self, x: Tensor) -> Tensor:
        """The definition: rows are rounded where there are many of them."""
        return multiplied(x, self.weight(), self.rounding if self.rounding and x.shape[0] > MAX_ROWS else "bf16")

    def weight(self) -> QuantizedWeight:
        """The weight that the tensors stand for."""
        loader = self.loader
        codes, e2m1 = loader.weight, self.bits == 4 and self.is_float
        if e2m1:
            codes = from_e2m1(unpacked_nibbles(codes, self.out_features, self.in_features))
        elif self.bits == 4:
            codes = unpacked_int4(codes, self.out_features, self.in_features)
        elif self.is_float:
            codes = codes.view(torch.float8_e4m3fn)
        scale = loader.channel_scale[:, None] if loader.channel_scale is not None else loader.scale
        assert scale is not None
        scale = 0.5 * scale.view(torch.float8_e8m0fnu).float() if e2m1 else scale.float()
        return QuantizedWeight(
            codes, scale, self.group_size, self.bits, loader.zero, self.order, loader.bias, e2m1=e2m1
        )


def pack_gpu(
    weight: QuantizedWeight, activations: str, device: str, capability: tuple[int, int] | None
) -> PackedLinear:
    """``weight``: on any device, to ``device``. Weights that kernels cannot read are multiplied by torch alone."""
    reason = why_unreadable(weight)
    if reason is not None:
        return _pack_slow(weight.to(device), activations, reason)
    rounding, why_not = rounding_of(weight, activations, capability)
    loader = tile_loader(weight.to(device))
    order = None if weight.order is None else weight.order.to(device)
    linear = GpuLinear(
        loader, weight.in_features, weight.out_features, weight.bits, weight.floating,
        weight.group_size, order, rounding, Launch.on(device),
    )  # fmt: skip
    tensors = {
        "weight": loader.weight, "scale": loader.scale, "zero": loader.zero, "channel_scale": loader.channel_scale,
        "bias": loader.bias, "order": order,
    }  # fmt: skip
    return PackedLinear(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        reference=linear.reference,
        apply=linear.apply,
        out_features=weight.out_features,
        # Fused kernels read their inputs in the model's order.
        tile_loader=loader if order is None else None,
        input_quant=rounding,
        apply_quantized=None if rounding is None else linear.apply_quantized,
        label=_label(weight, rounding, why_not),
    )


def _pack_slow(weight: QuantizedWeight, activations: str, reason: str) -> PackedLinear:
    named = {name: getattr(weight, name) for name in ("codes", "scale", "zero", "order", "bias")}
    return PackedLinear(
        {name: tensor for name, tensor in named.items() if tensor is not None},
        reference=lambda x: multiplied(x, weight, activations),
        apply=lambda x: multiplied(x, weight, activations),
        out_features=weight.out_features,
        label=f"{_kind(weight)}, dequantized by torch in every call (no kernel for {reason})",
    )


def rounding_of(
    weight: QuantizedWeight, activations: str, capability: tuple[int, int] | None
) -> tuple[Rounding | None, str]:
    """To what many rows are rounded, and if activations were to be rounded and are not, why."""
    if activations == "bf16":
        return None, ""
    wanted: Rounding = "int8" if activations == "int8" else "fp8"
    if weight.bits != 8 or weight.floating != (wanted == "fp8"):
        return None, f"no kernel multiplies {_kind(weight)} weights by {wanted}"
    if not weight.per_channel or weight.zero is not None or weight.order is not None:
        return None, f"{wanted} sums need one scale per channel"
    if weight.in_features % WHOLE_8_BIT or weight.out_features % WHOLE_8_BIT:
        return None, f"sizes are not multiples of {WHOLE_8_BIT}"
    if wanted == "fp8" and not has_fp8_units(capability):
        return None, "this device has no FP8 units"
    if wanted == "fp8" and capability == ADA and TorchVersion(torch.__version__) < FP8_ON_ADA:
        return None, f"FP8 products on sm_89 need torch {FP8_ON_ADA}, this is {torch.__version__}"
    return wanted, ""


def _kind(weight: QuantizedWeight) -> str:
    return weight.kind if weight.per_channel else f"{weight.kind} in groups of {weight.group_size}"


def _label(weight: QuantizedWeight, rounding: Rounding | None, why_not: str) -> str:
    kind = _kind(weight)
    if weight.order is not None:
        kind += ", inputs gathered in activation order"
    if rounding is not None:
        return f"{kind}, activations in {rounding} beyond {MAX_ROWS} rows ({_PRODUCTS[rounding]})"
    many = f"{kind}, Triton up to {MOST_ROWS} rows, then dequantized, F.linear"
    return f"{many}; activations are not rounded: {why_not}" if why_not else many


_PRODUCTS: dict[Rounding, str] = {"int8": "torch._int_mm", "fp8": "torch._scaled_mm"}
