"""Numbers of 8 and 4 bits in registers: to the compute dtype and back, the same on every device.

No device that these kernels run on converts all of these quickly, and some know no float8 at all. But the bits of a
small number are a few shifts and masks away from those of a 16-bit float, and those work on two numbers at once. So the
``_PTX`` functions below take four bytes in a register and give four or eight numbers in two or four; Triton's
interpreter takes plain arithmetic with the same results. float32 is a shift away from bfloat16, which holds them all.

float8 here is e4m3 without infinities (arXiv 2209.05433), as its bits in uint8. Its NaN is read as 480: what is stored
here was clamped, and a NaN among a row's activations has ended its request before anybody reads it back.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
E4M3_LARGEST = tl.constexpr(448.0)


def _e4m3_ptx(shift: int, mask: str, factor: str, multiply: str) -> str:
    """Sign and magnitude to where a 16-bit float has them, then times the ratio of the exponents' biases."""
    return f"""{{
        .reg .b32 bits, sign, factor, zero;
        mov.b32 factor, {factor};
        mov.b32 zero, 0x80008000;
        prmt.b32 bits, $2, 0, 0x1404;
        and.b32 sign, bits, 0x80008000;
        shr.u32 bits, bits, {shift};
        lop3.b32 bits, bits, {mask}, sign, 0xEA;
        {multiply} $0, bits, factor, zero;
        prmt.b32 bits, $2, 0, 0x3424;
        and.b32 sign, bits, 0x80008000;
        shr.u32 bits, bits, {shift};
        lop3.b32 bits, bits, {mask}, sign, 0xEA;
        {multiply} $1, bits, factor, zero;
    }}"""


def _int8_ptx(base: str, minus_one: str, multiply: str) -> str:
    """``(base + low 7 bits) - (base + 128 if negative)``; ``base``: a float whose last bits count ones."""
    return f"""{{
        .reg .b32 bits, low, high, minus_one;
        mov.b32 minus_one, {minus_one};
        prmt.b32 bits, $2, 0, 0x4140;
        lop3.b32 low, bits, 0x007F007F, {base}, 0xEA;
        lop3.b32 high, bits, 0x00800080, {base}, 0xEA;
        {multiply} $0, high, minus_one, low;
        prmt.b32 bits, $2, 0, 0x4342;
        lop3.b32 low, bits, 0x007F007F, {base}, 0xEA;
        lop3.b32 high, bits, 0x00800080, {base}, 0xEA;
        {multiply} $1, high, minus_one, low;
    }}"""


def _int4_ptx(base: str, one: str, minus_base: str, multiply: str) -> str:
    """The nibbles of eight codes, ``base + 8 + code``, each with the one 16 bits above it, minus ``base + 8``."""
    return f"""{{
        .reg .b32 bits, one, minus_base;
        mov.b32 one, {one};
        mov.b32 minus_base, {minus_base};
        lop3.b32 bits, $4, 0x000F000F, {base}, 0xEA;
        {multiply} $0, bits, one, minus_base;
        shr.u32 bits, $4, 4;
        lop3.b32 bits, bits, 0x000F000F, {base}, 0xEA;
        {multiply} $1, bits, one, minus_base;
        shr.u32 bits, $4, 8;
        lop3.b32 bits, bits, 0x000F000F, {base}, 0xEA;
        {multiply} $2, bits, one, minus_base;
        shr.u32 bits, $4, 12;
        lop3.b32 bits, bits, 0x000F000F, {base}, 0xEA;
        {multiply} $3, bits, one, minus_base;
    }}"""


def _e2m1_ptx(magnitude: int, mask: str, factor: str, multiply: str) -> str:
    """Eight numbers of 4 bits, with those nibbles: exponent and mantissa to bit ``magnitude`` of a 16-bit float, signs
    to bit 15, then times the ratio of the exponents' biases."""
    lines = []
    for out, low in enumerate((0, 4, 8, 12)):
        move = magnitude - low
        shift = f"shl.b32 bits, $4, {move};" if move >= 0 else f"shr.u32 bits, $4, {-move};"
        lines.append(f"""
        shl.b32 sign, $4, {12 - low};
        and.b32 sign, sign, 0x80008000;
        {shift}
        lop3.b32 bits, bits, {mask}, sign, 0xEA;
        {multiply} ${out}, bits, factor, zero;""")
    return f"""{{
        .reg .b32 bits, sign, factor, zero;
        mov.b32 factor, {factor};
        mov.b32 zero, 0x80008000;{"".join(lines)}
    }}"""


E4M3_TO_BF16_PTX = tl.constexpr(_e4m3_ptx(4, "0x07F007F0", "0x7B807B80", "fma.rn.bf16x2"))
E4M3_TO_FP16_PTX = tl.constexpr(_e4m3_ptx(1, "0x3F803F80", "0x5C005C00", "fma.rn.f16x2"))
INT8_TO_BF16_PTX = tl.constexpr(_int8_ptx("0x43004300", "0xBF80BF80", "fma.rn.bf16x2"))
INT8_TO_FP16_PTX = tl.constexpr(_int8_ptx("0x64006400", "0xBC00BC00", "fma.rn.f16x2"))
INT4_TO_BF16_PTX = tl.constexpr(_int4_ptx("0x43004300", "0x3F803F80", "0xC308C308", "fma.rn.bf16x2"))
INT4_TO_FP16_PTX = tl.constexpr(_int4_ptx("0x64006400", "0x3C003C00", "0xE408E408", "fma.rn.f16x2"))

