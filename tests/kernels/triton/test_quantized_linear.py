"""Quantized layers for GPUs: what runs by the number of rows, and that it computes what the weight stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.model import DeviceFacts
from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import CustomWeight, QuantizedWeight, Quantizer, TileLoader, WeightFormat
from engine.kernels.linear import PackedLinear
from engine.kernels.quantized import quantized_rows as rounded_by_torch
from engine.kernels.torch.norms import rms_norm
from engine.kernels.triton.launch import Launch, NormWeight, quantized_rows
from engine.kernels.triton.quantized.layout import gpu_bytes, packed_int4, unpacked_int4
from engine.kernels.triton.quantized.linear import pack_gpu, rounding_of
from engine.kernels.triton.weights import load_plain
from engine.testing import quantizer as suite
from engine.testing.context import build_context
from engine.testing.quantizer import TileLoaderConformance
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config, UnquantizedConfig
from engine_plugins.quantizer.on_load import FP8, Int4, Int8
from engine_plugins.quantizer.rounding import to_fp8, to_int4, to_int8
from engine_plugins.quantizer.unquantized import Unquantized
from tests.kernels.triton.quantized_weights import WEIGHTS, int8_groups
from tests.launches import count_launches
from tests.selection import few

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = (1, 7, 17, 40, 65)
SUITE_ROWS = (1, 3, 16, 17, 33, 65) if DEVICE == "cpu" else suite.ROWS
"""For the interpreter one of each: a row, a few, as many as fit in a tile, two tiles, more than kernels take."""
SUITE_DTYPES = ("float32",) if DEVICE == "cpu" else tuple(suite.DTYPES)
"""In the interpreter, which cuts to bfloat16 where devices round, int8 alone takes it here: every kind does, with wider
tolerance, in ``test_quantized_loaders.py``."""


def weight_of(kind: str, out: int = 48, inputs: int = 160) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(5)
    dense = torch.randn(out, inputs, generator=generator) * 0.1
    return WEIGHTS[kind](dense, torch.randn(out, generator=generator))


def inputs(rows: int, size: int = 160) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)).to(DEVICE)


def gap(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape and bool(got.isfinite().all())
    return float((got.float() - want.float()).abs().max() / want.float().abs().max())


class TestInt8(TileLoaderConformance):
    device = DEVICE
    rows = SUITE_ROWS
    weight_error = 0.5 / 127

    def make(self) -> Quantizer:
        return Int8(Int8Config(), build_context(device=DeviceFacts(DEVICE)))


class TestInt4(TileLoaderConformance):
    device = DEVICE
    rows = SUITE_ROWS
    dtypes = SUITE_DTYPES
    weight_error = 0.37  # what a clipped range cuts off, or half a step

    def make(self) -> Quantizer:
        return Int4(Int4Config(group_size=32), build_context(device=DeviceFacts(DEVICE)))


class TestFP8(TileLoaderConformance):
    device = DEVICE
    rows = SUITE_ROWS
    dtypes = SUITE_DTYPES
    weight_error = 2.0**-4

    def make(self) -> Quantizer:
        return FP8(FP8Config(), build_context(device=DeviceFacts(DEVICE)))


class OwnFormat(Unquantized):
    """Float32, read by a function of the quantizer's own."""

    def format(self, spec: LinearSpec) -> Any:
        return WeightFormat(32, spec.in_features, scale_bytes=0, custom=True)

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> Any:
        plain = super().pack(spec, parts, dtype, device)
        return CustomWeight(
            {"weight": plain.weight.float().contiguous()},
            spec.out_features,
            spec.in_features,
            dense=itemgetter("weight"),
            tile_loader=lambda tensors: TileLoader(load_plain, tensors["weight"]),
            bias=None if plain.bias is None else plain.bias.float(),
        )


class TestOwnFormat(TileLoaderConformance):
    device = DEVICE
    rows = SUITE_ROWS
    dtypes = SUITE_DTYPES

    def make(self) -> Quantizer:
        return OwnFormat(UnquantizedConfig(), build_context(device=DeviceFacts(DEVICE)))


@few(4)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_every_number_of_rows_is_multiplied_by_what_the_weight_stands_for(kind: str) -> None:
    weight = weight_of(kind)
    packed = pack_gpu(weight, "bf16", DEVICE, (9, 0))
    for rows in ROWS:
        x = inputs(rows)
        want = F.linear(x.cpu(), weight.dense(), weight.bias)
        assert gap(packed.apply(x).cpu(), want) <= 1e-5, rows
        assert gap(packed.reference(x).cpu(), want) <= 1e-6, rows


@pytest.mark.parametrize("kind", ["int8", "int4 g32", "int4 zeros"])
def test_inputs_are_gathered_in_the_order_of_the_columns(kind: str) -> None:
    order = torch.randperm(160, generator=torch.Generator().manual_seed(3))
    weight = replace(weight_of(kind), order=order)
    packed = pack_gpu(weight, "bf16", DEVICE, (9, 0))
    assert packed.tile_loader is None and "gathered" in packed.label
    for rows in (1, 20, 70):
        x = inputs(rows)
        assert gap(packed.apply(x).cpu(), F.linear(x.cpu(), weight.dense(), weight.bias)) <= 1e-5


