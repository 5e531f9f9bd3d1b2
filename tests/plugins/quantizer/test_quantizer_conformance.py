"""The built-in quantizers keep the slot's promises."""

from __future__ import annotations

import torch
from tests.needs import needs_compiler

from engine.contracts.quantizer import Quantizer
from engine.kernels.cpu.linear.onednn import can_prepack
from engine.testing.context import build_context
from engine.testing.quantizer import AddConformance, GateConformance, NativeConformance, QuantizerConformance
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config, UnquantizedConfig
from engine_plugins.quantizer.on_load import FP8, Int4, Int8
from engine_plugins.quantizer.unquantized import Unquantized


class TestUnquantized(AddConformance):
    dtypes = ("float32",)

    def make(self) -> Quantizer:
        return Unquantized(UnquantizedConfig(), build_context())


class TestUnquantizedInBfloat16(AddConformance if can_prepack(torch.bfloat16) else QuantizerConformance):
    """oneDNN adds to a residual where it has products in bfloat16: not on processors that have AVX2 alone."""

    dtypes = ("bfloat16",)

    def make(self) -> Quantizer:
        return Unquantized(UnquantizedConfig(), build_context())


@needs_compiler
class TestUnquantizedInPanels(AddConformance, GateConformance, NativeConformance):
    dtypes = ("bfloat16",)

    def make(self) -> Quantizer:
        return Unquantized(UnquantizedConfig(), build_context(dtype="bfloat16", execution="compile"))


class TestInt8(QuantizerConformance):
    weight_error = 0.5 / 127 + 1e-6

    def make(self) -> Quantizer:
        return Int8(Int8Config(), build_context())


class TestFP8(QuantizerConformance):
    weight_error = 2.0**-4 + 1e-6  # half a step of three bits after the leading one

    def make(self) -> Quantizer:
        return FP8(FP8Config(), build_context())


class TestInt4(QuantizerConformance):
    weight_error = 0.37  # what a clipped range cuts off, or half a step

    def make(self) -> Quantizer:
        return Int4(Int4Config(group_size=32), build_context())