E2M1_TO_BF16_PTX = tl.constexpr(_e2m1_ptx(6, "0x01C001C0", "0x7E807E80", "fma.rn.bf16x2"))
E2M1_TO_FP16_PTX = tl.constexpr(_e2m1_ptx(9, "0x0E000E00", "0x74007400", "fma.rn.f16x2"))


@triton.jit
def from_e4m3(bits, DTYPE: tl.constexpr):
    """uint8 bits of e4m3 numbers as ``DTYPE`` (float32, bfloat16 or float16), exactly."""
    if INTERPRETED:
        wide = bits.to(tl.int32)
        # 2**120 is the ratio of the exponents' biases; what e4m3 calls subnormal is subnormal here too, until then.
        magnitude = ((wide & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where(wide >= 128, -magnitude, magnitude).to(DTYPE)
    elif tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(E4M3_TO_FP16_PTX, "=r,=r,r", [bits], tl.float16, True, 4)
    else:
        return tl.inline_asm_elementwise(E4M3_TO_BF16_PTX, "=r,=r,r", [bits], tl.bfloat16, True, 4).to(DTYPE)


@triton.jit
def from_int8(codes, DTYPE: tl.constexpr):
    """int8 as ``DTYPE`` (float32, bfloat16 or float16), exactly."""
    if INTERPRETED:
        return codes.to(tl.float32).to(DTYPE)
    elif tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(INT8_TO_FP16_PTX, "=r,=r,r", [codes], tl.float16, True, 4)
    else:
        return tl.inline_asm_elementwise(INT8_TO_BF16_PTX, "=r,=r,r", [codes], tl.bfloat16, True, 4).to(DTYPE)


@triton.jit
def from_int4(packed, DTYPE: tl.constexpr):
    """uint8 ``[n, k / 2]`` -> the codes -8 .. 7 as ``DTYPE`` ``[n, k]``.

    Of eight neighbouring codes, which take four bytes, byte ``b`` holds code ``b`` in its low half and code ``b + 4``
    in its high half, each plus 8: so both codes of a 16-bit pair are found with one shift and one mask, and in order.
    """
    HALVES: tl.constexpr = packed.shape[1]
    if INTERPRETED:
        words = tl.reshape(packed, [packed.shape[0], HALVES // 4, 4])
        words = tl.permute(tl.join(words & 15, words >> 4), [0, 1, 3, 2])
        return (tl.reshape(words, [packed.shape[0], 2 * HALVES]).to(tl.float32) - 8.0).to(DTYPE)
    elif tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            INT4_TO_FP16_PTX, "=r,=r,=r,=r,r", [packed], (tl.float16, tl.float16), True, 4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            INT4_TO_BF16_PTX, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), True, 4
        )
    return tl.reshape(tl.join(low, high), [packed.shape[0], 2 * HALVES]).to(DTYPE)


@triton.jit
def from_e2m1(packed, DTYPE: tl.constexpr):
    """uint8 ``[n, k / 2]`` -> the numbers as ``DTYPE`` ``[n, k]``, exactly; in the order of :func:`from_int4`."""
    HALVES: tl.constexpr = packed.shape[1]
    if INTERPRETED:
        words = tl.reshape(packed, [packed.shape[0], HALVES // 4, 4])
        words = tl.permute(tl.join(words & 15, words >> 4), [0, 1, 3, 2])
        wide = tl.reshape(words, [packed.shape[0], 2 * HALVES]).to(tl.int32)
        # 2**126 is the ratio of the exponents' biases.
        magnitude = ((wide & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
        return tl.where(wide >= 8, -magnitude, magnitude).to(DTYPE)
    elif tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            E2M1_TO_FP16_PTX, "=r,=r,=r,=r,r", [packed], (tl.float16, tl.float16), True, 4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            E2M1_TO_BF16_PTX, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), True, 4
        )
    return tl.reshape(tl.join(low, high), [packed.shape[0], 2 * HALVES]).to(DTYPE)


@triton.jit
def to_e4m3(x):
    """Bits, uint8, of float32 ``x`` rounded to the nearest e4m3 number, ties to even, clamped to +-448; NaN stays."""
    magnitude = tl.minimum(tl.abs(x), E4M3_LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    # The last bit that stays decides ties; then the exponent's bias of 127 becomes 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 steps are 2**-9: those of float32 between 2**14 and 2**15.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | tl.where(x.to(tl.int32, bitcast=True) < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def to_int8(x):
    """float32 ``x`` to the nearest of -127 .. 127, ties to even."""
    # Adding 1.5 * 2**23 leaves the integer in the last bits, rounded.
    clamped = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return (clamped + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
