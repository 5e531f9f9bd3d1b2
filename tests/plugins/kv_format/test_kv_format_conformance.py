"""The built-in KV formats keep the slot's promises, and the suite catches formats that do not."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from engine.contracts.config import SlotConfig
from engine.contracts.kv_format import KVFormat
from engine.testing.context import build_context
from engine.testing.kv_format import KVFormatConformance
from engine_plugins.kv_format.fp8 import FP8Format
from engine_plugins.kv_format.int8 import Int8Format
from engine_plugins.kv_format.native import NativeFormat


class TestNative(KVFormatConformance):
    def make(self) -> KVFormat:
        return NativeFormat(SlotConfig(), build_context())


class TestFP8(KVFormatConformance):
    error = 2.0**-4 + 2.0**-8

    def make(self) -> KVFormat:
        return FP8Format(SlotConfig(), build_context())


class TestInt8(KVFormatConformance):
    error = 0.5 / 127 + 2.0**-8

    def make(self) -> KVFormat:
        return Int8Format(SlotConfig(), build_context())


class Rounding:
    """int8 with one scale per token and head."""

    scale: Literal["none", "per_layer_head", "per_token_head"] = "per_token_head"
    lossless = False

    def storage_dtype(self, compute_dtype: str) -> str:
        return "int8"

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        return (x.float() / scale[..., None]).round().clamp(-127, 127).to(torch.int8)

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        assert scale is not None
        return (x.float() * scale[..., None]).to(dtype)

    def load_tile(self) -> Any:
        return object()

    def store_tile(self) -> None:
        return None


class TestALossyFormat(KVFormatConformance):
    error = 0.5 / 127 + 2.0**-8

    def make(self) -> KVFormat:
        return Rounding()


class Halving(Rounding):
    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        return super().unpack(x, scale, dtype) / 2


def test_the_suite_refuses_a_format_that_reads_back_something_else() -> None:
    class Suite(KVFormatConformance):
        error = 0.01

        def make(self) -> KVFormat:
            return Halving()

    with pytest.raises(AssertionError):
        Suite().test_what_is_packed_can_be_read_back((3, 2, 80), "float32")
