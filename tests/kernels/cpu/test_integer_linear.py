"""Quantized linear layers in panels: every format and group, odd sizes, extreme codes, rows that do not notice each
other."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import QuantizedWeight
from engine.kernels.cpu.linear import integer_linear
from engine.kernels.cpu.linear.integer_linear import can_pack, from_panels, pack_integer, packed_bytes, to_panels
from engine.kernels.cpu.linear.sources import ELEMENTS, FORMATS, float_source, integer_source
from engine.kernels.linear import PackedLinear
from engine.kernels.packing import Target, pack_weight
from engine.kernels.quantized import from_e2m1, multiplied, rounded_rows, to_e2m1
from engine.kernels.torch.reference import gated_activation
from engine.native import find_compiler
from engine.native.compiler import FLAGS, INCLUDE
from tests.needs import each, needs_compiler, needs_integer_instructions, needs_x86
from tests.selection import few

ROWS = (1, 2, 3, 4, 5, 6, 9, 16, 17, 33, 50, 75)
SHAPES = [(48, 64, 64), (17, 80, 80), (1, 32, 32), (96, 896, 128), (64, 320, 32), (50, 512, 256), (33, 1280, 64)]
SHAPES += [(40, 768, 384), (33, 2080, 2080), (64, 100, 32), (80, 96, 32)]
"""Outputs, inputs, group size."""
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Accepted error as a share of the largest output."""

EMULATE = "-DEMULATE"
"""For the compiler: instructions this processor lacks become plain code."""

pytestmark = needs_compiler


UNITS = integer_linear.INSTRUCTIONS[1:]


