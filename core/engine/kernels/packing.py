"""From a quantized weight to the kernels of this device: the one place that chooses."""

from __future__ import annotations

import torch

from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import PackedLinear
from engine.kernels.cpu.linear import integer_linear
from engine.kernels.quantized import QuantizedWeight, multiplied
from engine.kernels.triton.device import runs_triton
from engine.kernels.triton.quantized.layout import gpu_bytes


def pack_quantized(
    spec: LinearSpec, weight: QuantizedWeight, activations: str, dtype: torch.dtype, device: str, context: BuildContext
) -> PackedLinear:
    """``weight``: all parts of ``spec``, on the CPU. ``activations``: ``bf16`` keeps them in the compute dtype,
    ``int8`` and ``fp8`` round each row to 8 bits."""
    if runs_triton(device):
        from engine.kernels.triton.quantized.linear import pack_gpu  # Triton, where it runs only

        return pack_gpu(weight, activations, device, context)
    if in_panels(weight, context):
        return integer_linear.pack_integer(spec, weight, activations)
    return pack_plain(weight.to(device), activations)


def packed_bytes(
    spec: LinearSpec,
    bits: int,
    group_size: int,
    has_zeros: bool,
    has_bias: bool,
    context: BuildContext,
    scale_bytes: int = 4,
) -> int:
    """Bytes of what :func:`pack_quantized` keeps. ``scale_bytes``: of a scale on a GPU."""
    if runs_triton(context.device.kind):
        return gpu_bytes(spec, bits, group_size, has_zeros, has_bias, scale_bytes)
    if integer_linear.wanted(context) and integer_linear.stretch_of(spec.in_features, group_size) > 0:
        return integer_linear.packed_bytes(spec, bits, group_size, has_zeros, has_bias)
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
        label=f"{weight.kind}, dequantized in every call",
    )


def in_panels(weight: QuantizedWeight, context: BuildContext) -> bool:
    """Whether :func:`pack_quantized` lays it out in panels, on a CPU."""
    return integer_linear.wanted(context) and integer_linear.can_pack(weight)
