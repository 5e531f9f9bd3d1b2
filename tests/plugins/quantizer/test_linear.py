"""Unquantized linear layers: the fast product against the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import PackedLinear
from engine.testing.context import build_context
from engine_plugins.quantizer.config import FP8Config, Int8Config, UnquantizedConfig
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


def test_activations_a_quantizer_cannot_do_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"quantizer\.activations=int8"):
        UnquantizedConfig(activations="int8")
    with pytest.raises(ValueError, match=r"quantizer\.activations=fp8"):
        Int8Config(activations="fp8")
    with pytest.raises(ValueError, match=r"quantizer\.activations=int8"):
        FP8Config(activations="int8")
