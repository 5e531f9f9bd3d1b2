"""Kernels read every quantized weight as what it stands for, over odd shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.torch.norms import rms_norm
from engine.kernels.torch.reference import gated_activation
from engine.kernels.triton.launch import Launch, NormWeight, SkinnyLinear
from engine.kernels.triton.quantized.layout import int4_bytes, packed_int4
from engine.kernels.triton.quantized.loaders import tile_loader, why_unreadable
from tests.kernels.triton.quantized_weights import WEIGHTS, int8_groups
from tests.selection import few

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
SHAPES = [(7, 96), (50, 32), (9, 2080), (33, 1000)]


def drawn(out: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(out)
    return torch.randn(out, inputs, generator=generator) * inputs**-0.5, torch.randn(out, generator=generator)


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape and bool(got.isfinite().all())
    return float((got.float().cpu() - want).abs().max() / max(1.0, float(want.abs().max())))


@few(6)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 5])
def test_every_kind_is_multiplied_as_what_it_stands_for(rows: int, kind: str, shape: tuple[int, int]) -> None:
    weight, bias = drawn(*shape)
    made = WEIGHTS[kind](weight, bias)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
    linear = SkinnyLinear(Launch.on(DEVICE), tile_loader(made.to(DEVICE)), shape[1], shape[0])
    assert gap(linear.store(x.to(DEVICE)), F.linear(x, made.dense(), bias)) <= TOLERANCE["float32"]


@few(6)
@pytest.mark.parametrize(("rows", "dtype"), [(1, "bfloat16"), (16, "bfloat16"), (1, "float16"), (16, "float32")])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_norm_and_gate_are_fused_with_every_kind(rows: int, kind: str, dtype: str) -> None:
    weight, _ = drawn(2 * 20, 256)
    made = WEIGHTS[kind](weight, None)
    compute = getattr(torch, dtype)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to(compute)
    norm = 0.5 + torch.rand(256, generator=torch.Generator().manual_seed(9))
    linear = SkinnyLinear(Launch.on(DEVICE), tile_loader(made.to(DEVICE)), 256, 40, NormWeight(norm.to(DEVICE), 1e-5))
    want = gated_activation(F.linear(rms_norm(x.float(), norm, 1e-5), made.dense()), "silu")
    assert gap(linear.gate(x.to(DEVICE), "silu"), want) <= TOLERANCE[dtype]


def test_a_slab_of_four_bit_weights_is_one_run_of_memory() -> None:
    codes = (torch.arange(48 * 256).view(48, 256) % 16 - 8).to(torch.int8)
    packed = packed_int4(codes)
    assert packed.shape == (3, 2, 16, 64) and packed.numel() == int4_bytes(48, 256)
    word = packed[1, 1, 3, 8:12].tolist()  # channel 16 + 3, inputs 128 + 16 and the seven after
    want = (codes[19, 144:152].int() + 8).tolist()
    nibbles = [half for byte in word for half in (byte & 15, byte >> 4)]
    assert nibbles == want[::2] + want[1::2]


def test_groups_that_tiles_straddle_are_not_read() -> None:
    weight, _ = drawn(8, 96)
    assert why_unreadable(int8_groups(weight, None, 48)) == "groups of 48, not a power of two"
    assert why_unreadable(int8_groups(weight, None, 96)) is None


def test_scales_take_16_bits_only_where_those_hold_them() -> None:
    made = int8_groups(drawn(8, 128)[0], None)
    wide, narrow = tile_loader(made), tile_loader(replace(made, scale=made.scale.half().float()))
    assert wide.scale is not None and wide.scale.dtype == torch.float32
    assert narrow.scale is not None and narrow.scale.dtype == torch.float16
