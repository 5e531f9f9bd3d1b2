"""Numbers of 8 and 4 bits in registers: to the compute dtype and back, the same on every device.

No device that these kernels run on converts all of these quickly, and some know no float8 at all. But the bits of a
small number are a few shifts and masks away from those of a 16-bit float, and those work on two numbers at once. So the
assembly below takes a word, four or eight numbers, and gives them in 16 bits or in float32, which is a shift away from
bfloat16; Triton's interpreter takes plain arithmetic with the same results.

float8 here is e4m3 without infinities (arXiv 2209.05433), as its bits. Its NaN may be read as 480: what is stored here
was clamped, and a NaN among a row's activations has ended its request before anybody reads it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
E4M3_LARGEST = tl.constexpr(448.0)


def _asm(pairs: list[str], multiply: str, stores: Sequence[str], factor: str = "0", addend: str = "") -> str:
    """Of a word of codes, all its numbers.

    ``pairs``: what leaves two 16-bit floats in ``bits``, one pair after another; ``stores``: what makes an output each
    of them. A product by ``factor``, twice in a register, gets ``addend`` added, or without it the input after the
    word; a pair may call this input ``SCALE``.
    """
    count, lines = len(stores) * len(pairs), []
    for number, pair in enumerate(pairs):
        made = pair.replace("MULTIPLY", multiply).replace("WORD", f"${count}")
        lines.append(made.replace("ADDEND", "addend" if addend else "SCALE").replace("SCALE", f"${count + 1}"))
        lines += [store.replace("OUT", f"${len(stores) * number + i}") for i, store in enumerate(stores)]
    registers = ".reg .b32 bits, high, factor, addend; .reg .b16 one, two;"
    return f"{{ {registers} mov.b32 factor, {factor}; mov.b32 addend, {addend or 0}; {' '.join(lines)} }}"


def _int4_pairs(base: str) -> list[str]:
    """Nibbles ``k`` and ``k + 4``, each as ``base + 8 + code``, times 1, plus the addend."""
    return [
        f"shr.u32 bits, WORD, {shift}; lop3.b32 bits, bits, 0x000F000F, {base}, 0xEA; "
        "MULTIPLY bits, bits, factor, ADDEND;"
        for shift in (0, 4, 8, 12)
    ]


def _e2m1_pairs(shift: int, mask: str) -> list[str]:
    """The same nibbles, moved to the upper halves of bytes and then taken as :func:`_e4m3_pairs` takes these."""
    pairs = [
        f"prmt.b32 bits, {word}, 0, {which}; shl.b32 bits, bits, {shift}; and.b32 bits, bits, {mask}; "
        "MULTIPLY bits, bits, factor, ADDEND;"
        for which in ("0xA280", "0xB391")
        for word in ("high", "WORD")
    ]
    return [f"shl.b32 high, WORD, 4; {pairs[0]}", *pairs[1:]]


def _e4m3_pairs(shift: int, mask: str) -> list[str]:
    """Bytes 0 and 1, and 2 and 3: each with its sign in all bits above it; then sign and magnitude to where a 16-bit
    float has them; then times the ratio of the exponents' biases."""
    return [
        f"prmt.b32 bits, WORD, 0, {which}; shl.b32 bits, bits, {shift}; and.b32 bits, bits, {mask}; "
        "MULTIPLY bits, bits, factor, ADDEND;"
        for which in ("0x9180", "0xB3A2")
    ]


def _int8_pairs(base: str) -> list[str]:
    """Bytes 0 and 1, and 2 and 3: ``(base + low 7 bits) - (base + 128 if negative)``."""
    return [
        f"prmt.b32 bits, WORD, 0, {which}; lop3.b32 high, bits, 0x00800080, {base}, 0xEA; "
        f"lop3.b32 bits, bits, 0x007F007F, {base}, 0xEA; MULTIPLY bits, high, factor, bits;"
        for which in ("0x4140", "0x4342")
    ]


BF16, FP16 = "fma.rn.bf16x2", "fma.rn.f16x2"
TOGETHER = ("mov.b32 OUT, bits;",)
HALVES = ("mov.b32 {OUT, two}, bits;", "mov.b32 {one, OUT}, bits;")
BF16_TO_FP32 = ("shl.b32 OUT, bits, 16;", "and.b32 OUT, bits, 0xFFFF0000;")
FP16_TO_FP32 = ("mov.b32 {one, two}, bits; cvt.f32.f16 OUT, one;", "cvt.f32.f16 OUT, two;")
E4M3_UNITS = [f"mov.b32 {{one, two}}, WORD; cvt.rn.f16x2.e4m3x2 bits, {half};" for half in ("one", "two")]
"""Where there are such instructions."""
MINUS_ZEROS = "0x80008000"
"""Added to what keeps its sign."""
Pairs = tuple[list[str], str]
"""How to make 16-bit floats, and the factor."""

