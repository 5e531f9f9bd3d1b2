"""``quantizer=int8``, ``int4``, ``fp8``: weights are rounded while an unquantized checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import PackedLinear, StoredTensor
from engine_plugins.quantizer import packing
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config, UnquantizedConfig
from engine_plugins.quantizer.rounding import to_fp8, to_int4, to_int8
from engine_plugins.quantizer.unquantized import STORED, Unquantized, joined_bias, joined_weight
from engine_plugins.quantizer.weights import QuantizedWeight


class OnLoad:
    """See :class:`engine.contracts.quantizer.Quantizer`. Formats differ in how they round."""

    lossless = False
    bits = 8

    def __init__(self, config: Int8Config | Int4Config | FP8Config, context: BuildContext) -> None:
        self._activations = config.activations
        self._head = config.head
        self._context = context
        self._plain = Unquantized(UnquantizedConfig(), context)

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return STORED

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> PackedLinear:
        if spec.kind == "head" and self._head == "none":
            return self._plain.pack(spec, parts, dtype, device)
        weight, bias = joined_weight(parts).cpu(), joined_bias(parts)
        rounded = to_int8(weight, bias) if self._in_bytes(spec) else self._round(weight, bias)
        return packing.pack_quantized(spec, rounded, self._activations_of(spec), dtype, device, self._context)

    def packed_bytes(self, spec: LinearSpec, dtype: Any, device: str, tied: bool) -> int:
        if spec.kind == "head" and self._head == "none":
            return self._plain.packed_bytes(spec, dtype, device, tied)
        bits, group_size = (8, spec.in_features) if self._in_bytes(spec) else (self.bits, self._group_size(spec))
        has_bias = any(part.bias for part in spec.parts)
        return packing.packed_bytes(spec, bits, group_size, False, has_bias, self._context)

    def _in_bytes(self, spec: LinearSpec) -> bool:
        """Whether a layer is rounded to int8 whatever the others are."""
        return spec.kind == "head" and self._head == "int8"

    def _activations_of(self, spec: LinearSpec) -> str:
        # An int8 head takes no fp8 activations; and errors of the head show in every token.
        return "bf16" if spec.kind == "head" and self._activations == "fp8" else self._activations

    def _round(self, weight: Tensor, bias: Tensor | None) -> QuantizedWeight:
        raise NotImplementedError

    def _group_size(self, spec: LinearSpec) -> int:
        return spec.in_features


class Int8(OnLoad):
    """One scale per output channel."""

    def _round(self, weight: Tensor, bias: Tensor | None) -> QuantizedWeight:
        return to_int8(weight, bias)


class FP8(OnLoad):
    """e4m3, one scale per output channel."""

    def _round(self, weight: Tensor, bias: Tensor | None) -> QuantizedWeight:
        return to_fp8(weight, bias)


class Int4(OnLoad):
    """A scale for every ``group_size`` inputs of an output channel."""

    bits = 4

    def __init__(self, config: Int4Config, context: BuildContext) -> None:
        super().__init__(config, context)
        self._config_group = config.group_size

    def _round(self, weight: Tensor, bias: Tensor | None) -> QuantizedWeight:
        return to_int4(weight, bias, min(self._config_group, weight.shape[1]))

    def _group_size(self, spec: LinearSpec) -> int:
        return min(self._config_group, spec.in_features)
