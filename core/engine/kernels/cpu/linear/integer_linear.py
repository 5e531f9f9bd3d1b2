"""Linear layers on CPUs with weights of 8 or 4 bits, multiplied as they are: one layout for every number of rows.

Activations in bfloat16 are multiplied as 16-bit integers with a step for every stretch of inputs: nothing of what
bfloat16 holds is lost down to 1/128 of a stretch's largest element, and below that no more than 2^-16 of it. Products
with integer codes are exact. Activations in float32, and weights in e4m3, are multiplied in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import native
from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import QuantizedWeight
from engine.kernels.cpu.linear.panel_linear import (
    PAIR,
    PanelCall,
    PanelLayer,
    PanelLinear,
    in_turns,
    load_linears,
    separated,
    whole_pairs,
)
from engine.kernels.cpu.linear.sources import INSTRUCTIONS as INSTRUCTIONS_SOURCE
from engine.kernels.cpu.linear.sources import format_of, integer_source
from engine.kernels.linear import PackedLinear
from engine.kernels.quantized import from_e2m1, multiplied, rounded_rows, to_e2m1
from engine.native import INT32, INT64, POINTER

INPUT_MULTIPLE = 64
"""Inputs are filled up to one with zeros."""
STRETCH = 256
"""Inputs whose products may be added before they are scaled: so many fit an int32."""
STRETCH_MULTIPLE = 32
BYTES_STRETCH = 512
"""The same for activations of 8 bits and one scale per channel: what a first-level cache holds of a pair of panels;
an int32 would hold more."""
INSTRUCTIONS = ("none", "AVX2", "AVX512-VNNI", "AMX")
"""By the numbers ``integer_linear.cpp`` gives them."""
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Of activations."""
FLOATS, INTEGERS_16, INTEGERS_8 = range(3)
"""``Arithmetic`` of ``integer_linear.cpp``."""
E4M3_NAN = 0x7F
"""Without its sign."""


class _Linear(PanelLinear):
    """``Linear`` of ``integer_linear.cpp``."""

    _fields_ = (
        ("inputs", INT64),
        ("group", INT64),
        ("stretch", INT64),
        ("scale", POINTER),
        ("zero", POINTER),
        ("order", POINTER),
        ("offset", INT32),
        ("arithmetic", INT32),
    )


@cache
def kernels(dtype: torch.dtype, form: str) -> Any:
    """The compiled functions for activations of :data:`DTYPES` and weights of
    :data:`~engine.kernels.cpu.linear.sources.FORMATS`. Raises :class:`engine.native.NativeError`."""
    return load_linears(integer_source(DTYPES[dtype], form))


def has_instructions() -> bool:
    """Whether this processor has what these kernels need."""
    return best_instructions() != INSTRUCTIONS[0]


def stretch_of(in_features: int, group_size: int) -> int:
    """Inputs whose products are added before they are scaled: as many as fit, of one group. 0: these kernels cannot
    take such groups."""
    if group_size >= in_features:
        return STRETCH
    return next((size for size in range(STRETCH, 0, -STRETCH_MULTIPLE) if group_size % size == 0), 0)


