"""The built-in quantizers keep the slot's promises."""

from __future__ import annotations

from tests.native import needs_compiler

from engine.contracts.quantizer import Quantizer
from engine.testing.context import build_context
from engine.testing.quantizer import QuantizerConformance
from engine_plugins.quantizer.config import Int8Config, UnquantizedConfig
from engine_plugins.quantizer.int8 import Int8WeightOnly
from engine_plugins.quantizer.unquantized import Unquantized


class TestUnquantized(QuantizerConformance):
    def make(self) -> Quantizer:
        return Unquantized(UnquantizedConfig(), build_context())


@needs_compiler
class TestUnquantizedInPanels(QuantizerConformance):
    dtypes = ("bfloat16",)

    def make(self) -> Quantizer:
        return Unquantized(UnquantizedConfig(), build_context(dtype="bfloat16", execution="compile"))


class TestInt8WeightOnly(QuantizerConformance):
    weight_error = 0.5 / 127 + 1e-6

    def make(self) -> Quantizer:
        return Int8WeightOnly(Int8Config(), build_context())