@few(2)
@pytest.mark.parametrize(("activations", "make"), [("int8", to_int8), ("fp8", to_fp8)])
@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_are_rounded_and_few_are_not(activations: str, make: Any, biased: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    dense = torch.randn(48, 160, generator=generator) * 0.1
    weight = make(dense, torch.randn(48, generator=generator) if biased else None)
    packed = pack_gpu(weight, activations, DEVICE, (9, 0))
    assert packed.input_quant == activations and packed.apply_quantized is not None
    for rows in (3, 16, 17, 50, 70):
        x = inputs(rows).bfloat16()
        got, exact = packed.apply(x), F.linear(x.cpu().float(), weight.dense(), weight.bias).to(DEVICE)
        assert gap(got, packed.reference(x)) <= 2.0**-7, rows
        # Of all sums, rounded inputs move more than the rounding of the result does.
        moved = float((got.float() - exact).abs().mean() / exact.abs().mean())
        assert (moved > 4e-3) == (rows > 16), (rows, moved)


@few(4)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("size", [7, 160, 2500])
def test_rows_are_normed_and_rounded_in_one_kernel(size: int, kind: Any, norm: bool) -> None:
    x = inputs(5, size)
    x[3] = 0.0
    weight = 0.5 + torch.rand(size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    codes, step = quantized_rows(x, NormWeight(weight, 1e-5) if norm else None, kind, Launch.on(DEVICE))
    plain = rms_norm(x, weight, 1e-5) if norm else x
    want_codes, want_step = rounded_by_torch(plain, kind)
    assert codes.dtype == want_codes.dtype and torch.allclose(step[:3], want_step[:3], rtol=1e-6)
    back, want = codes.float() * step, want_codes.float() * want_step
    # Where norm and rounding go another way round, a number in the middle between two codes may take the other.
    limit = torch.finfo(torch.float8_e4m3fn).eps * want.abs() + 2.0 * want_step if norm else 1e-6 * want.abs()
    assert bool(((back - want).abs() <= limit).all())
    assert float(((back - want).abs() > 0.1 * want_step).float().mean()) <= 0.01 and not codes[3].float().any()


def test_the_plan_says_what_multiplies_how_many_rows() -> None:
    def label(kind: str, activations: str, capability: tuple[int, int] | None = (9, 0)) -> str:
        return pack_gpu(weight_of(kind), activations, DEVICE, capability).label

    assert label("int8", "bf16") == "int8, Triton up to 64 rows, then dequantized, F.linear"
    assert label("int8", "int8") == "int8, activations in int8 beyond 16 rows (torch._int_mm)"
    assert label("fp8", "fp8", (8, 9)) == "fp8, activations in fp8 beyond 16 rows (torch._scaled_mm)"
    assert label("fp8", "fp8", (8, 0)).endswith("activations are not rounded: this device has no FP8 units")
    assert label("int4 g32", "int8").endswith("no kernel multiplies int4 in groups of 32 weights by int8")
    assert label("fp8 blocks", "fp8").endswith("fp8 sums need one scale per channel")


@pytest.mark.parametrize(("version", "rounding"), [("2.11.0+cu128", None), ("2.12.0", "fp8"), ("2.13.0", "fp8")])
def test_products_that_torch_launches_beside_the_stream_are_not_used(
    version: str, rounding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert rounding_of(weight_of("fp8"), "fp8", (8, 9))[0] == rounding
    assert rounding_of(weight_of("fp8"), "fp8", (9, 0))[0] == "fp8"


@pytest.mark.parametrize(("out", "size"), [(40, 160), (48, 152)])
def test_sizes_that_8_bit_products_do_not_take_keep_their_activations(out: int, size: int) -> None:
    rounding, why = rounding_of(weight_of("int8", out, size), "int8", (9, 0))
    assert rounding is None and why == "sizes are not multiples of 16"


def test_weights_that_no_kernel_reads_are_multiplied_by_torch_and_the_plan_says_so() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = int8_groups(torch.randn(48, 160, generator=generator), None, 48)
    packed = pack_gpu(weight, "bf16", DEVICE, (9, 0))
    assert packed.tile_loader is None and "no kernel for groups of 48" in packed.label
    x = inputs(3)
    assert gap(packed.apply(x).cpu(), F.linear(x.cpu(), weight.dense())) <= 1e-5


def test_bytes_of_codes_that_kernels_do_not_read_are_known_too() -> None:
    weight = to_int4(torch.randn(48, 160), None, 48)
    packed = pack_gpu(weight, "bf16", DEVICE, (9, 0))
    assert packed.num_bytes == gpu_bytes(LinearSpec((LinearPart("o", 48),), 160), 4, 48, False, False)


@few(4)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_bytes_are_known_beforehand(kind: str) -> None:
    """At most: scales that 16 bits hold exactly take half."""
    weight = weight_of(kind)
    spec = LinearSpec((LinearPart("o", 48, True),), 160)
    packed = pack_gpu(weight, "bf16", DEVICE, (9, 0))
    bound = gpu_bytes(spec, weight.bits, weight.group_size, weight.zero is not None, True)
    scales = packed.tensors.get("scale", packed.tensors.get("channel_scale"))
    assert scales is not None and packed.num_bytes == bound - scales.numel() * (4 - scales.element_size())


def test_four_bit_codes_come_back_from_their_tiles() -> None:
    codes = torch.randint(-8, 8, (37, 300), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    assert torch.equal(unpacked_int4(packed_int4(codes), 37, 300), codes)


def test_the_weights_of_a_layer_are_read_once_for_up_to_64_rows() -> None:
    packed: PackedLinear = pack_gpu(to_int4(torch.randn(32, 128), None, 32), "bf16", DEVICE, (9, 0))
    for rows in (1, 17, 33, 64):
        with count_launches() as launches:
            packed.apply(inputs(rows, 128))
        assert launches.kernels == ["linear_store"]
    with count_launches() as launches:
        packed.apply(inputs(65, 128))
    assert launches.kernels == ["dequantize_tiles"]
