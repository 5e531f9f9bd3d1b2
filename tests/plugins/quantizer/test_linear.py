"""Quantizers: the fast product against the plain one, and int8 against the weights it came from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import PackedLinear
from engine.testing.context import build_context
from engine_plugins.quantizer.config import Int8Config, UnquantizedConfig
from engine_plugins.quantizer.int8 import Int8WeightOnly, limbs_for, quantize_rows
from engine_plugins.quantizer.int8_cpu import BASE, from_limbs, has_int8_units, to_limbs
from engine_plugins.quantizer.unquantized import Unquantized

CONTEXT = build_context()
SPEC = LinearSpec((LinearPart("q", 48, True), LinearPart("k", 24)), 80)
ROWS = (1, 3, 33, 150)


def parts(seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(48, 1, generator=generator) * 3 + 0.01
    q = {"weight": torch.randn(48, 80, generator=generator) * sizes, "bias": torch.randn(48, generator=generator)}
    return [q, {"weight": torch.randn(24, 80, generator=generator)}]


def pack(quantizer: Any, dtype: torch.dtype, spec: LinearSpec = SPEC) -> PackedLinear:
    packed = quantizer.pack(spec, parts(), dtype, "cpu")
    assert isinstance(packed, PackedLinear)
    return packed


def inputs(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, 80, generator=torch.Generator().manual_seed(rows)).to(dtype)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def exact_product(x: Tensor) -> Tensor:
    weight = torch.cat([part["weight"] for part in parts()]).double()
    bias = torch.cat([parts()[0]["bias"], torch.zeros(24)]).double()
    return x.double() @ weight.T + bias


ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("rows", ROWS)
def test_unquantized_fast_and_plain_products_agree(dtype: torch.dtype, rows: int) -> None:
    packed, x = pack(Unquantized(UnquantizedConfig(), CONTEXT), dtype), inputs(rows, dtype)
    assert packed.apply(x).dtype == dtype and packed.apply(x).shape == (rows, packed.out_features)
    assert relative(packed.apply(x), packed.reference(x)) <= ROUNDING[dtype]
    assert relative(packed.reference(x), exact_product(x)) <= 2 * ROUNDING[dtype]


@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("rows", ROWS)
def test_int8_fast_product_equals_the_dequantized_one(activations: str, dtype: torch.dtype, rows: int) -> None:
    packed = pack(Int8WeightOnly(Int8Config(activations=activations), CONTEXT), dtype)
    x = inputs(rows, dtype)
    assert relative(packed.apply(x), packed.reference(x)) <= ROUNDING[dtype] + 2.0**-13 * (dtype != torch.float32)
    assert packed.apply(x).dtype == dtype


def test_int8_weights_are_within_half_a_step_of_the_originals() -> None:
    weight = parts()[0]["weight"]
    quantized, scale = quantize_rows(weight)
    assert quantized.dtype == torch.int8
    assert float(((quantized * scale[:, None] - weight).abs() / scale[:, None]).max()) <= 0.5001
    assert (quantized.abs().amax(dim=1) == 127).all()


def test_a_row_of_zeros_stays_zero() -> None:
    quantized, scale = quantize_rows(torch.zeros(2, 8))
    assert not quantized.any() and torch.isfinite(scale).all()


def test_int8_halves_the_bytes_and_leaves_the_head_alone() -> None:
    quantizer = Int8WeightOnly(Int8Config(), CONTEXT)
    assert pack(quantizer, torch.bfloat16).tensors["weight"].element_size() == 1
    head = LinearSpec(SPEC.parts, SPEC.in_features, kind="head")
    assert pack(quantizer, torch.bfloat16, head).tensors["weight"].element_size() == 2


@pytest.mark.parametrize("limbs", [1, 2, 3])
def test_digits_rebuild_activations_to_half_a_step(limbs: int) -> None:
    x = torch.randn(40, 4000, generator=torch.Generator().manual_seed(limbs))
    x[0, 0] = 0.0
    x[1] = 0.0
    digits, step = to_limbs(x, limbs)
    assert int(digits.min()) >= -127
    rebuilt = from_limbs(digits.flatten(0, 1).double(), limbs) * step
    assert float((rebuilt - x).abs().max()) <= 0.501 * float(step.max()) + 1e-6
    assert float(step.max()) <= float(x.abs().max()) / (0.49 * (BASE**limbs - 1))


def test_limbs_hold_every_significant_bit_of_the_dtype() -> None:
    assert limbs_for(torch.bfloat16) == 2 and limbs_for(torch.float32) == 3


def test_activations_a_quantizer_cannot_do_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"quantizer\.activations=int8"):
        UnquantizedConfig(activations="int8")
    with pytest.raises(ValueError, match=r"quantizer\.activations=fp8"):
        Int8Config(activations="fp8")


def test_without_int8_units_weights_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_plugins.quantizer.int8.has_int8_units", lambda: False)
    packed, x = pack(Int8WeightOnly(Int8Config(), CONTEXT), torch.float32), inputs(3, torch.float32)
    assert "dequantized" in packed.label
    if has_int8_units():
        monkeypatch.undo()
        fast = pack(Int8WeightOnly(Int8Config(), CONTEXT), torch.float32)
        assert relative(fast.apply(x), packed.apply(x)) <= 2e-6