E4M3_IN_BF16: Pairs = (_e4m3_pairs(4, "0x87F087F0"), "0x7B807B80")
E4M3_IN_FP16: Pairs = (_e4m3_pairs(7, "0xBF80BF80"), "0x5C005C00")
INT8_IN_BF16: Pairs = (_int8_pairs("0x43004300"), "0xBF80BF80")
INT8_IN_FP16: Pairs = (_int8_pairs("0x64006400"), "0xBC00BC00")


def _together(pairs: Pairs, multiply: str) -> tl.constexpr:
    """Two numbers an output, as Triton packs them."""
    return tl.constexpr(_asm(pairs[0], multiply, TOGETHER, pairs[1], MINUS_ZEROS))


def _apart(bf16: Pairs, fp16: Pairs, addend: str = MINUS_ZEROS) -> tuple[tl.constexpr, tl.constexpr, tl.constexpr]:
    """A number an output, in bfloat16, float16 and float32."""
    return (
        tl.constexpr(_asm(bf16[0], BF16, HALVES, bf16[1], addend)),
        tl.constexpr(_asm(fp16[0], FP16, HALVES, fp16[1], addend)),
        tl.constexpr(_asm(bf16[0], BF16, BF16_TO_FP32, bf16[1], addend)),
    )


E4M3_TO_BF16_PTX, E4M3_TO_FP16_PTX = _together(E4M3_IN_BF16, BF16), _together(E4M3_IN_FP16, FP16)
INT8_TO_BF16_PTX, INT8_TO_FP16_PTX = _together(INT8_IN_BF16, BF16), _together(INT8_IN_FP16, FP16)
E4M3_BF16, E4M3_FP16, E4M3_FP32 = _apart(E4M3_IN_BF16, E4M3_IN_FP16)
INT8_BF16, INT8_FP16, INT8_FP32 = _apart(INT8_IN_BF16, INT8_IN_FP16)
E2M1_BF16, E2M1_FP16, E2M1_FP32 = _apart(
    (_e2m1_pairs(2, "0x81C081C0"), "0x7E807E80"), (_e2m1_pairs(5, "0x8E008E00"), "0x74007400")
)
INT4_BF16, INT4_FP16, INT4_FP32 = _apart(
    (_int4_pairs("0x43004300"), "0x3F803F80"), (_int4_pairs("0x64006400"), "0x3C003C00"), addend=""
)
E2M1_PAIRS = tl.constexpr(
    _asm(
        [f"{pair} MULTIPLY bits, bits, SCALE, ADDEND;" for pair in _e2m1_pairs(2, "0x81C081C0")],
        BF16, TOGETHER, "0x7E807E80", MINUS_ZEROS,
    )
)  # fmt: skip
INT4_PAIRS = tl.constexpr(_asm(_int4_pairs("0x43004300"), BF16, TOGETHER, "0x3F803F80"))
"""Both with two neighbours an output: for tensor cores."""
E4M3_UNITS_FP32 = tl.constexpr(_asm(E4M3_UNITS, "", FP16_TO_FP32))


@tl.core.builtin
def converts_e4m3(_semantic: Any = None) -> Any:
    """Whether what is compiled for has instructions for e4m3: compute capability 8.9."""
    return tl.constexpr(int(_semantic.builder.options.arch.removeprefix("sm").rstrip("a")) >= 89)


@triton.jit
def _eight(word, addend, BF16: tl.constexpr, FP16: tl.constexpr, FP32: tl.constexpr, DTYPE: tl.constexpr):
    """Words ``[n, w]`` of eight codes each -> ``DTYPE [n, 8 w]``; nibble ``k`` is code ``2 k``, nibble ``k + 4`` code
    ``2 k + 1``. ``addend``: int32 like ``word``, for assembly that asks for it."""
    if tl.float32 == DTYPE:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            FP32, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [word, addend],
            (tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32), True, 1,
        )  # fmt: skip
    elif tl.float16 == DTYPE:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            FP16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, addend],
            (tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16), True, 1,
        )  # fmt: skip
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, addend],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            True, 1,
        )  # fmt: skip
    even, odd = tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), [word.shape[0], 8 * word.shape[1]])


