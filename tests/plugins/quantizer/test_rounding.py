"""Rounding weights to few bits, and the form that quantized weights have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.contracts.quantizer import QuantizedWeight
from engine.kernels.quantized import joined, multiplied, quantized_rows
from engine_plugins.quantizer import rounding
from engine_plugins.quantizer.rounding import to_fp8, to_int4, to_int8


def sample(out: int = 24, inputs: int = 96, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out, inputs, generator=generator) * (torch.rand(out, 1, generator=generator) * 3 + 0.01)


def error(weight: QuantizedWeight, original: Tensor) -> float:
    return float((weight.dense() - original).square().sum() / original.square().sum())


def test_int8_weights_are_within_half_a_step_of_the_originals() -> None:
    weight = sample()
    rounded = to_int8(weight, None)
    assert rounded.codes.dtype == torch.int8 and rounded.per_channel
    assert float(((rounded.dense() - weight).abs() / rounded.scale).max()) <= 0.5001
    assert (rounded.codes.abs().amax(dim=1) == 127).all()


def test_fp8_weights_keep_three_bits_and_reach_the_largest_value() -> None:
    weight = sample()
    rounded = to_fp8(weight, None)
    assert rounded.codes.dtype == torch.float8_e4m3fn
    assert (rounded.codes.float().abs().amax(dim=1) == 448).all()
    smallest_normal = 2.0**-6 * rounded.scale
    gap = (rounded.dense() - weight).abs()
    assert bool((gap <= torch.maximum(weight.abs(), smallest_normal) * 2.0**-4).all())


class Float32Sizes(TorchDispatchMode):
    """Keeps the number of elements of every float32 tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("rounded", [to_int8, to_fp8, partial(to_int4, group_size=32)])
def test_weights_are_rounded_a_piece_at_a_time(
    rounded: Callable[..., QuantizedWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than the memory estimated for loading: no copy of all weights in float32."""
    weight = sample(out=50, inputs=96).bfloat16()
    whole = rounded(weight, None)
    monkeypatch.setattr(rounding, "PIECE", 7 * 96 + 5)
    with Float32Sizes() as made:
        pieces = rounded(weight, None)
    assert 0 < max(made.sizes) <= 7 * 96
    assert torch.equal(pieces.codes.float(), whole.codes.float()) and torch.equal(pieces.scale, whole.scale)


def test_searching_the_range_of_int4_groups_beats_the_full_range() -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    groups = weight.unflatten(1, (-1, 64))
    scale = groups.abs().amax(2, keepdim=True) / 7
    full_range = ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)
    whole = float((full_range - weight).square().sum() / weight.square().sum())
    assert error(to_int4(weight, None, 64), weight) < 0.9 * whole


@pytest.mark.parametrize("inputs", [32, 96, 100])
def test_int4_codes_have_four_bits_and_a_last_group_may_be_short(inputs: int) -> None:
    weight = sample(inputs=inputs)
    rounded = to_int4(weight, None, 64)
    assert rounded.codes.shape == weight.shape and rounded.scale.shape == (24, -(-inputs // 64))
    assert int(rounded.codes.min()) >= -8 and int(rounded.codes.max()) <= 7
    assert error(rounded, weight) < 0.02


@pytest.mark.parametrize("rounding", [to_int8, to_fp8, partial(to_int4, group_size=32)])
def test_zeros_stay_zero(rounding: Callable[[Tensor, None], QuantizedWeight]) -> None:
    rounded = rounding(torch.zeros(2, 64), None)
    assert not rounded.dense().any() and bool(torch.isfinite(rounded.scale).all())


@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_rows_of_activations_are_rounded_each_with_its_own_step(activations: str) -> None:
    x = sample(5, 64) * torch.tensor([[1.0], [100.0], [1e-3], [0.0], [7.0]])
    codes, step = quantized_rows(x, activations)
    relative = (codes.float() * step - x).abs().amax(1) / x.abs().amax(1).clamp_min(1e-30)
    assert bool((relative <= (0.51 / 127 if activations == "int8" else 2.0**-4)).all())


def test_zeros_orders_and_groups_mean_what_the_form_says() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-8, 8, (4, 8), generator=generator, dtype=torch.int8)
    scale, zero = torch.rand(4, 2, generator=generator), torch.randint(-8, 8, (4, 2), generator=generator)
    order = torch.randperm(8, generator=generator)
    weight = QuantizedWeight(codes, scale, 4, bits=4, zero=zero.to(torch.int8), order=order)
    dense = weight.dense()
    for o in range(4):
        for i in range(8):
            want = (float(codes[o, i]) - float(zero[o, i // 4])) * float(scale[o, i // 4])
            assert float(dense[o, int(order[i])]) == pytest.approx(want, rel=1e-6)


def test_joined_parts_multiply_as_the_parts_do() -> None:
    x = sample(3, 96, seed=9)
    parts = [to_int8(sample(8), torch.ones(8)), to_int8(sample(16, seed=2), None)]
    apart = torch.cat([multiplied(x, part, "bf16") for part in parts], dim=1)
    assert torch.allclose(multiplied(x, joined(parts), "bf16"), apart, rtol=1e-5, atol=1e-5)


def test_parts_that_one_matrix_cannot_hold_are_refused() -> None:
    weight = sample(8, 64)
    with pytest.raises(ValueError, match="different bits: 8 and 4"):
        joined([to_int8(weight, None), to_int4(weight, None, 32)])
    with pytest.raises(ValueError, match="different group sizes: 32 and 64"):
        joined([to_int4(weight, None, 32), to_int4(weight, None, 64)])


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"scale": torch.ones(4, 3)}, r"scales \[4, 3\] for weights \[4, 8\], expected \[4, 2\]"),
        ({"zero": torch.zeros(4, 1, dtype=torch.int8)}, r"zeros \[4, 1\] beside scales \[4, 2\]"),
        ({"order": torch.arange(4)}, r"an order of \[4\] for 8 input features"),
        ({"bias": torch.zeros(3)}, r"bias \[3\] for 4 outputs"),
        ({"codes": torch.zeros(4, 8)}, "codes of torch.float32, expected int8"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(wrong: dict[str, Tensor], complaint: str) -> None:
    right = {"codes": torch.zeros(4, 8, dtype=torch.int8), "scale": torch.ones(4, 2)}
    with pytest.raises(ValueError, match=complaint):
        QuantizedWeight(**(right | wrong), group_size=4)
