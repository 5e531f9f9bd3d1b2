"""From a quantized weight to the kernels of this device: the one place that chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import PackedLinear, QuantizedWeight
from engine.kernels.cpu.linear import integer_linear
from engine.kernels.quantized import multiplied
from engine.kernels.settings import Lowering
from engine.kernels.triton.device import runs_triton
from engine.kernels.triton.quantized.layout import gpu_bytes


@dataclass(frozen=True, slots=True)
class Target:
    """What weights are packed for."""

    device: str
    in_panels: bool = False
    """On a CPU for C++ kernels."""
    capability: tuple[int, int] | None = None
    """Of a GPU; ``None``: it did not say."""


def target_of(context: BuildContext, device: str) -> Target:
    """Of a plan."""
    return Target(device, integer_linear.wanted(context), context.device.capability)


def target_for(lowering: Lowering) -> Target:
    """Of a model that is loaded."""
    on_gpu = torch.device(lowering.device).type == "cuda"
    capability = torch.cuda.get_device_capability(lowering.device) if on_gpu else None
    return Target(lowering.device, lowering.native and integer_linear.has_instructions(), capability)


def pack_quantized(spec: LinearSpec, weight: QuantizedWeight, target: Target) -> PackedLinear:
    """``weight``: all parts of ``spec``, on the CPU."""
    packed = _packed(spec, weight, target)
    return replace(packed, label=f"{packed.label} ({weight.note})") if weight.note else packed


def _packed(spec: LinearSpec, weight: QuantizedWeight, target: Target) -> PackedLinear:
    activations = weight.input_quant or "bf16"
    if runs_triton(target.device):
        from engine.kernels.triton.quantized.linear import pack_gpu  # Triton, where it runs only

        return pack_gpu(weight, activations, target.device, target.capability)
    if target.in_panels and integer_linear.can_pack(weight):
        return integer_linear.pack_integer(spec, weight, activations)
    return pack_plain(weight.to(target.device), activations)


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
