"""How kernels read quantized weights: see :class:`engine.contracts.quantizer.TileLoader`. Layouts: ``layout.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.fragments import four_words
from engine.kernels.triton.narrow_types import from_e2m1, from_e4m3, from_int4, from_int8
from engine.kernels.triton.quantized.layout import SLAB, TILE_INPUTS
from engine.kernels.triton.tile_ops import below

_SLAB = tl.constexpr(SLAB)
_TILE_WORDS = tl.constexpr(TILE_INPUTS // 8)


@triton.jit
def load_bytes(weight_ptr, rows, real, start, IN_FEATURES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Codes of one byte each, ``[out, in]``: int32 words ``[BLOCK_N, BLOCK_K / 4]``, or, where channels begin inside of
    words, bytes ``[BLOCK_N, BLOCK_K]``."""
    if IN_FEATURES % 4 == 0:
        WORDS: tl.constexpr = IN_FEATURES // 4
        BLOCK: tl.constexpr = BLOCK_K // 4
        word = start // 4 + tl.arange(0, BLOCK)
        mask = real[:, None] & below(word, WORDS, BLOCK)[None, :]
        at = weight_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + rows[:, None] * WORDS + word[None, :]
        return tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    else:
        columns = start + tl.arange(0, BLOCK_K)
        mask = real[:, None] & below(columns, IN_FEATURES, BLOCK_K)[None, :]
        at = rows[:, None] * IN_FEATURES + columns[None, :]
        return tl.load(weight_ptr + at, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def load_nibbles(weight_ptr, rows, real, start, IN_FEATURES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Codes of half a byte, in tiles of ``SLAB`` channels by ``TILE_INPUTS`` inputs: int32 ``[BLOCK_N, BLOCK_K / 8]``.

    A weight of code 0 fills the last tiles, so there is nothing to mask along the input.
    """
    TILES: tl.constexpr = (IN_FEATURES + 8 * _TILE_WORDS - 1) // (8 * _TILE_WORDS)
    word = start // 8 + tl.arange(0, BLOCK_K // 8)
    row_at = (rows // _SLAB) * (TILES * _SLAB * _TILE_WORDS) + (rows % _SLAB) * _TILE_WORDS
    word_at = (word // _TILE_WORDS) * (_SLAB * _TILE_WORDS) + word % _TILE_WORDS
    mask = real[:, None] & below(word, TILES * _TILE_WORDS, BLOCK_K // 8)[None, :]
    at = weight_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row_at[:, None] + word_at[None, :]
    return tl.load(at, mask=mask, other=-0x77777778, eviction_policy="evict_first")


@triton.jit
def nibble_words(weight_ptr, rows, tile, quarter, mask, IN_FEATURES: tl.constexpr):
    """Of each thread's channel, 32 neighbouring inputs of one tile: four words. See ``fragments.py``."""
    TILES: tl.constexpr = IN_FEATURES // (8 * _TILE_WORDS)
    row_at = (rows // _SLAB) * (TILES * _SLAB * _TILE_WORDS) + (rows % _SLAB) * _TILE_WORDS
    at = weight_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row_at + tile * (_SLAB * _TILE_WORDS) + 4 * quarter
    return four_words(at, mask, "evict_first")


@triton.jit
def byte_words(weight_ptr, rows, tile, quarter, mask, IN_FEATURES: tl.constexpr):
    """The same of codes of a byte, eight words: the quarter of either half of a tile."""
    WORDS: tl.constexpr = IN_FEATURES // 4
    at = weight_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + rows * WORDS + tile * 32 + 4 * quarter
    return four_words(at, mask, "evict_first") + four_words(at + 16, mask, "evict_first")


@triton.jit
def load_groups(
    ptr, rows, real, start, IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Scales or zeros of a tile's groups, ``[BLOCK_N, groups]``, 0 where there are none; stored ``[out, groups]``.

    One number per group is loaded, not one per weight.
    """
    GROUPS: tl.constexpr = (IN_FEATURES + GROUP_SIZE - 1) // GROUP_SIZE
    IN_TILE: tl.constexpr = (BLOCK_K + GROUP_SIZE - 1) // GROUP_SIZE
    group = start // GROUP_SIZE + tl.arange(0, IN_TILE)
    mask = real[:, None] & below(group, GROUPS, IN_TILE)[None, :]
    return tl.load(ptr + rows[:, None] * GROUPS + group[None, :], mask=mask, other=0)


@triton.jit
def group_scale(loaded):
    """``tile_scale`` of the formats with groups."""
    return loaded[1].to(tl.float32)


@triton.jit
def shifted(tile, zero):
    """Codes minus the zeros of their groups: integers that any dtype holds."""
    parts = tl.reshape(tile, [tile.shape[0], zero.shape[1], tile.shape[1] // zero.shape[1]])
    return tl.reshape(parts - zero.to(tl.float32)[:, :, None], tile.shape)


@triton.jit
def load_int8(
    weight_ptr, scale_ptr, zero_ptr, rows, real, start,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """int8, or the bits of e4m3 in uint8; the scale is per channel."""
    return load_bytes(weight_ptr, rows, real, start, IN_FEATURES, BLOCK_K)


@triton.jit
def unpack_int8(loaded, DTYPE: tl.constexpr):
    return from_int8(loaded, DTYPE)


@triton.jit
def unpack_e4m3(loaded, DTYPE: tl.constexpr):
    return from_e4m3(loaded, DTYPE)


@triton.jit
def load_int4(
    weight_ptr, scale_ptr, zero_ptr, rows, real, start,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """int4; the scale is per channel."""
    return load_nibbles(weight_ptr, rows, real, start, IN_FEATURES, BLOCK_K)


@triton.jit
def unpack_int4(loaded, DTYPE: tl.constexpr):
    return from_int4(loaded, None, DTYPE)


@triton.jit
def load_int8_groups(
    weight_ptr, scale_ptr, zero_ptr, rows, real, start,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The same with scales per group, and zeros if there are any."""
    codes = load_bytes(weight_ptr, rows, real, start, IN_FEATURES, BLOCK_K)
    scale = load_groups(scale_ptr, rows, real, start, IN_FEATURES, GROUP_SIZE, BLOCK_K)
    if zero_ptr is None:
        return codes, scale
    else:
        return codes, scale, load_groups(zero_ptr, rows, real, start, IN_FEATURES, GROUP_SIZE, BLOCK_K)


@triton.jit
def load_int4_groups(
    weight_ptr, scale_ptr, zero_ptr, rows, real, start,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """int4 with scales per group, and zeros if there are any."""
    codes = load_nibbles(weight_ptr, rows, real, start, IN_FEATURES, BLOCK_K)
    scale = load_groups(scale_ptr, rows, real, start, IN_FEATURES, GROUP_SIZE, BLOCK_K)
    if zero_ptr is None:
        return codes, scale
    else:
        return codes, scale, load_groups(zero_ptr, rows, real, start, IN_FEATURES, GROUP_SIZE, BLOCK_K)


@triton.jit
def unpack_int8_groups(loaded, DTYPE: tl.constexpr):
    return from_int8(loaded[0], DTYPE)


@triton.jit
def unpack_int8_zeros(loaded, DTYPE: tl.constexpr):
    codes, _, zero = loaded
    return shifted(from_int8(codes, tl.float32), zero).to(DTYPE)


@triton.jit
def unpack_e4m3_groups(loaded, DTYPE: tl.constexpr):
    return from_e4m3(loaded[0], DTYPE)


@triton.jit
def unpack_int4_groups(loaded, DTYPE: tl.constexpr):
    return from_int4(loaded[0], None, DTYPE)


@triton.jit
def unpack_int4_zeros(loaded, DTYPE: tl.constexpr):
    codes, _, zero = loaded
    return from_int4(codes, zero, DTYPE)


@triton.jit
def power_of_two(exponent):
    """uint8 exponents, the bits of e8m0, as float32; 0 for the least one."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def unpack_e2m1_groups(loaded, DTYPE: tl.constexpr):
    return from_e2m1(loaded[0], DTYPE)


@triton.jit
def exponent_scale(loaded):
    """:func:`group_scale` of e2m1."""
    return power_of_two(loaded[1])
