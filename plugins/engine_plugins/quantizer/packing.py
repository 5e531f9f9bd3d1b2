"""From a quantized weight to the kernels of this device: the one place that chooses."""

from __future__ import annotations

import torch

from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import PackedLinear
from engine_plugins.quantizer.weights import QuantizedWeight, multiplied


def pack_quantized(
    spec: LinearSpec, weight: QuantizedWeight, activations: str, dtype: torch.dtype, device: str, context: BuildContext
) -> PackedLinear:
    """``weight``: all parts of ``spec``, on the CPU. ``activations``: ``bf16`` keeps them in the compute dtype,
    ``int8`` and ``fp8`` round each row to 8 bits."""
    return pack_plain(weight.to(device), activations)


def packed_bytes(
    spec: LinearSpec, bits: int, group_size: int, has_zeros: bool, has_bias: bool, context: BuildContext
) -> int:
    """Bytes of what :func:`pack_quantized` keeps."""
    groups = -(-spec.in_features // group_size)
    floats = groups + has_bias
    return spec.out_features * (spec.in_features + groups * has_zeros + floats * torch.float32.itemsize)


def pack_plain(weight: QuantizedWeight, activations: str) -> PackedLinear:
    """With torch alone, on any device: slow."""
    named = {"weight": weight.codes, "scale": weight.scale, "zero": weight.zero, "order": weight.order}
    return PackedLinear(
        {name: tensor for name, tensor in (named | {"bias": weight.bias}).items() if tensor is not None},
        reference=lambda x: multiplied(x, weight, activations),
        apply=lambda x: multiplied(x, weight, activations),
        out_features=weight.out_features,
        label=f"{_kind(weight)}, dequantized in every call",
    )


def _kind(weight: QuantizedWeight) -> str:
    return "fp8" if weight.codes.is_floating_point() else f"int{weight.bits}"
