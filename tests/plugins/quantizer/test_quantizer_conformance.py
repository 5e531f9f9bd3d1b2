"""The built-in quantizers keep the slot's promises."""

from __future__ import annotations

from engine.contracts.quantizer import Quantizer
from engine.testing.context import build_context
from engine.testing.quantizer import QuantizerConformance
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config, UnquantizedConfig
from engine_plugins.quantizer.on_load import FP8, Int4, Int8
from engine_plugins.quantizer.unquantized import Unquantized


class TestUnquantized(QuantizerConformance):
    def make(self) -> Quantizer:
        return Unquantized(UnquantizedConfig(), build_context())


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
