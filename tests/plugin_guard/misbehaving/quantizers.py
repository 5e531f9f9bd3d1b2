"""Quantizers."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch

from engine.native import Function
from engine_plugins.quantizer.unquantized import Unquantized, pack_plain


class Plain(Unquantized):
    """Correct: one torch product, no native calls. Derived classes change what it packs."""

    def pack(self, spec: Any, parts: Any, dtype: Any, device: str) -> Any:
        return self.changed(pack_plain(spec, parts, dtype, device), spec)

    def changed(self, packed: Any, spec: Any) -> Any:
        return packed

    def packed_bytes(self, spec: Any, dtype: Any, device: str, tied: bool) -> Any:
        return spec.out_features * spec.in_features * dtype.itemsize


class OtherDtype(Plain):
    """``apply`` returns bfloat16 whatever it is given."""

    says = r"apply\(\) of \S+ returned bfloat16 \[1, \d+\] on cpu, expected contiguous float32 \[1, \d+\] on cpu"

    def changed(self, packed: Any, spec: Any) -> Any:
        return replace(packed, apply=lambda x: packed.apply(x).bfloat16(), apply_add=None)


class ColumnShort(Plain):
    """``apply`` forgets the last column."""

    says = r"apply\(\) of \S+ returned float32 \[1, (\d+)\] on cpu, expected"

    def changed(self, packed: Any, spec: Any) -> Any:
        return replace(packed, apply=lambda x: packed.apply(x)[:, :-1].contiguous(), apply_add=None)


class NotContiguous(Plain):
    """``apply`` returns a transposed view."""

    says = r"apply\(\) of \S+ returned not contiguous"

    def changed(self, packed: Any, spec: Any) -> Any:
        return replace(packed, apply=lambda x: packed.apply(x).T.contiguous().T, apply_add=None)


class OnlyManyRows(Plain):
    """``apply`` is a row short, for more than 16 rows."""

    says = r"apply\(\) of \S+ returned float32 \[16, \d+\] on cpu, expected contiguous float32 \[17, \d+\]"

    def changed(self, packed: Any, spec: Any) -> Any:
        return replace(packed, apply=lambda x: packed.apply(x)[: max(1, len(x) - (len(x) > 16))], apply_add=None)


class ManyRows(Plain):
    """Has room for 48 rows."""

    says = r"apply\(\) of \S+ is off by"

    def changed(self, packed: Any, spec: Any) -> Any:
        def apply(x: Any) -> Any:
            found = packed.apply(x)
            found[48:] = 0
            return found

        return replace(packed, apply=apply, apply_add=None)


class NoTensor(Plain):
    """``apply`` returns numbers in a list."""

    says = r"apply\(\) of \S+ returned \[\[.*expected a tensor"

    def changed(self, packed: Any, spec: Any) -> Any:
        return replace(packed, apply=lambda x: packed.apply(x).tolist(), apply_add=None)


class OtherWeights(Plain):
    """``apply`` multiplies with twice the weights."""

    says = r"apply\(\) of \S+ is off by 100\.0% of the largest number"

    def changed(self, packed: Any, spec: Any) -> Any:
        return replace(packed, apply=lambda x: 2.0 * packed.apply(x), apply_add=None)


class FirstLayer(Plain):
    """Keeps a layer for all layers of its shape."""

    says = r"pack\(\) says lossless=True, and its product is off by"

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self._packed: dict[Any, Any] = {}

    def changed(self, packed: Any, spec: Any) -> Any:
        return self._packed.setdefault((spec.in_features, spec.out_features, spec.kind), packed)


class PartsReversed(Plain):
    """Puts keys and values before queries."""

    says = r"pack\(\) says lossless=True, and its product is off by"

    def pack(self, spec: Any, parts: Any, dtype: Any, device: str) -> Any:
        return super().pack(spec, parts[::-1], dtype, device)


class SameMemory(Plain):
    """``apply`` writes to one buffer again and again."""

    says = r"apply\(\) of \S+ returned memory that is in use"

    def changed(self, packed: Any, spec: Any) -> Any:
        kept: dict[int, Any] = {}

        def apply(x: Any) -> Any:
            found = packed.apply(x)
            return kept.setdefault(len(x), found).copy_(found)

        return replace(packed, apply=apply, apply_add=None)


class ChangesInput(Plain):
    """``apply`` computes in place of its input."""

    says = r"apply\(\) of \S+ (changed its input|is off by)"

    def changed(self, packed: Any, spec: Any) -> Any:
        return replace(packed, apply=lambda x: packed.apply(x.mul_(1.0)) + 0 * x.zero_()[:, :1], apply_add=None)


class NotANumber(Plain):
    """``apply`` returns NaN."""

    says = r"apply\(\) of \S+ returned NaN or infinity"

    def changed(self, packed: Any, spec: Any) -> Any:
        return replace(packed, apply=lambda x: packed.apply(x) * float("nan"), apply_add=None)


class WrongSum(Plain):
    """``apply_add`` forgets the residual."""

    says = r"apply_add\(\) of \S+ is off by"

    def changed(self, packed: Any, spec: Any) -> Any:
        return replace(packed, apply_add=lambda x, residual: packed.apply(x))


class ApplyRaises(Plain):
    """``apply`` raises at every call."""

    says = r"apply\(\) raised RuntimeError: apply boom \(quantizers\.py:\d+\)"

    def changed(self, packed: Any, spec: Any) -> Any:
        def apply(x: Any) -> Any:
            raise RuntimeError("apply boom")

        return replace(packed, apply=apply, apply_add=None)


class AssertsNothing(Plain):
    """``apply`` ends in a bare assertion."""

    says = r"apply\(\) raised AssertionError \(quantizers\.py:\d+\)"

    def changed(self, packed: Any, spec: Any) -> Any:
        def apply(x: Any) -> Any:
            assert x is None
            return x

        return replace(packed, apply=apply, apply_add=None)


class PackRaises(Plain):
    """``pack`` raises."""

    says = r"pack\(\) raised RuntimeError: pack boom \(quantizers\.py:\d+\)"

    def changed(self, packed: Any, spec: Any) -> Any:
        raise RuntimeError("pack boom")


class PacksList(Plain):
    """``pack`` returns tensors in a list."""

    says = r"pack\(\) returned \[.*, expected a PackedLinear"

    def changed(self, packed: Any, spec: Any) -> Any:
        return list(packed.tensors.values())


class PacksNoFunction(Plain):
    """``apply`` is a tensor."""

    says = r"pack\(\) returned a layer with apply=.*, expected a function"

    def changed(self, packed: Any, spec: Any) -> Any:
        return replace(packed, apply=torch.zeros(3))


class OtherSize(Plain):
    """``out_features`` is half the truth."""

    says = r"pack\(\) returned a layer with out_features=\d+, expected \d+"

    def changed(self, packed: Any, spec: Any) -> Any:
        return replace(packed, out_features=packed.out_features // 2)


class StoresNames(Plain):
    """``stored`` returns suffixes instead of records."""

    says = r"stored\(\) returned \('weight',\), expected a list of StoredTensor"

    def stored(self, spec: Any) -> Any:
        return ("weight",)


class SaysHowMuch(Plain):
    """``packed_bytes`` returns a text."""

    says = r"packed_bytes\(\) returned 'little', expected a number of bytes"

    def packed_bytes(self, spec: Any, dtype: Any, device: str, tied: bool) -> Any:
        return "little"


class WritesBeyond(Plain):
    """A native call writes a row too many."""

    says = r"native\(\) of \S+ writes outside of its output"

    def changed(self, packed: Any, spec: Any) -> Any:
        memset = Function("memset", ctypes.CDLL(None).memset, (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64))

        def native(x: Any, y: Any, residual: Any = None, act: Any = None) -> Any:
            return memset.at(y.data_ptr(), 0, y.nbytes + 64)

        return replace(packed, native=native)


class Lossless(Plain):
    """``lossless`` is a text."""

    says = r"lossless is 'yes', expected bool"
    lossless: Any = "yes"