def bytes_stretch_of(in_features: int) -> int:
    """Stretches of the same length, at most :data:`BYTES_STRETCH`, for activations of 8 bits."""
    padded = _padded(in_features)
    return _padded(-(-padded // -(-padded // BYTES_STRETCH)))


def can_pack(weight: QuantizedWeight) -> bool:
    """Whether :func:`pack_integer` takes it: groups of a multiple of 32 inputs, zeros that are codes."""
    if weight.float_zeros:
        return False
    in_range = weight.zero is None or int(weight.zero.min()) >= -_offset(weight)
    return in_range and stretch_of(weight.in_features, weight.group_size) > 0


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight as the kernels read it. A gate and up projection has its two halves interleaved by 16 outputs.

    ``weight``: uint8 ``[pairs, in * bits / 32, 32, 4]``; ``scale``: float32 and ``zero``: uint8 ``[pairs, groups,
    32]``; ``order``: int64 ``[in]``; ``bias``: float32 ``[pairs * 32]``. ``group``, ``bits``, ``floating`` as in
    :class:`~engine.contracts.quantizer.WeightFormat`. The same for all processors.

    Raises ``ValueError`` where these do not fit together: kernels would read other memory.
    """

    out_features: int
    in_features: int
    group: int
    bits: int
    floating: bool
    gated: bool
    weight: Tensor
    scale: Tensor
    zero: Tensor | None = None
    order: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        pairs = whole_pairs(self.out_features, self.gated) // PAIR
        by_group = (pairs, -(-self.in_features // self.group), PAIR)
        words = _padded(self.in_features) * self.bits // 32
        for name, tensor, dtype, shape in (
            ("weight", self.weight, torch.uint8, (pairs, words, PAIR, 4)),
            ("scale", self.scale, torch.float32, by_group),
            ("zero", self.zero, torch.uint8, by_group),
            ("order", self.order, torch.int64, (self.in_features,)),
            ("bias", self.bias, torch.float32, (pairs * PAIR,)),
        ):
            if tensor is None:
                continue
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise ValueError(f"{name} {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")

    @property
    def tensors(self) -> dict[str, Tensor]:
        names = ("weight", "scale", "zero", "order", "bias")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}


def laid_out(weight: QuantizedWeight, gated: bool) -> Panels:
    """``weight`` in panels."""

    def by_panel(tensor: Tensor) -> Tensor:
        """``[out, groups] -> [pairs, groups, 32]``"""
        padded = in_turns(tensor, gated)
        return padded.view(-1, PAIR, padded.shape[1]).transpose(1, 2).contiguous()

    return Panels(
        weight.out_features,
        weight.in_features,
        weight.group_size,
        weight.bits,
        weight.floating,
        gated,
        weight=to_panels(in_turns(_unsigned(weight), gated), weight.bits),
        scale=by_panel(_scale(weight)),
        zero=None if weight.zero is None else by_panel((weight.zero.int() + _offset(weight)).byte()),
        order=weight.order,
        bias=None if weight.bias is None else in_turns(weight.bias.float(), gated),
    )


def pack_integer(
    spec: LinearSpec, weight: QuantizedWeight, activations: str, instructions: str | None = None
) -> PackedLinear:
    """``weight``: all parts of ``spec``. ``activations``: as the quantizers' configuration has it.

    ``instructions``: one of :data:`INSTRUCTIONS`, by default the best there are.
    """
    return pack_panels(laid_out(weight, spec.kind == "gate_up"), activations, instructions)


def pack_panels(panels: Panels, activations: str, instructions: str | None = None) -> PackedLinear:
    """As :func:`pack_integer`, of weights that lie in panels already."""
    instructions = instructions or best_instructions()
    if instructions == INSTRUCTIONS[0]:
        raise ValueError(f"{INSTRUCTIONS_SOURCE.file.name} was built without AVX2, which its kernels need")
    layer = PanelLayer(
        panels.in_features,
        panels.out_features,
        panels.gated,
        () if activations == "fp8" else tuple(DTYPES),
        partial(_call, panels, activations, INSTRUCTIONS.index(instructions)),
        # What is rounded to fp8, or in no dtype of the kernels', is float32.
        partial(rounded_rows, activations="fp8" if activations == "fp8" else "bf16"),
    )
    return layer.packed(
        panels.tensors,
        # The definition, on the weights taken back out of their layout; keeps no second copy.
        lambda x: multiplied(x, unpacked(panels), activations),
        _label(panels, activations, instructions),
        is_native=activations != "fp8",  # torch rounds the input
    )


def _label(panels: Panels, activations: str, instructions: str) -> str:
    groups = f" (groups of {panels.group})" if panels.scale.shape[1] > 1 else ""
    kind = f"fp{panels.bits}" if panels.floating else f"int{panels.bits}"
    rounded = "" if activations == "bf16" else f", {activations} activations"
    return f"{kind} panels{groups}, {instructions}{rounded}"


def _call(
    panels: Panels, activations: str, instructions: int, dtype: torch.dtype, columns: int, activation: int
) -> PanelCall:
    """``dtype``: of activations; ``columns``: interleaved outputs, or what gates make of them."""
    form = format_of(panels.bits, panels.floating)
    arithmetic = INTEGERS_16 if dtype == torch.bfloat16 else FLOATS
    if activations == "int8":
        arithmetic = INTEGERS_8
    in_features = _padded(panels.in_features)
    grouped = panels.scale.shape[1] > 1
    long = arithmetic == INTEGERS_8 and not grouped
    linear = _Linear(
        in_features=in_features,
        out_features=columns,
        weight=panels.weight.data_ptr(),
        bias=native.pointer(panels.bias),
        activation=activation,
        instructions=instructions,
        inputs=panels.in_features,
        group=panels.group if grouped else in_features,
        stretch=bytes_stretch_of(panels.in_features) if long else stretch_of(panels.in_features, panels.group),
        scale=panels.scale.data_ptr(),
        zero=native.pointer(panels.zero),
        order=native.pointer(panels.order),
        offset=_offset_of(panels.bits, panels.floating),
        # Twice the numbers of 4 bits are integers.
        arithmetic=FLOATS if form == "e4m3" else arithmetic,
    )
    return PanelCall(kernels(dtype, form).linear, linear, panels.in_features)


def unpacked(panels: Panels) -> QuantizedWeight:
    """The inverse of :func:`laid_out`."""
    out_features, offset = panels.out_features, _offset_of(panels.bits, panels.floating)

    def restored(outputs: Tensor) -> Tensor:
        return separated(outputs, out_features // 2) if panels.gated else outputs[:out_features]

    def grouped(by_panel: Tensor) -> Tensor:
        return restored(by_panel.transpose(1, 2).flatten(0, 1)).contiguous()

    codes = restored(from_panels(panels.weight, panels.bits)[:, : panels.in_features])
    e2m1 = panels.floating and panels.bits == 4
    if e2m1:
        signed = from_e2m1(codes)
    elif panels.floating:
        signed = codes.view(torch.float8_e4m3fn)
    else:
        signed = (codes.int() - offset).to(torch.int8)
    zero = None if panels.zero is None else (grouped(panels.zero).int() - offset).to(torch.int8)
    bias = None if panels.bias is None else restored(panels.bias)
    return QuantizedWeight(
        signed.contiguous(), grouped(panels.scale), panels.group, panels.bits, zero, panels.order, bias, e2m1
    )


def packed_bytes(spec: LinearSpec, bits: int, group_size: int, has_zeros: bool, has_bias: bool) -> int:
    """Bytes of what :func:`pack_integer` keeps: whole pairs of panels, float32 scales and bias."""
    outputs = whole_pairs(spec.out_features, spec.kind == "gate_up")
    groups = -(-spec.in_features // group_size)
    inputs = _padded(spec.in_features)
    return outputs * (inputs * bits // 8 + groups * (torch.float32.itemsize + has_zeros) + 4 * has_bias)


def to_panels(codes: Tensor, bits: int) -> Tensor:
    """uint8 ``[out, in]``, whole pairs of panels -> uint8 ``[pairs, in * bits / 32, 32, 4]``."""
    inputs = codes.shape[1]
    if bits == 8:
        return codes.view(-1, PAIR, inputs // 4, 4).transpose(1, 2).contiguous()
    halves = codes.view(-1, PAIR, inputs // 8, 2, 4)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2).contiguous()


def from_panels(panels: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`to_panels`."""
    codes = panels.transpose(1, 2)  # [pairs, 32, in * bits / 32, 4]
    if bits == 4:
        codes = torch.stack((codes & 0xF, codes >> 4), dim=3)
    return codes.reshape(panels.shape[0] * PAIR, -1)


@cache
def best_instructions() -> str:
    """Of :data:`INSTRUCTIONS`, the best this process may use."""
    return INSTRUCTIONS[native.load(INSTRUCTIONS_SOURCE.file, {}).best_instructions()]


def _padded(in_features: int) -> int:
    return -(-in_features // INPUT_MULTIPLE) * INPUT_MULTIPLE


def _offset(weight: QuantizedWeight) -> int:
    return _offset_of(weight.bits, weight.floating)


def _offset_of(bits: int, floating: bool) -> int:
    """What is added to codes and zeros, so that codes are unsigned."""
    return 0 if floating else 1 << (bits - 1)


def _unsigned(weight: QuantizedWeight) -> Tensor:
    """uint8 ``[out, in padded]``."""
    codes = to_e2m1(weight.codes) if weight.e2m1 else weight.codes.view(torch.uint8)
    if not weight.floating:
        codes = codes + weight.codes.new_tensor(_offset(weight), dtype=torch.uint8)  # modulo 256
    return F.pad(codes, (0, -weight.in_features % INPUT_MULTIPLE))


def _scale(weight: QuantizedWeight) -> Tensor:
    """With NaN for groups that have a NaN among their codes: the kernels know none."""
    if not weight.codes.is_floating_point():
        return weight.scale
    bad = (weight.codes.view(torch.uint8) & E4M3_NAN) == E4M3_NAN
    if not bool(bad.any()):
        return weight.scale
    padded = F.pad(bad, (0, -weight.in_features % weight.group_size))
    by_group = padded.view(weight.out_features, -1, weight.group_size)
    return weight.scale.masked_fill(by_group.any(dim=2), torch.nan)
