"""Layers in panels, of plain and of quantized weights: everything that they offer beside products, and native calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.contracts.quantizer import Quantizer
from engine.kernels.linear import PackedLinear
from engine.kernels.packing import Target
from engine.kernels.torch.reference import gated_activation
from engine.testing.context import build_context
from engine.testing.quantizer import DTYPES, ROWS, SPECS, QuantizerConformance
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config, UnquantizedConfig
from engine_plugins.quantizer.on_load import FP8, Int4, Int8
from engine_plugins.quantizer.unquantized import Unquantized
from tests.needs import needs_compiler

ADDED, GATED = ("one_part", "wide_input", "bias_on_some_parts"), ("gate_up", "gate_up_with_bias")

pytestmark = needs_compiler


class InPanels(QuantizerConformance):
    def target(self, dtype: str) -> Target:
        return Target("cpu", getattr(torch, dtype), in_panels=True)

    def layers(self, dtype: str, names: Sequence[str]) -> list[tuple[PackedLinear, list[Tensor]]]:
        """Of some specs, and inputs with all numbers of rows."""
        return [(self.pack(SPECS[n], dtype), [self.inputs(SPECS[n], rows, dtype) for rows in ROWS]) for n in names]

    def test_adding_to_a_residual_equals_linear_then_add(self, dtype: str) -> None:
        for packed, inputs in self.layers(dtype, ADDED):
            assert packed.apply_add is not None
            for x in inputs:
                residual = torch.randn(len(x), packed.out_features, generator=torch.Generator().manual_seed(1)).to(x)
                want, before = packed.reference(x).double() + residual.double(), x.clone()
                got = packed.apply_add(x, residual)
                assert got.dtype == x.dtype and got.is_contiguous() and torch.equal(x, before)
                gap = float((got.double() - want).abs().max())
                assert gap <= DTYPES[dtype] * float(want.abs().max()), f"{len(x)} rows"

    @pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
    def test_gating_equals_linear_then_gate(self, act: str, dtype: str) -> None:
        for packed, inputs in self.layers(dtype, GATED):
            assert packed.apply_gated is not None and packed.apply_add is None
            for x in inputs:
                want, got = gated_activation(packed.reference(x).double(), act), packed.apply_gated(x, act)
                assert got.shape == want.shape and got.dtype == x.dtype and got.is_contiguous()
                # The reference has rounded gates and ups already.
                gap, largest = float((got.double() - want).abs().max()), float(want.abs().max())
                assert gap <= 2 * DTYPES[dtype] * largest, f"{len(x)} rows"

    @pytest.mark.parametrize("name", SPECS)
    def test_a_native_call_computes_what_is_there_when_it_is_made(self, name: str, dtype: str) -> None:
        """The same bits as ``apply``, ``apply_add`` and ``apply_gated``."""
        ((packed, inputs),) = self.layers(dtype, (name,))
        assert packed.native is not None
        act = "silu" if packed.apply_gated is not None else None
        for given in inputs:
            x, y = torch.zeros_like(given), given.new_empty(len(given), packed.out_features // (2 if act else 1))
            call, add = packed.native(x, y, act=act), None if act else packed.native(x, y, y)
            x.copy_(given)
            call()
            assert torch.equal(y, packed.apply(x) if packed.apply_gated is None else packed.apply_gated(x, "silu"))
            if add is not None and packed.apply_add is not None:
                want = packed.apply_add(x, y.clone())
                add()
                assert torch.equal(y, want), f"{len(x)} rows, added"

    @pytest.mark.parametrize("name", SPECS)
    def test_a_call_is_made_for_other_rows(self, name: str, dtype: str) -> None:
        """What experts are called by: see :attr:`engine.native.NativeCall.moves`."""
        ((packed, _),) = self.layers(dtype, (name,))
        assert packed.native is not None
        act = "silu" if packed.apply_gated is not None else None
        x = self.inputs(SPECS[name], 5, dtype)
        one, y = self.inputs(SPECS[name], 1, dtype), x.new_empty(1, packed.out_features // (2 if act else 1))
        call = packed.native(one, y, act=act)
        assert call.moves is not None
        moved, want = y.new_empty(5, y.shape[1]), y.new_empty(5, y.shape[1])
        packed.native(x, want, act=act)()
        arguments = list(call.arguments)
        for at, value in zip(call.moves, (5, x.data_ptr(), moved.data_ptr()), strict=True):
            arguments[at] = value
        call.function(*arguments)
        assert torch.equal(moved, want)


class TestPlain(InPanels):
    def make(self) -> Quantizer:
        return Unquantized(UnquantizedConfig(), build_context())

    def test_a_tied_head_stays_shared_if_it_stays_plain(self) -> None:
        pytest.skip("in panels it does not stay as it is")


class TestInt8(InPanels):
    weight_error = 0.5 / 127 + 1e-6
    activations = "bf16"

    def make(self) -> Quantizer:
        return Int8(Int8Config(activations=self.activations), build_context())


class TestInt8Activations(TestInt8):
    activations = "int8"


class TestInt4(InPanels):
    weight_error = 0.5 / 7 + 0.36 + 1e-6  # half a step, and what the clip search may cut
    group_size = 32

    def make(self) -> Quantizer:
        return Int4(Int4Config(group_size=self.group_size), build_context())


class TestInt4ByChannel(TestInt4):
    group_size = 256


class TestFP8(InPanels):
    weight_error = 2.0**-4 + 1e-6

    def make(self) -> Quantizer:
        return FP8(FP8Config(), build_context())