@triton.jit
def _four(word, BF16: tl.constexpr, FP16: tl.constexpr, FP32: tl.constexpr, DTYPE: tl.constexpr):
    """Words ``[n, w]`` of four bytes each -> ``DTYPE [n, 4 w]``."""
    if tl.float32 == DTYPE:
        a, b, c, d = tl.inline_asm_elementwise(
            FP32, "=r,=r,=r,=r,r", [word], (tl.float32, tl.float32, tl.float32, tl.float32), True, 1
        )
    elif tl.float16 == DTYPE:
        a, b, c, d = tl.inline_asm_elementwise(
            FP16, "=h,=h,=h,=h,r", [word], (tl.float16, tl.float16, tl.float16, tl.float16), True, 1
        )
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            BF16, "=h,=h,=h,=h,r", [word], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 1
        )
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [word.shape[0], 4 * word.shape[1]])


@triton.jit
def _twice(value, DTYPE: tl.constexpr):
    """Integers in both halves of a register, as float16, or as bfloat16 for the other dtypes."""
    if tl.float16 == DTYPE:
        bits = value.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        bits = value.to(tl.float32).to(tl.bfloat16).to(tl.int16, bitcast=True)
    return (bits.to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def _nibbles(word):
    """Codes 0 .. 15 of words ``[n, w]``, int32 ``[n, 8 w]``, in the order of :func:`_eight`."""
    code = tl.arange(0, 8)
    shift = 4 * (code // 2 + code % 2 * 4)
    return tl.reshape((word[:, :, None] >> shift[None, None, :]) & 15, [word.shape[0], 8 * word.shape[1]])


@triton.jit
def _bytes(word):
    """Bytes of words ``[n, w]``, int32 ``[n, 4 w]``."""
    shift = 8 * tl.arange(0, 4)
    return tl.reshape((word[:, :, None] >> shift[None, None, :]) & 255, [word.shape[0], 4 * word.shape[1]])


@triton.jit
def from_e4m3(bits, DTYPE: tl.constexpr):
    """Bits of e4m3 numbers as ``DTYPE`` (float32, bfloat16 or float16), exactly. uint8, or int32 words ``[n, w]`` of
    four each: these become ``[n, 4 w]``."""
    if INTERPRETED:
        wide = _bytes(bits) if bits.dtype == tl.int32 else bits.to(tl.int32)
        # 2**120 is the ratio of the exponents' biases; what e4m3 calls subnormal is subnormal here too, until then.
        magnitude = ((wide & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where(wide >= 128, -magnitude, magnitude).to(DTYPE)
    elif bits.dtype == tl.int32:
        if converts_e4m3():
            return _four(bits, E4M3_BF16, E4M3_FP16, E4M3_UNITS_FP32, DTYPE)
        else:
            return _four(bits, E4M3_BF16, E4M3_FP16, E4M3_FP32, DTYPE)
    elif tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(E4M3_TO_FP16_PTX, "=r,=r,r", [bits], tl.float16, True, 4)
    else:
        return tl.inline_asm_elementwise(E4M3_TO_BF16_PTX, "=r,=r,r", [bits], tl.bfloat16, True, 4).to(DTYPE)


@triton.jit
def from_int8(codes, DTYPE: tl.constexpr):
    """int8 as ``DTYPE`` (float32, bfloat16 or float16), exactly; or int32 words of four, as :func:`from_e4m3`."""
    if INTERPRETED:
        narrow = _bytes(codes).to(tl.int8) if codes.dtype == tl.int32 else codes
        return narrow.to(tl.float32).to(DTYPE)
    elif codes.dtype == tl.int32:
        return _four(codes, INT8_BF16, INT8_FP16, INT8_FP32, DTYPE)
    elif tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(INT8_TO_FP16_PTX, "=r,=r,r", [codes], tl.float16, True, 4)
    else:
        return tl.inline_asm_elementwise(INT8_TO_BF16_PTX, "=r,=r,r", [codes], tl.bfloat16, True, 4).to(DTYPE)


@triton.jit
def from_int4(word, zero, DTYPE: tl.constexpr):
    """int32 words ``[n, w]`` of eight codes -8 .. 7, each plus 8, minus ``zero`` (int8 ``[n, groups]`` or ``None``) ->
    ``DTYPE`` (float32, bfloat16 or float16) ``[n, 8 w]``, exactly.

    Nibble ``k`` holds code ``2 k``, nibble ``k + 4`` code ``2 k + 1``: one shift and one mask find two neighbours, in
    the halves of a register.
    """
    if INTERPRETED:
        codes = _nibbles(word).to(tl.float32) - 8.0
        if zero is not None:
            codes -= _spread(zero.to(tl.float32), codes.shape[1])
        return codes.to(DTYPE)
    else:
        BASE: tl.constexpr = 1032 if tl.float16 == DTYPE else 136
        if zero is None:
            addend = _twice(tl.full(word.shape, -BASE, tl.int32), DTYPE)
        else:
            addend = _spread(_twice(-BASE - zero.to(tl.int32), DTYPE), word.shape[1])
        return _eight(word, addend, INT4_BF16, INT4_FP16, INT4_FP32, DTYPE)


@triton.jit
def _spread(grouped, SIZE: tl.constexpr):
    """``[n, groups] -> [n, SIZE]``: each as often as its group is large."""
    parts = tl.broadcast_to(grouped[:, :, None], [grouped.shape[0], grouped.shape[1], SIZE // grouped.shape[1]])
    return tl.reshape(parts, [grouped.shape[0], SIZE])


@triton.jit
def from_e2m1(word, DTYPE: tl.constexpr):
    """int32 words ``[n, w]`` of eight numbers of 4 bits -> ``DTYPE`` ``[n, 8 w]``, exactly; in the order of
    :func:`from_int4`."""
    if INTERPRETED:
        wide = _nibbles(word)
        # 2**126 is the ratio of the exponents' biases.
        magnitude = ((wide & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
        return tl.where(wide >= 8, -magnitude, magnitude).to(DTYPE)
    else:
        return _eight(word, word, E2M1_BF16, E2M1_FP16, E2M1_FP32, DTYPE)


@triton.jit
def halves(word):
    """The two bfloat16 of each int32 word, as float32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def paired(low, high):
    """The inverse of :func:`halves`; rounds to nearest, ties to even."""
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    low += 0x7FFF + ((low >> 16) & 1)
    high += 0x7FFF + ((high >> 16) & 1)
    return ((low >> 16) & 0xFFFF) | (high & -0x10000)


@triton.jit
def int4_pairs(word, zero):
    """A word of eight codes as :func:`from_int4` reads them -> four words of two bfloat16. ``zero``: int32 like
    ``word``, or ``None``."""
    if INTERPRETED:
        less = 8 if zero is None else 8 + zero
        return (
            _int4_pair(word, less),
            _int4_pair(word >> 4, less),
            _int4_pair(word >> 8, less),
            _int4_pair(word >> 12, less),
        )
    else:
        addend = _twice(tl.full(word.shape, -136, tl.int32) if zero is None else -136 - zero, tl.bfloat16)
        return tl.inline_asm_elementwise(
            INT4_PAIRS, "=r,=r,=r,=r,r,r", [word, addend], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )


@triton.jit
def _int4_pair(word, less):
    low, high = (word & 15) - less, ((word >> 16) & 15) - less
    return paired(low.to(tl.float32), high.to(tl.float32))


@triton.jit
def e2m1_pairs(word, exponent):
    """A word of eight numbers as :func:`from_e2m1` reads them, times 2 to the power of ``exponent`` (int32 like
    ``word``, the bits of e8m0) -> four words of two bfloat16, exactly."""
    scale = exponent << 7  # as bfloat16
    if INTERPRETED:
        wide = from_e2m1(tl.reshape(word, [word.shape[0], 1]), tl.float32)
        wide *= (scale << 16).to(tl.float32, bitcast=True)[:, None]
        low, high = tl.split(tl.reshape(wide, [word.shape[0], 4, 2]))
        even, odd = tl.split(tl.reshape(paired(low, high), [word.shape[0], 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth
    else:
        return tl.inline_asm_elementwise(
            E2M1_PAIRS, "=r,=r,=r,=r,r,r", [word, scale * 0x10001], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )


@triton.jit
def int8_pairs(word, zero):
    """A word of four codes -> two words of two bfloat16. ``zero``: ``None``."""
    if INTERPRETED:
        code = tl.reshape(from_int8(tl.reshape(word, [word.shape[0], 1]), tl.float32), [word.shape[0], 2, 2])
        low, high = tl.split(code)
        return tl.split(paired(low, high))
    else:
        return tl.inline_asm_elementwise(INT8_TO_BF16_PTX, "=r,=r,r", [word], (tl.int32, tl.int32), True, 1)


@triton.jit
def e4m3_pairs(word, zero):
    """The same of e4m3."""
    if INTERPRETED:
        code = tl.reshape(from_e4m3(tl.reshape(word, [word.shape[0], 1]), tl.float32), [word.shape[0], 2, 2])
        low, high = tl.split(code)
        return tl.split(paired(low, high))
    else:
        return tl.inline_asm_elementwise(E4M3_TO_BF16_PTX, "=r,=r,r", [word], (tl.int32, tl.int32), True, 1)


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
