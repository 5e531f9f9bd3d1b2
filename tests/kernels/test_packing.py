"""Which kernels multiply a weight, and that they multiply by what it stands for."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import CustomWeight, PlainWeight, QuantizedWeight, WeightFormat
from engine.kernels.cpu.linear import float_linear
from engine.kernels.packing import Target, pack_weight, packed_bytes
from engine.kernels.quantized import joined
from tests.needs import needs_compiler

EAGER = Target("cpu", torch.float32)
TARGETS = [EAGER, pytest.param(replace(EAGER, in_panels=True), marks=needs_compiler)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spec(out: int, inputs: int, bias: bool = False) -> LinearSpec:
    return LinearSpec((LinearPart("w", out, bias),), inputs)


@pytest.mark.parametrize("target", TARGETS)
def test_zero_points_may_lie_between_two_codes(target: Target) -> None:
    """As in Q4_K of GGUF: ``weight = scale * code - offset``, a scale and an offset for 32 inputs."""
    codes = torch.randint(0, 16, (48, 128), generator=torch.Generator().manual_seed(1))
    scale, offset = random(48, 4, seed=2).abs() + 0.1, random(48, 4, seed=3)
    wide = (codes.view(48, 4, 32) * scale[..., None] - offset[..., None]).flatten(1)
    weight = QuantizedWeight((codes - 8).to(torch.int8), scale, 32, bits=4, zero=offset / scale - 8.0)
    assert torch.allclose(weight.dense(), wide, atol=1e-5)
    packed, x = pack_weight(spec(48, 128), weight, target), random(5, 128, seed=4)
    assert torch.allclose(packed.apply(x), F.linear(x, wide), atol=1e-4)
    both = joined([weight, replace(weight, zero=None)])
    assert torch.equal(both.dense()[:48], weight.dense()) and both.float_zeros


def test_zero_points_of_other_dtypes_are_refused() -> None:
    scale = torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"zeros of torch\.float16"):
        QuantizedWeight(torch.zeros(2, 8, dtype=torch.int8), scale, 8, zero=scale.half())


@pytest.mark.parametrize("target", TARGETS)
def test_a_weight_in_a_format_of_its_own_is_unpacked_by_its_own_function(target: Target) -> None:
    weight, bias = random(24, 64), random(24, seed=1)
    custom = CustomWeight({"weight": weight}, 24, 64, itemgetter("weight"), bias=bias, label="mine")
    packed, x = pack_weight(spec(24, 64, True), custom, target), random(3, 64, seed=2)
    assert torch.equal(packed.apply(x), F.linear(x, weight, bias)) and packed.native is None
    assert packed.label == "mine, dequantized in every call"
    said = packed_bytes(spec(24, 64, True), WeightFormat(32, 64, scale_bytes=0, custom=True), target)
    assert packed.num_bytes == said


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_are_in_panels_where_steps_are_programs(dtype: torch.dtype) -> None:
    weight = PlainWeight(random(32, 64))
    best = float_linear.best_instructions(dtype)
    compiled = pack_weight(spec(32, 64), weight, Target("cpu", dtype, in_panels=True))
    short = str(dtype).removeprefix("torch.")
    assert compiled.label.startswith(f"{short} panels, {best}") and compiled.native is not None
    assert pack_weight(spec(32, 64), weight, Target("cpu", dtype)).label == f"{short} F.linear"


def test_a_plain_weight_that_is_there_already_is_shared() -> None:
    weight = random(32, 64)
    (kept,) = pack_weight(spec(32, 64), PlainWeight(weight), EAGER).tensors.values()
    assert kept.data_ptr() == weight.data_ptr() and packed_bytes(spec(32, 64), None, EAGER, tied=True) == 0