@pytest.fixture(params=each(UNITS, needs_integer_instructions))
def unit(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(kind: str, out: int, inputs: int, group: int, zeros: bool = False, ordered: bool = False) -> QuantizedWeight:
    """Codes over the whole range, the lowest among them."""
    generator = torch.Generator().manual_seed(out * inputs + group)
    shape = (out, -(-inputs // group))
    scale, bias = torch.rand(shape, generator=generator) + 0.1, torch.randn(out, generator=generator)
    order = torch.randperm(inputs, generator=generator) if ordered else None
    if kind == "fp8":
        codes = (torch.randn(out, inputs, generator=generator) * 30).to(torch.float8_e4m3fn)
        return QuantizedWeight(codes, scale, group, order=order, bias=bias)
    if kind == "fp4":
        codes = from_e2m1(torch.randint(0, 16, (out, inputs), generator=generator).byte())
        return QuantizedWeight(codes, scale, group, 4, order=order, bias=bias, e2m1=True)
    bits = int(kind[3:])
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    codes = torch.randint(low, high, (out, inputs), generator=generator).to(torch.int8)
    codes[:, 0], codes[:, -1] = low, high - 1
    zero = torch.randint(low, high, shape, generator=generator).to(torch.int8) if zeros else None
    return QuantizedWeight(codes, scale, group, bits, zero, order, bias)


def spec_of(weight: QuantizedWeight, gated: bool = False) -> LinearSpec:
    if not gated:
        return LinearSpec((LinearPart("w", weight.out_features, True),), weight.in_features)
    half = weight.out_features // 2
    parts = (LinearPart("gate", half, True), LinearPart("up", half, True))
    return LinearSpec(parts, weight.in_features, kind="gate_up")


def inputs(rows: int, weight: QuantizedWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, weight.in_features, generator=torch.Generator().manual_seed(rows)).to(dtype)


def check(packed: PackedLinear, weight: QuantizedWeight, activations: str, dtype: torch.dtype) -> None:
    for rows in ROWS:
        x = inputs(rows, weight, dtype)
        want, got = multiplied(x.float(), weight, activations), packed.apply(x)
        assert got.dtype == dtype and got.shape == want.shape
        assert float((got.double() - want).abs().max()) <= ROUNDING[dtype] * float(want.abs().max()), rows


@pytest.mark.parametrize("bits", [4, 8])
def test_panels_hold_the_codes(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (96, 128), generator=torch.Generator().manual_seed(bits)).byte()
    panels = to_panels(codes, bits)
    assert panels.is_contiguous() and panels.numel() == codes.numel() * bits // 8
    assert torch.equal(from_panels(panels, bits), codes)


@few(40)
@pytest.mark.parametrize(("out", "size", "group"), SHAPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_integer_weights_of_any_size_and_group(
    kind: str, activations: str, zeros: bool, out: int, size: int, group: int, unit: str
) -> None:
    weight = made(kind, out, size, group, zeros)
    packed = pack_integer(spec_of(weight), weight, activations, unit)
    for dtype in ROUNDING:
        check(packed, weight, activations, dtype)
    x = inputs(3, weight)
    assert torch.equal(packed.reference(x), multiplied(x, weight, activations))


@pytest.mark.parametrize(("out", "size", "group"), SHAPES)
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_e4m3_weights_of_any_size_and_group(activations: str, out: int, size: int, group: int, unit: str) -> None:
    weight = made("fp8", out, size, group)
    packed = pack_integer(spec_of(weight), weight, activations, unit)
    for dtype in ROUNDING:
        check(packed, weight, activations, dtype)
    x = inputs(3, weight)
    assert torch.equal(packed.reference(x), multiplied(x, weight, activations))


@few(12)
@pytest.mark.parametrize(("out", "size", "group"), SHAPES)
@pytest.mark.parametrize("activations", ["bf16", "int8"])
def test_e2m1_weights_of_any_size_and_group(activations: str, out: int, size: int, group: int, unit: str) -> None:
    weight = made("fp4", out, size, group, ordered=activations == "int8")
    packed = pack_integer(spec_of(weight), weight, activations, unit)
    for dtype in ROUNDING:
        check(packed, weight, activations, dtype)
    x = inputs(3, weight)
    assert torch.equal(packed.reference(x), multiplied(x, weight, activations))
    assert packed.tensors["weight"].numel() * 2 == -(-out // 32) * 32 * -(-size // 64) * 64


def test_every_e2m1_number_is_multiplied_exactly(unit: str) -> None:
    codes = from_e2m1(torch.arange(16).byte())
    assert torch.equal(from_e2m1(to_e2m1(codes)), codes)
    weight = QuantizedWeight(codes.repeat(32, 4).contiguous(), torch.full((32, 2), 0.5), 32, 4, e2m1=True)
    packed = pack_integer(spec_of(weight), weight, "bf16", unit)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    want = torch.cat((numbers, -numbers)).repeat(32, 4).T
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 64):
            got = torch.cat([packed.apply(x) for x in torch.eye(64, dtype=dtype).split(rows)])
            assert torch.equal(got.float(), want)


def test_every_e4m3_number_is_multiplied_exactly_and_a_nan_spoils_its_output_only(unit: str) -> None:
    codes = torch.arange(256).byte().view(torch.float8_e4m3fn)[None].repeat(32, 1)
    weight = QuantizedWeight(codes.contiguous(), torch.ones(32, 1), 256)
    finite = codes.float().nan_to_num_(0.0)
    clean = QuantizedWeight(finite.to(torch.float8_e4m3fn), torch.ones(32, 1), 256)
    read = pack_integer(spec_of(clean), clean, "bf16", unit).apply(torch.eye(256))
    assert torch.equal(read, finite.T)
    one_bad = finite.to(torch.float8_e4m3fn)
    one_bad.view(torch.uint8)[5, 9] = 0x7F
    weight = replace(clean, codes=one_bad)
    got = pack_integer(spec_of(weight), weight, "bf16", unit).apply(torch.ones(2, 256))
    assert got[:, 5].isnan().all() and not got[:, :5].isnan().any() and not got[:, 6:].isnan().any()


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_columns_in_another_order(kind: str, unit: str) -> None:
    weight = made(kind, 48, 320, 64, ordered=True)
    check(pack_integer(spec_of(weight), weight, "bf16", unit), weight, "bf16", torch.bfloat16)
    check(pack_integer(spec_of(weight), weight, "bf16", unit), weight, "bf16", torch.float32)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("half", [16, 40, 23])
def test_gates_and_ups(kind: str, half: int, dtype: torch.dtype, unit: str) -> None:
    weight = made(kind, 2 * half, 192, 64)
    weight = replace(weight, scale=weight.scale / 100)
    packed = pack_integer(spec_of(weight, gated=True), weight, "bf16", unit)
    assert packed.apply_gated is not None and packed.apply_add is None
    check(packed, weight, "bf16", dtype)
    x = inputs(7, weight, dtype)
    for act in ("silu", "gelu_tanh"):
        want = gated_activation(multiplied(x.float(), weight, "bf16").double(), act)
        got = packed.apply_gated(x, act)
        assert float((got.double() - want).abs().max()) <= 2 * ROUNDING[dtype] * float(want.abs().max())


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_the_sum_replaces_the_residual(dtype: torch.dtype, unit: str) -> None:
    weight = made("int4", 50, 96, 32)
    packed = pack_integer(spec_of(weight), weight, "bf16", unit)
    assert packed.apply_add is not None
    wide = torch.randn(9, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    before, x = wide.clone(), wide[:, 100:196]
    residual = torch.randn(9, 50).to(dtype)
    want = multiplied(x.float(), weight, "bf16") + residual.float()
    got = packed.apply_add(x, residual)
    assert got.data_ptr() == residual.data_ptr() and torch.equal(wide, before)
    assert float((got.float() - want).abs().max()) <= 2 * ROUNDING[dtype] * float(want.abs().max())


@pytest.mark.parametrize(
    ("kind", "activations", "unit"),
    [
        pytest.param(kind, activations, unit, marks=needs_integer_instructions(unit))
        for kind, activations in (
            ("int8", "bf16"), ("int8", "int8"), ("int4", "bf16"), ("int4", "int8"), ("fp8", "bf16"), ("fp8", "fp8")
        )
        for unit in UNITS
        # AMX's tiles serve many rows only. What they add up is exact where all is in 8 bits.
        if unit != "AMX" or kind == activations == "int8"
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(kind: str, activations: str, dtype: torch.dtype, unit: str) -> None:
    weight = made(kind, 96, 1024, 128)
    packed = pack_integer(spec_of(weight), weight, activations, unit)
    x = inputs(200, weight, dtype)
    whole = packed.apply(x)
    for rows in (1, 2, 3, 5, 16, 33, 150):
        assert torch.equal(packed.apply(x[:rows]), whole[:rows]), rows
        assert torch.equal(packed.apply(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_bad_row_is_not_finite_and_leaves_its_neighbours_alone(
    kind: str, bad: float, activations: str, unit: str
) -> None:
    weight = made(kind, 48, 640, 64)
    packed = pack_integer(spec_of(weight), weight, activations, unit)
    x = inputs(40, weight)
    want = packed.apply(x)
    x[17, 600] = bad
    got = packed.apply(x)
    assert not got[17].isfinite().any()
    assert torch.equal(got[:17], want[:17]) and torch.equal(got[18:], want[18:])


@pytest.mark.parametrize("zero", [None, -128, 127])
@pytest.mark.parametrize("code", [-128, 127])
@pytest.mark.parametrize("value", [1.0, -1.0, 255.0, 3e38, 1e-30, 0.0])
def test_no_sum_overflows(value: float, code: int, zero: int | None, unit: str) -> None:
    zeros = None if zero is None else torch.full((32, 4), zero, dtype=torch.int8)
    codes, scale = torch.full((32, 1024), code, dtype=torch.int8), torch.full((32, 4), 1e-6)
    weight = QuantizedWeight(codes, scale, 256, zero=zeros)
    x = torch.full((3, 1024), value).bfloat16()
    for activations in ("bf16", "int8"):
        got = pack_integer(spec_of(weight), weight, activations, unit).apply(x).double()
        want = rounded_rows(x, activations).double() @ weight.dense().double().T
        assert torch.allclose(got, want, rtol=0.01, atol=0.0)


def test_bfloat16_activations_of_one_stretch_keep_their_bits(unit: str) -> None:
    """Elements down to 1/128 of the largest are multiplied exactly."""
    weight = QuantizedWeight(torch.eye(64).to(torch.int8), torch.ones(64, 1), 64)
    packed = pack_integer(spec_of(weight), weight, "bf16", unit)
    x = (torch.rand(200, 64, generator=torch.Generator().manual_seed(0)) * 0.99 + 0.008).bfloat16()
    x[:, 0] = 1.0
    assert torch.equal(packed.apply(x), x)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4), ("fp8", 8)])
@pytest.mark.parametrize(("out", "size", "group"), [(48, 64, 64), (18, 80, 80), (96, 896, 128), (64, 100, 32)])
def test_bytes_are_known_before_packing(kind: str, bits: int, gated: bool, out: int, size: int, group: int) -> None:
    for zeros in (False, True) if kind != "fp8" else (False,):
        weight = made(kind, out, size, group, zeros)
        packed = pack_integer(spec_of(weight, gated), weight, "bf16")
        assert packed.num_bytes == packed_bytes(spec_of(weight, gated), bits, group, zeros, True)


def test_groups_the_kernels_cannot_take_are_dequantized_and_the_plan_says_so() -> None:
    target = Target("cpu", torch.bfloat16, in_panels=True)
    for weight in (made("int4", 32, 96, 48), made("int4", 32, 96, 16)):
        assert not can_pack(weight)
        packed = pack_weight(spec_of(weight), weight, target)
        assert "dequantized" in packed.label
    weight = made("int4", 32, 256, 128)
    assert can_pack(weight)
    packed = pack_weight(spec_of(weight), weight, target)
    assert packed.label.startswith("int4 panels (groups of 128), ")


SOURCES = {f"float {kind}": float_source(kind) for kind in ELEMENTS}
SOURCES |= {f"integer {form}": integer_source("bfloat16", form) for form in FORMATS}


@few(2)
@needs_x86
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("processor", ["haswell", "cooperlake", "sapphirerapids", "x86-64"])
def test_the_kernels_compile_for_other_processors(processor: str, name: str, tmp_path: Path) -> None:
    compiler, source = find_compiler(), SOURCES[name]
    assert not isinstance(compiler, str)
    macros = [f"-D{macro}" for macro in source.macros]
    flags = [*FLAGS, f"-march={processor}", "-O0", f"-I{INCLUDE}", *macros, str(source.file)]
    flags += ["-o", str(tmp_path / "a.so")]
    done = subprocess.run([*compiler.command, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@needs_integer_instructions("AVX2")
def test_units_this_processor_lacks_compute_the_same_in_plain_code() -> None:
    """The kernels for AVX512-VNNI and AMX, with the instructions they use emulated."""
    compiler = find_compiler()
    assert not isinstance(compiler, str)
    environment = {**os.environ, "CXX": shlex.join([*compiler.command, EMULATE]), "OMP_NUM_THREADS": "1"}
    chosen = "(VNNI or AMX) and (48-64 or 80-96 or 33-1280 or 40-bf or bad_row or order or bits)"
    command = [sys.executable, "-m", "pytest", "-n0", "-x", "-p", "no:cacheprovider", __file__, "-k", chosen]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "[100%]" in done.stdout


def test_without_avx2_nothing_is_packed_that_would_compute_nothing() -> None:
    weight = made("int8", 32, 64, 64)
    with pytest.raises(ValueError, match="AVX2"):
        pack_integer(spec_of(weight), weight, "bf16", integer_linear.INSTRUCTIONS[0])
