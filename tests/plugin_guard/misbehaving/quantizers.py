"""Quantizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.contracts.quantizer import CustomWeight, WeightFormat
from engine_plugins.quantizer.unquantized import Unquantized


class Plain(Unquantized):
    """Correct. Derived classes change what it packs."""

    def pack(self, spec: Any, parts: Any, dtype: Any, device: str) -> Any:
        return self.changed(super().pack(spec, parts, dtype, device), spec)

    def changed(self, weight: Any, spec: Any) -> Any:
        return weight


class Dense(Plain):
    """Correct, in a format of its own."""

    def format(self, spec: Any) -> Any:
        return WeightFormat(32, spec.in_features, scale_bytes=0, custom=True)

    def changed(self, weight: Any, spec: Any) -> Any:
        bias = None if weight.bias is None else weight.bias.float()
        tensors = {"weight": weight.weight.float().contiguous()}
        return CustomWeight(tensors, spec.out_features, spec.in_features, self.dense, bias=bias)

    def dense(self, tensors: Any) -> Any:
        return tensors["weight"]


class RowShort(Plain):
    """Forgets the last output."""

    says = r"pack\(\) returned a weight \[(\d+), (\d+)\], expected \[\d+, \2\]"

    def changed(self, weight: Any, spec: Any) -> Any:
        return replace(weight, weight=weight.weight[:-1])


class DenseShort(Dense):
    """Unpacks all columns but the last."""

    says = r"dense\(\) returned float32 \[\d+, \d+\], expected float32 \[\d+, \d+\]"

    def dense(self, tensors: Any) -> Any:
        return tensors["weight"][:, :-1]


class NoTensor(Dense):
    """Unpacks numbers into a list."""

    says = r"dense\(\) returned \[\[.*, expected float32 \[\d+, \d+\]"

    def dense(self, tensors: Any) -> Any:
        return tensors["weight"].tolist()


class OtherWeights(Plain):
    """Packs twice the weights."""

    says = r"pack\(\) says lossless=True, and its product is off by 100\.0% of the largest number"

    def changed(self, weight: Any, spec: Any) -> Any:
        return replace(weight, weight=2.0 * weight.weight)


class FirstLayer(Plain):
    """Keeps a layer for all layers of its shape."""

    says = r"pack\(\) says lossless=True, and its product is off by"

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self._packed: dict[Any, Any] = {}

    def changed(self, weight: Any, spec: Any) -> Any:
        return self._packed.setdefault((spec.in_features, spec.out_features, spec.kind), weight)


class PartsReversed(Plain):
    """Puts keys and values before queries."""

    says = r"pack\(\) says lossless=True, and its product is off by"

    def pack(self, spec: Any, parts: Any, dtype: Any, device: str) -> Any:
        return super().pack(spec, parts[::-1], dtype, device)


class NotANumber(Plain):
    """Divides by a scale of 0."""

    says = r"pack\(\) of \S+: its product has a definition that gives NaN or infinity"

    def changed(self, weight: Any, spec: Any) -> Any:
        return replace(weight, weight=weight.weight / 0.0)


class DenseRaises(Dense):
    """Cannot unpack what it has packed."""

    says = r"dense\(\) raised RuntimeError: dense boom \(quantizers\.py:\d+\)"

    def dense(self, tensors: Any) -> Any:
        raise RuntimeError("dense boom")


class AssertsNothing(Dense):
    """Unpacking ends in a bare assertion."""

    says = r"dense\(\) raised AssertionError \(quantizers\.py:\d+\)"

    def dense(self, tensors: Any) -> Any:
        assert tensors is None


class PackRaises(Plain):
    """``pack`` raises."""

    says = r"pack\(\) raised RuntimeError: pack boom \(quantizers\.py:\d+\)"

    def changed(self, weight: Any, spec: Any) -> Any:
        raise RuntimeError("pack boom")


class PacksList(Plain):
    """``pack`` returns tensors in a list."""

    says = r"pack\(\) returned \[.*, expected a PlainWeight, a QuantizedWeight or a CustomWeight"

    def changed(self, weight: Any, spec: Any) -> Any:
        return [torch.zeros(3)]


class StoresNames(Plain):
    """``stored`` returns suffixes instead of records."""

    says = r"stored\(\) returned \('weight',\), expected a list of StoredTensor"

    def stored(self, spec: Any) -> Any:
        return ("weight",)


class SaysHowMuch(Plain):
    """``format`` returns a number of bits."""

    says = r"format\(\) returned 4, expected a WeightFormat or None"

    def format(self, spec: Any) -> Any:
        return 4


class Lossless(Plain):
    """``lossless`` is a text."""

    says = r"lossless is 'yes', expected bool"
    lossless: Any = "yes"
