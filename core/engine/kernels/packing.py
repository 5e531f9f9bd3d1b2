"""From a quantizer's weight to the kernels of this device: the one place that chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import CustomWeight, PlainWeight, QuantizedWeight, TileLoader, Weight, WeightFormat
from engine.kernels.cpu.linear import float_linear, integer_linear
from engine.kernels.linear import PackedLinear
from engine.kernels.quantized import multiplied
from engine.kernels.settings import Lowering
from engine.kernels.triton.device import runs_triton
from engine.kernels.triton.quantized.layout import gpu_bytes


@dataclass(frozen=True, slots=True)
class Target:
    """What weights are packed for."""

    device: str
    dtype: torch.dtype
    in_panels: bool = False
    """On a CPU for C++ kernels."""

    @staticmethod
    def of(lowering: Lowering) -> Target:
        """Of a model that is loaded."""
        in_panels = lowering.native and not runs_triton(lowering.device)
        return Target(lowering.device, lowering.dtype, in_panels)

    @property
    def in_integer_panels(self) -> bool:
        """Of weights in few bits, which need more of a processor."""
        return self.in_panels and integer_linear.has_instructions()


def pack_weight(spec: LinearSpec, weight: Weight, target: Target) -> PackedLinear:
    """``weight``: all parts of ``spec``."""
    if isinstance(weight, PlainWeight):
        return _plain(spec, weight, target)
    if isinstance(weight, CustomWeight):
        return _custom(weight, target)
    packed = _quantized(spec, weight, target)
    return replace(packed, label=f"{packed.label} ({weight.note})") if weight.note else packed


def packed_bytes(spec: LinearSpec, form: WeightFormat | None, target: Target, tied: bool = False) -> int:
    """Bytes that :func:`pack_weight` adds to memory for a weight of ``form``, ``None``: a plain one. ``tied``: its
    weight is the embedding's, on the device already."""
    has_bias = any(part.bias for part in spec.parts)
    if form is None:
        if target.in_panels and float_linear.can_pack(spec, target.dtype):
            return float_linear.packed_bytes(spec, target.dtype)
        weight = 0 if tied else spec.out_features * spec.in_features
        return (weight + spec.out_features * has_bias) * target.dtype.itemsize
    group_size = min(form.group_size, spec.in_features)
    groups = -(-spec.in_features // group_size)
    order = spec.in_features * torch.int64.itemsize if form.ordered else 0
    if form.custom:
        codes = -(-spec.in_features * form.bits // 8)
        return spec.out_features * (codes + groups * (form.zeros + form.scale_bytes) + 4 * has_bias) + order
    if runs_triton(target.device):
        return order + gpu_bytes(spec, form.bits, group_size, form.zeros, has_bias, form.scale_bytes)
    if target.in_integer_panels and integer_linear.stretch_of(spec.in_features, group_size) > 0:
        return order + integer_linear.packed_bytes(spec, form.bits, group_size, form.zeros, has_bias)
    floats = groups + has_bias
    return order + spec.out_features * (spec.in_features + groups * form.zeros + floats * torch.float32.itemsize)


def _quantized(spec: LinearSpec, weight: QuantizedWeight, target: Target) -> PackedLinear:
    activations = weight.input_quant or "bf16"
    if runs_triton(target.device):
        from engine.kernels.triton.quantized.linear import pack_gpu  # Triton, where it runs only

        on_gpu = torch.device(target.device).type == "cuda"
        capability = torch.cuda.get_device_capability(target.device) if on_gpu else None
        return pack_gpu(weight, activations, target.device, capability)
    if target.in_integer_panels and integer_linear.can_pack(weight):
        return integer_linear.pack_integer(spec, weight, activations)
    return _slow(weight.to(target.device), activations)


def _slow(weight: QuantizedWeight, activations: str) -> PackedLinear:
    """With torch alone, on any device."""
    named = {"weight": weight.codes, "scale": weight.scale, "zero": weight.zero, "order": weight.order}
    return PackedLinear(
        _there(named | {"bias": weight.bias}),
        reference=lambda x: multiplied(x, weight, activations),
        apply=lambda x: multiplied(x, weight, activations),
        out_features=weight.out_features,
        label=f"{weight.kind}, dequantized in every call",
    )


def _plain(spec: LinearSpec, plain: PlainWeight, target: Target) -> PackedLinear:
    """In panels for C++ kernels, else as it is: torch multiplies."""
    weight = plain.weight.to(device=target.device, dtype=target.dtype)
    bias = None if plain.bias is None else plain.bias.to(device=target.device, dtype=target.dtype)
    if target.in_panels and float_linear.can_pack(spec, target.dtype):
        return float_linear.pack_float(spec, weight, bias)
    loader = None
    if runs_triton(target.device):
        from engine.kernels.triton.weights import load_plain  # Triton, where it runs only

        weight = weight.contiguous()
        loader = TileLoader(load_plain, weight, bias=bias)

    def linear(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return PackedLinear(
        _there({"weight": weight, "bias": bias}),
        reference=linear,
        apply=linear,
        out_features=plain.out_features,
        # addmm_ has no place for a bias beside the residual.
        apply_add=(lambda x, residual: residual.addmm_(x, weight.T)) if loader is not None and bias is None else None,
        tile_loader=loader,
        label=f"{str(target.dtype).removeprefix('torch.')} F.linear",
    )


def _custom(weight: CustomWeight, target: Target) -> PackedLinear:
    """By the weight's own functions."""
    tensors = {name: tensor.to(target.device) for name, tensor in weight.tensors.items()}
    bias = None if weight.bias is None else weight.bias.to(target.device)
    has_loader = weight.tile_loader is not None and runs_triton(target.device)
    loader = replace(weight.tile_loader(tensors), bias=bias) if has_loader and weight.tile_loader is not None else None

    def linear(x: Tensor) -> Tensor:
        return F.linear(x.float(), weight.dense(tensors), bias).to(x.dtype)

    return PackedLinear(
        _there(tensors | {"bias": bias}),
        reference=linear,
        apply=linear,
        out_features=weight.out_features,
        tile_loader=loader,
        label=f"{weight.label}, dequantized in every call" if loader is None else weight.label,
    )


def _there(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
