"""``quantizer=int8``, ``int4``, ``fp8``: weights are rounded while an unquantized checkpoint is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import UNQUANTIZED, PackedLinear, StoredTensor
from engine.kernels import packing
from engine.kernels.quantized import Format
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config, UnquantizedConfig
from engine_plugins.quantizer.kept_weights import KeptWeights, pack_kept, to_keep
from engine_plugins.quantizer.rounding import rounded
from engine_plugins.quantizer.unquantized import Unquantized, joined_bias, joined_weight


class OnLoad(ABC):
    """See :class:`engine.contracts.quantizer.Quantizer`. Formats differ in how they round.

    Large layers are kept on disk as they are packed: the next start reads them, and nothing of the checkpoint for them.
    """

    lossless = False

    def __init__(self, config: Int8Config | Int4Config | FP8Config, context: BuildContext) -> None:
        self._activations = config.activations
        self._head = config.head
        self._context = context
        self._plain = Unquantized(UnquantizedConfig(), context)
        self._kept = KeptWeights(config, context)

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        group_size = self._form_of(spec).group_size
        if self._is_plain(spec) or group_size >= spec.in_features:
            return UNQUANTIZED
        weight, bias = UNQUANTIZED
        return replace(weight, together={"in": group_size}), bias

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> PackedLinear:
        if self._is_plain(spec):
            return self._plain.pack(spec, parts, dtype, device)
        form, input_quant = self._form_of(spec), self._input_quant_of(spec)
        target = packing.target_of(self._context, device)
        place = self._kept.place(spec, form, parts)
        kept = None if place is None else self._kept.read(place)
        if kept is not None:
            packed = pack_kept(spec, kept, input_quant, target)
            return replace(packed, label=f"{packed.label}, read as kept on disk")
        weight = rounded(joined_weight(parts).cpu(), joined_bias(parts), form)
        packed = packing.pack_quantized(spec, replace(weight, input_quant=input_quant), target)
        if place is None or not self._kept.write(place, to_keep(spec, weight, packed, target)):
            return packed
        return replace(packed, label=f"{packed.label}, rounded now and kept on disk")

    def packed_bytes(self, spec: LinearSpec, dtype: Any, device: str, tied: bool) -> int:
        if self._is_plain(spec):
            return self._plain.packed_bytes(spec, dtype, device, tied)
        form, has_bias = self._form_of(spec), any(part.bias for part in spec.parts)
        group_size = min(form.group_size, spec.in_features)
        return packing.packed_bytes(spec, form.bits, group_size, False, has_bias, self._context)

    def _is_plain(self, spec: LinearSpec) -> bool:
        """Whether a layer keeps the compute dtype."""
        return spec.kind == "head" and self._head == "none"

    def _form_of(self, spec: LinearSpec) -> Format:
        in_bytes = spec.kind == "head" and self._head == "int8"
        return Format(8, spec.in_features) if in_bytes else self._form(spec)

    def _input_quant_of(self, spec: LinearSpec) -> Literal["int8", "fp8"] | None:
        # An int8 head takes no fp8 activations; and errors of the head show in every token.
        if self._activations == "fp8":
            return None if spec.kind == "head" else "fp8"
        return "int8" if self._activations == "int8" else None

    @abstractmethod
    def _form(self, spec: LinearSpec) -> Format:
        """What a layer is rounded to that is no head with a form of its own."""


class Int8(OnLoad):
    """One scale per output channel."""

    def _form(self, spec: LinearSpec) -> Format:
        return Format(8, spec.in_features)


class FP8(OnLoad):
    """e4m3, one scale per output channel."""

    def _form(self, spec: LinearSpec) -> Format:
        return Format(8, spec.in_features, floating=True)


class Int4(OnLoad):
    """A scale for every ``group_size`` inputs of an output channel."""

    def __init__(self, config: Int4Config, context: BuildContext) -> None:
        super().__init__(config, context)
        self._group_size = config.group_size

    def _form(self, spec: LinearSpec) -> Format:
        return Format(4, self._group_size)
