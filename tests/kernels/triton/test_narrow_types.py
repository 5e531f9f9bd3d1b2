"""8- and 4-bit numbers in registers: every code, both ways, and what the assembly says instruction by instruction."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton import narrow_types
from engine.kernels.triton.narrow_types import from_e4m3, from_int8, to_e4m3, to_int8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FINITE = [code for code in range(256) if code & 127 != 127]
"""Codes of e4m3 that are numbers."""


@triton.jit
def convert(x_ptr, out_ptr, HOW: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, HOW(tl.load(x_ptr + at), out_ptr.dtype.element_ty))


@triton.jit
def narrow(x_ptr, out_ptr, HOW: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, HOW(tl.load(x_ptr + at)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_float8_is_read_exactly(device: str, dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(device)
    out = torch.empty(256, dtype=dtype, device=device)
    convert[(1,)](bits, out, HOW=from_e4m3, N=256)
    want = bits.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(out[FINITE], want[FINITE])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_int8_is_read_exactly(device: str, dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128, dtype=torch.int32).to(torch.int8).to(device)
    out = torch.empty(256, dtype=dtype, device=device)
    convert[(1,)](codes, out, HOW=from_int8, N=256)
    assert torch.equal(out.float(), codes.float())


def between(values: Tensor) -> Tensor:
    """Those numbers, the middles between neighbours, and the float32 just beside each."""
    values = values.sort().values
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    beside = [torch.nextafter(points, torch.full_like(points, end)) for end in (torch.inf, -torch.inf)]
    return torch.cat([points, *beside])


def padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, triton.next_power_of_2(len(x)) - len(x)))


def test_rounding_to_float8_is_torchs_and_saturates(device: str) -> None:
    codes = torch.tensor(FINITE, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    random = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 10.0
    x = padded(torch.cat([between(codes), random, torch.tensor([449.0, -1e9, 1e-9, 0.0, -0.0])])).to(device)
    out = torch.empty(len(x), dtype=torch.uint8, device=device)
    narrow[(1,)](x, out, HOW=to_e4m3, N=len(x))
    assert torch.equal(out, x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8))


def test_what_is_not_a_number_stays_none_in_float8(device: str) -> None:
    x = torch.full((16,), float("nan"), device=device)
    out = torch.empty(16, dtype=torch.uint8, device=device)
    narrow[(1,)](x, out, HOW=to_e4m3, N=16)
    assert bool(out.view(torch.float8_e4m3fn).float().isnan().all())


def test_rounding_to_int8_takes_halves_to_even_and_saturates(device: str) -> None:
    x = padded(torch.cat([torch.arange(-140.0, 140.0, 0.25), torch.tensor([1e9, -1e9])])).to(device)
    out = torch.empty(len(x), dtype=torch.int8, device=device)
    narrow[(1,)](x, out, HOW=to_int8, N=len(x))
    assert torch.equal(out.float(), x.round().clamp(-127.0, 127.0))


# What follows runs the assembly, one instruction at a time, on numbers.


def _prmt(a: int, b: int, selector: int) -> int:
    """Selectors above 7 take the sign of a byte eight times."""
    both = a | b << 32
    picked = (selector >> 4 * i & 15 for i in range(4))
    found = ((both >> 8 * (at & 7) & 255, at > 7) for at in picked)
    return sum((255 * (byte >> 7) if is_sign else byte) << 8 * i for i, (byte, is_sign) in enumerate(found))


def _lop3(a: int, b: int, c: int, table: int) -> int:
    bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
    return sum((table >> index & 1) << i for i, index in enumerate(bits))


def _halves(word: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.uint16).view(dtype).double()


def _word(halves: Tensor) -> int:
    low, high = halves.view(torch.uint16).tolist()
    return int(low | high << 16)


def _fma(dtype: torch.dtype) -> Callable[[int, int, int], int]:
    return lambda a, b, c: _word((_halves(a, dtype) * _halves(b, dtype) + _halves(c, dtype)).to(dtype))


def _float32(half: int) -> int:
    return int(_halves(half, torch.float16)[0].float().view(torch.uint32))


def _from_e4m3(both: int) -> int:
    codes = torch.tensor([both & 255, both >> 8], dtype=torch.uint8)
    return _word(codes.view(torch.float8_e4m3fn).half())


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma(torch.bfloat16),
    "fma.rn.f16x2": _fma(torch.float16),
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
    "cvt.f32.f16": _float32,
}


def run(ptx: str, inputs: list[int], outputs: int) -> list[int]:
    """The output registers of inline assembly."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for statement in re.findall(r"([a-z][^;]*);", re.sub(r"\.reg [^;]*;", "", ptx)):
        name, _, operands = statement.strip().partition(" ")
        if halves := re.match(r"\{(\S+), (\S+)\}, (\S+)", operands):
            value = registers[halves[3]]
            registers[halves[1]], registers[halves[2]] = value & 0xFFFF, value >> 16
            continue
        to, *given = (part.strip() for part in operands.split(","))
        registers[to] = OPERATIONS[name](*(registers[at] if at in registers else int(at, 0) for at in given))
    return [registers[f"${i}"] for i in range(outputs)]


