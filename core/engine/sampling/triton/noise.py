"""The Gumbel noise of :mod:`engine.sampling.philox` inside a kernel: the same words, the same uniforms.

Logarithms are computed here and not by the GPU's approximation, whose absolute error near 1 would be felt just in
the large draws that decide. They come within two units in the last place where the tests compute them, in Triton's
interpreter. They use nothing but operations that IEEE 754 rounds in one way, and kernels are launched with
``enable_fp_fusion=False``: a GPU is meant to give the same bits, which no test has compared on one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling import philox

_HIGHEST = tl.constexpr(philox._HIGHEST)
_LN2_HIGH = tl.constexpr(0.693359375)  # nine bits: its products with an exponent are exact
_LN2_LOW = tl.constexpr(-2.1219444005469057e-4)
_SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
_ONE_LESS_SQRT_HALF = tl.constexpr(0.2928932188134524)


@triton.jit
def _log_near_one(f):
    """``log(1 + f)`` for ``sqrt(1/2) - 1 <= f <= sqrt(2) - 1``: ``2 artanh(s)`` with ``|s| < 0.172``, four terms."""
    s = tl.math.div_rn(f, 2.0 + f)
    z = s * s
    return 2.0 * s + s * z * (2.0 / 3.0 + z * (2.0 / 5.0 + z * (2.0 / 7.0 + z * (2.0 / 9.0))))


@triton.jit
def log(x):
    """Natural logarithm of normal positive float32."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    power = exponent.to(tl.float32)
    return power * _LN2_HIGH + (_log_near_one(mantissa - 1.0) + power * _LN2_LOW)


@triton.jit
def uniform(seed, position, first, PURPOSE: tl.constexpr, COUNT: tl.constexpr):
    """Entries ``first .. first + COUNT`` (multiples of 4) of the stream (``seed``, ``position``: int64): float32 in
    (0, 1), bit for bit those of :func:`engine.sampling.philox.uniform`."""
    block = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    purpose = tl.full([COUNT // 4], PURPOSE, tl.uint32)
    low = tl.zeros([COUNT // 4], tl.uint32) + (position & 0xFFFFFFFF).to(tl.uint32)
    high = tl.zeros([COUNT // 4], tl.uint32) + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block, purpose, low, high)
    return _to_unit(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def _to_unit(words):
    return tl.minimum((words.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), _HIGHEST)


@triton.jit
def gumbel(seed, position, first, PURPOSE: tl.constexpr, COUNT: tl.constexpr):
    """Standard Gumbel noise, ``-log(-log1p(-u))`` of :func:`uniform`."""
    return _to_gumbel(uniform(seed, position, first, PURPOSE, COUNT))


@triton.jit
def gumbel_of(seed, position, index, PURPOSE: tl.constexpr):
    """Entries ``index`` (int64, any) of what :func:`gumbel` makes. A whole block of four is computed for each."""
    block = (index // 4).to(tl.uint32)
    purpose = (index * 0 + PURPOSE).to(tl.uint32)
    low = (index * 0 + (position & 0xFFFFFFFF)).to(tl.uint32)
    high = (index * 0 + ((position >> 32) & 0xFFFFFFFF)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block, purpose, low, high)
    lane = index % 4
    words = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    return _to_gumbel(_to_unit(words))


@triton.jit
def _to_gumbel(unit):
    near = unit <= _ONE_LESS_SQRT_HALF
    # Where u is small, 1 - u would lose its digits; elsewhere the subtraction costs less than half a unit.
    exponential = tl.where(near, -_log_near_one(-tl.where(near, unit, 0.0)), -log(1.0 - unit))
    return -log(exponential)
