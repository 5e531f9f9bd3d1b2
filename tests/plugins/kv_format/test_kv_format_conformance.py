"""Keys and values stored as they are keep the slot's promises, and the suite catches formats that do not."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from engine.contracts.config import SlotConfig
from engine.contracts.kv_format import KVFormat
from engine.testing.context import build_context
from engine.testing.kv_format import KVFormatConformance
from engine_plugins.kv_format.int8 import Int8Format
from engine_plugins.kv_format.native import NativeFormat


class TestNative(KVFormatConformance):
    def make(self) -> KVFormat:
        return NativeFormat(SlotConfig(), build_context())


class Halving(Int8Format):
    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        return super().unpack(x, scale, dtype) / 2


def test_the_suite_refuses_a_format_that_reads_back_something_else() -> None:
    class Suite(KVFormatConformance):
        error = 0.01

        def make(self) -> KVFormat:
            return Halving(SlotConfig(), build_context())

    for test in (
        lambda suite: suite.test_what_is_packed_can_be_read_back((3, 2, 80), "float32"),
        lambda suite: suite.test_what_is_stored_times_its_scale_is_what_was_written(),
    ):
        with pytest.raises(AssertionError):
            test(Suite())
