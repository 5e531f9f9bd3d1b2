"""Linear layers on CPUs with weights of 8 or 4 bits, multiplied as they are: one layout for every number of rows.

Activations in bfloat16 are multiplied as 16-bit integers with a step for every stretch of inputs: nothing of what
bfloat16 holds is lost down to 1/128 of a stretch's largest element, and below that no more than 2^-16 of it. Products
with integer codes are exact. Activations in float32, and weights in e4m3, are multiplied in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import native
from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import PackedLinear, QuantizedWeight
from engine.kernels.cpu.linear.panel_linear import (
    PAIR,
    PANEL,
    PanelCall,
    PanelLinear,
    interleaved,
    load_linears,
    separated,
    whole_pairs,
)
from engine.kernels.cpu.linear.sources import INSTRUCTIONS as INSTRUCTIONS_SOURCE
from engine.kernels.cpu.linear.sources import format_of, integer_source
from engine.kernels.quantized import from_e2m1, multiplied, rounded_rows, to_e2m1
from engine.native import ACTIVATIONS, INT32, INT64, POINTER, NativeCall

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


def wanted(context: BuildContext) -> bool:
    """Whether a plan computes its quantized layers here."""
    return context.device.kind == "cpu" and context.execution == "compile" and has_instructions()


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
    """Whether :func:`pack_integer` takes it: groups of a multiple of 32 inputs, zeros in the range of the codes."""
    offset = _offset(weight)
    in_range = weight.zero is None or int(weight.zero.min()) >= -offset
    return in_range and stretch_of(weight.in_features, weight.group_size) > 0


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight as the kernels read it. A gate and up projection has its two halves in turns of 16 outputs.

    ``weight``: uint8 ``[pairs, in * bits / 32, 32, 4]``; ``scale``: float32 and ``zero``: uint8 ``[pairs, groups,
    32]``; ``order``: int64 ``[in]``; ``bias``: float32 ``[pairs * 32]``. ``group``, ``bits``, ``floating`` as in
    :class:`~engine.kernels.quantized.Format`. The same for all processors.

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

    def outputs(tensor: Tensor) -> Tensor:
        """``[out, ...]``, gates and ups in turns, filled with zeros to whole pairs of panels."""
        tensor = interleaved(tensor) if gated else tensor
        pad = (0, 0) * (tensor.dim() - 1) + (0, -tensor.shape[0] % PAIR)
        return F.pad(tensor, pad).contiguous()

    def by_panel(tensor: Tensor) -> Tensor:
        """``[out, groups] -> [pairs, groups, 32]``"""
        padded = outputs(tensor)
        return padded.view(-1, PAIR, padded.shape[1]).transpose(1, 2).contiguous()

    return Panels(
        weight.out_features,
        weight.in_features,
        weight.group_size,
        weight.bits,
        weight.floating,
        gated,
        weight=to_panels(outputs(_unsigned(weight)), weight.bits),
        scale=by_panel(_scale(weight)),
        zero=None if weight.zero is None else by_panel((weight.zero.int() + _offset(weight)).byte()),
        order=weight.order,
        bias=None if weight.bias is None else outputs(weight.bias.float()),
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
    layer = _Layer(panels, activations, instructions)
    return PackedLinear(
        layer.tensors,
        reference=layer.reference,
        apply=layer.apply,
        out_features=layer.out_features,
        apply_add=None if layer.gated else layer.apply_add,
        apply_gated=layer.apply_gated if layer.gated else None,
        native=None if activations == "fp8" else layer.native,  # torch rounds the input
        label=layer.label,
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


class _Layer:
    """Weights in panels and the calls on them."""

    def __init__(self, panels: Panels, activations: str, instructions: str) -> None:
        self.out_features, self._inputs = panels.out_features, panels.in_features
        self.gated, self.tensors = panels.gated, panels.tensors
        self._panels, self._activations = panels, activations
        self._offset, self._instructions = _offset_of(panels.bits, panels.floating), INSTRUCTIONS.index(instructions)
        self._columns = 2 * (-(-self.out_features // PAIR) * PANEL) if panels.gated else self.out_features
        self._form = format_of(panels.bits, panels.floating)
        self._taken = () if activations == "fp8" else tuple(DTYPES)  # others are turned into float32 by torch
        self._calls: dict[tuple[torch.dtype, str], PanelCall] = {}

    @property
    def label(self) -> str:
        groups = f" (groups of {self._panels.group})" if self._panels.scale.shape[1] > 1 else ""
        kind = f"fp{self._panels.bits}" if self._panels.floating else f"int{self._panels.bits}"
        rounded = "" if self._activations == "bf16" else f", {self._activations} activations"
        return f"{kind} panels{groups}, {INSTRUCTIONS[self._instructions]}{rounded}"

    def reference(self, x: Tensor) -> Tensor:
        """The definition, on the weights taken back out of their layout; keeps no second copy."""
        return multiplied(x, self._unpacked(), self._activations)

    def apply(self, x: Tensor) -> Tensor:
        y = self._product(x, self._columns, "")
        return separated(y.T, self.out_features // 2).T.contiguous() if self.gated else y

    def apply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        if x.dtype not in self._taken:
            return residual.add_(self.apply(x))
        return self._call(x.dtype, "")(x, residual, residual)

    def apply_gated(self, x: Tensor, act: str) -> Tensor:
        return self._product(x, self.out_features // 2, act)

    def native(self, x: Tensor, y: Tensor, residual: Tensor | None = None, act: str | None = None) -> NativeCall:
        """See :class:`engine.contracts.quantizer.NativeLinear`."""
        assert self.gated == (act is not None)
        return self._call(x.dtype, act or "").at(x, y, residual)

    def _product(self, x: Tensor, columns: int, act: str) -> Tensor:
        if x.dtype in self._taken:
            return self._call(x.dtype, act)(x, x.new_empty((len(x), columns)))
        wide = rounded_rows(x, "fp8" if self._activations == "fp8" else "bf16")
        return self._call(wide.dtype, act)(wide, wide.new_empty((len(x), columns))).to(x.dtype)

    def _call(self, dtype: torch.dtype, act: str) -> PanelCall:
        """``dtype``: of activations; one that no step has is not compiled."""
        call = self._calls.get((dtype, act))
        if call is None:
            linear = self._linear(dtype, ACTIVATIONS[act] if act else 0)
            call = PanelCall(kernels(dtype, self._form).linear, linear, self._inputs)
            self._calls[dtype, act] = call
        return call

    def _linear(self, dtype: torch.dtype, activation: int) -> _Linear:
        arithmetic = INTEGERS_16 if dtype == torch.bfloat16 else FLOATS
        if self._activations == "int8":
            arithmetic = INTEGERS_8
        panels = self._panels
        in_features = _padded(self._inputs)
        grouped = panels.scale.shape[1] > 1
        long = arithmetic == INTEGERS_8 and not grouped
        return _Linear(
            in_features=in_features,
            out_features=self.out_features // 2 if activation else self._columns,
            weight=panels.weight.data_ptr(),
            bias=native.pointer(panels.bias),
            activation=activation,
            instructions=self._instructions,
            inputs=self._inputs,
            group=panels.group if grouped else in_features,
            stretch=bytes_stretch_of(self._inputs) if long else stretch_of(self._inputs, panels.group),
            scale=panels.scale.data_ptr(),
            zero=native.pointer(panels.zero),
            order=native.pointer(panels.order),
            offset=self._offset,
            # Twice the numbers of 4 bits are integers.
            arithmetic=FLOATS if self._form == "e4m3" else arithmetic,
        )

    def _unpacked(self) -> QuantizedWeight:
        def restored(outputs: Tensor) -> Tensor:
            return separated(outputs, self.out_features // 2) if self.gated else outputs[: self.out_features]

        def grouped(panels: Tensor) -> Tensor:
            return restored(panels.transpose(1, 2).flatten(0, 1)).contiguous()

        panels = self._panels
        codes = restored(from_panels(panels.weight, panels.bits)[:, : self._inputs])
        e2m1 = panels.floating and panels.bits == 4
        if e2m1:
            signed = from_e2m1(codes)
        elif panels.floating:
            signed = codes.view(torch.float8_e4m3fn)
        else:
            signed = (codes.int() - self._offset).to(torch.int8)
        zero = None if panels.zero is None else (grouped(panels.zero).int() - self._offset).to(torch.int8)
        bias = None if panels.bias is None else restored(panels.bias)
        return QuantizedWeight(
            signed.contiguous(), grouped(panels.scale), panels.group, panels.bits, zero, panels.order, bias, e2m1
        )


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