def constant(name: str) -> str:
    return str(getattr(narrow_types, name).value)


def numbers(outputs: list[int], kind: str) -> list[float]:
    """What registers of 16 or 32 bits stand for."""
    if kind == "FP32":
        return [float(torch.tensor(value).to(torch.uint32).view(torch.float32)) for value in outputs]
    return [float(_halves(value, KINDS[kind])[0]) for value in outputs]


KINDS = {"BF16": torch.bfloat16, "FP16": torch.float16}


@pytest.mark.parametrize("kind", KINDS)
def test_the_assembly_reads_every_byte_exactly(kind: str) -> None:
    for first in range(0, 256, 4):
        codes = torch.tensor([first, first + 3, first + 2, first + 1], dtype=torch.uint8)
        word = sum(code << 8 * i for i, code in enumerate(codes.tolist()))
        got = torch.cat([_halves(out, KINDS[kind]) for out in run(constant(f"INT8_TO_{kind}_PTX"), [word], 2)])
        assert torch.equal(got, codes.view(torch.int8).double())
        got = torch.cat([_halves(out, KINDS[kind]) for out in run(constant(f"E4M3_TO_{kind}_PTX"), [word], 2)])
        want = codes.view(torch.float8_e4m3fn).double()
        assert torch.equal(got[~want.isnan()], want[~want.isnan()])


@pytest.mark.parametrize(
    "name", ["INT8_BF16", "INT8_FP16", "INT8_FP32", "E4M3_BF16", "E4M3_FP16", "E4M3_FP32", "E4M3_UNITS_FP32"]
)
def test_the_assembly_reads_every_byte_of_a_word_in_order(name: str) -> None:
    stored = torch.int8 if name.startswith("INT8") else torch.float8_e4m3fn
    for first in range(0, 256, 4):
        codes = torch.tensor([first, first + 3, first + 2, first + 1], dtype=torch.uint8)
        word = sum(code << 8 * i for i, code in enumerate(codes.tolist()))
        got = numbers(run(constant(name), [word], 4), name.rpartition("_")[2])
        want = codes.view(stored).double()
        assert torch.equal(torch.tensor(got).double()[~want.isnan()], want[~want.isnan()])


NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NIBBLES = {"INT4": [code - 8.0 for code in range(16)], "E2M1": [*NUMBERS, *(-number for number in NUMBERS)]}
"""What codes of 4 bits stand for."""
PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight codes a nibble holds."""


@pytest.mark.parametrize("stored", NIBBLES)
@pytest.mark.parametrize("kind", [*KINDS, "FP32"])
def test_the_assembly_reads_every_nibble_from_every_place(kind: str, stored: str) -> None:
    for code, zero in product(range(16), (-8, 0, 7)):
        codes = [(code + 3 * i) % 16 for i in range(8)]
        word = sum(codes[at] << 4 * i for i, at in enumerate(PLACES))
        addend, less = 0, 0.0
        if stored == "INT4":
            base, dtype = (1032, torch.float16) if kind == "FP16" else (136, torch.bfloat16)
            addend, less = _word(torch.tensor([-base - zero] * 2).to(dtype)), float(zero)
        got = numbers(run(constant(f"{stored}_{kind}"), [word, addend], 8), kind)
        assert got == [NIBBLES[stored][one] - less for one in codes]
