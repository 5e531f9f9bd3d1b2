"""From a quantized weight to the kernels of this device: the one place that chooses."""

from __future__ import annotations

import torch

from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import PackedLinear
from engine.kernels.cpu.linear import integer_linear
from engine.kernels.cpu.linear.integer_linear import Panels
from engine.kernels.quantized import QuantizedWeight, multiplied, paired, unpaired
from engine.kernels.triton.device import runs_triton
from engine.kernels.triton.quantized.layout import gpu_bytes
from engine_plugins.quantizer.disk_cache import Kept


def pack_quantized(
    spec: LinearSpec, weight: QuantizedWeight, activations: str, dtype: torch.dtype, device: str, context: BuildContext
) -> PackedLinear:
    """``weight``: all parts of ``spec``, on the CPU. ``activations``: ``bf16`` keeps them in the compute dtype,
    ``int8`` and ``fp8`` round each row to 8 bits."""
    if runs_triton(device):
        from engine.kernels.triton.quantized.linear import pack_gpu  # Triton, where it runs only

        return pack_gpu(weight, activations, device, context)
    if _in_panels(weight, context):
        return integer_linear.pack_integer(spec, weight, activations)
    return pack_plain(weight.to(device), activations)


def to_keep(spec: LinearSpec, weight: QuantizedWeight, packed: PackedLinear, context: BuildContext) -> Kept:
    """What :func:`pack_kept` makes the same of: ``packed`` as it is where it lies in panels, else ``weight``.

    ``packed``: what :func:`pack_quantized` made of ``weight``, which has neither zeros nor an order.
    """
    sizes = {
        "out_features": weight.out_features,
        "in_features": weight.in_features,
        "group": weight.group_size,
        "bits": weight.bits,
        "floating": int(weight.floating),
    }
    if not runs_triton(context.device.kind) and _in_panels(weight, context):
        return Kept(packed.tensors, sizes | {"panels": 1, "gated": int(spec.kind == "gate_up")})
    assert weight.zero is None and weight.order is None and not weight.e2m1
    tensors = {"codes": paired(weight.codes) if weight.bits == 4 else weight.codes, "scale": weight.scale}
    return Kept(tensors if weight.bias is None else tensors | {"bias": weight.bias}, sizes | {"panels": 0})


def pack_kept(
    spec: LinearSpec, kept: Kept, activations: str, dtype: torch.dtype, device: str, context: BuildContext
) -> PackedLinear:
    """As :func:`pack_quantized`, of what :func:`to_keep` made for a device like this one."""
    sizes, tensors = dict(kept.sizes), dict(kept.tensors)
    out_features, in_features, group, bits = (sizes[n] for n in ("out_features", "in_features", "group", "bits"))
    floating = bool(sizes["floating"])
    if sizes["panels"]:
        gated = bool(sizes["gated"])
        panels = Panels(out_features, in_features, group, bits, floating, gated, **tensors)
        return integer_linear.pack_panels(panels, activations)
    codes = unpaired(tensors["codes"], in_features) if bits == 4 else tensors["codes"]
    weight = QuantizedWeight(codes, tensors["scale"], group, bits, bias=tensors.get("bias"))
    return pack_quantized(spec, weight, activations, dtype, device, context)


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


def _in_panels(weight: QuantizedWeight, context: BuildContext) -> bool:
    return integer_linear.wanted(context) and integer_linear.can_pack(weight)
