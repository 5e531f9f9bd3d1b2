"""The built-in 8-bit KV formats keep the slot's promises, inside kernels too (see ``tests/interpreted.py``)."""

from __future__ import annotations

from engine.contracts.config import SlotConfig
from engine.contracts.kv_format import KVFormat
from engine.testing.context import build_context
from engine.testing.kv_format import KVTileConformance
from engine_plugins.kv_format.fp8 import FP8Format
from engine_plugins.kv_format.int8 import Int8Format


class TestFP8(KVTileConformance):
    error = 2.0**-4 + 2.0**-8

    def make(self) -> KVFormat:
        return FP8Format(SlotConfig(), build_context())


class TestInt8(KVTileConformance):
    error = 0.5 / 127 + 2.0**-8

    def make(self) -> KVFormat:
        return Int8Format(SlotConfig(), build_context())
