"""The product of up to 16 rows in which weights go from memory to tensor cores without leaving their thread.

``tl.dot`` wants operands where the compiler lays them out, and unpacked weights get there through shared memory; such
products took longer than reading the weights (``docs/measured.md``). The instruction itself (PTX ISA, ``mma.m16n8k16``)
asks for less: of 16 channels and 16 inputs, lane ``4 g + q`` of a warp holds four inputs of channels ``g`` and
``g + 8``, and the same four of row ``g``. Which four they are is free, as long as channels and rows agree. So here a
thread reads 32 neighbouring inputs of two channels (or twice 16), unpacks each word to pairs of bfloat16, and
multiplies.

Tensors are ``[threads]``: an element is a thread's. A warp has all 16 channels of its program and every so many of the
input's tiles; the sums of the warps are added at the end, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.narrow_types import INTERPRETED, halves

CHANNELS = 16
"""Of a program."""
TILE = 128
"""Inputs that a warp multiplies at a time."""
_TILE = tl.constexpr(TILE)
_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
    "{$10, $11, $12, $13};"
)


@triton.jit
def multiply_add(a, b, c):
    """``c + a @ b`` of a warp: ``a`` four words (channels ``g`` and ``g + 8``, then two more inputs of each), ``b`` two
    words of row ``g``; ``c`` four sums: channel ``g`` with rows ``2 q`` and ``2 q + 1``, then channel ``g + 8``."""
    if INTERPRETED:
        low, high = _sums(a[0], a[2], b), _sums(a[1], a[3], b)
        return c[0] + low[0], c[1] + low[1], c[2] + high[0], c[3] + high[1]
    else:
        return tl.inline_asm_elementwise(
            _MMA, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
            (tl.float32, tl.float32, tl.float32, tl.float32), True, 1,
        )  # fmt: skip


@triton.jit
def _sums(a0, a1, b):
    """Half of :func:`multiply_add` in plain arithmetic."""
    WARPS: tl.constexpr = a0.shape[0] // 32
    total = tl.zeros([WARPS, 8, 8], tl.float32)
    for word in tl.static_range(2):
        of_channel, of_row = halves(a0 if word == 0 else a1), halves(b[word])
        for half in tl.static_range(2):
            channel = tl.reshape(of_channel[half], [WARPS, 8, 1, 4])
            row = tl.reshape(of_row[half], [WARPS, 1, 8, 4])
            total += tl.sum(channel * row, 3)
    first, second = tl.split(tl.reshape(total, [WARPS, 8, 4, 2]))
    return tl.reshape(first, [a0.shape[0]]), tl.reshape(second, [a0.shape[0]])


@triton.jit
def loads_before():
    """The assembler moves loads down to where they are needed, and then waits for them; but not past this."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def four_words(at, mask, EVICTION: tl.constexpr):
    """The words from ``at`` on, int32 pointers ``[threads]``, 16 bytes a thread in one load; 0 outside of ``mask``."""
    words = tl.load(at[:, None] + tl.arange(0, 4)[None, :], mask=mask[:, None], other=0, eviction_policy=EVICTION)
    even, odd = tl.split(tl.reshape(words, [words.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def load_inputs(x_ptr, tile, num_rows, stride_x, TILES: tl.constexpr, WORDS: tl.constexpr, BLOCK_M: tl.constexpr):
    """A thread's 32 inputs of a tile, of each eight rows: 16 words. They lie as its weights do: in one run, or in two
    where weights take eight words."""
    NEXT: tl.constexpr = 8 if WORDS == 4 else 32
    lane = tl.arange(0, tile.shape[0]) % 32
    at = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + tile * (_TILE // 2) + lane % 4 * (64 // WORDS)
    words = ()
    for eight in tl.static_range(BLOCK_M // 8):
        row = lane // 4 + 8 * eight
        mask, row_at = (tile < TILES) & (row < num_rows), at + row.to(tl.int64) * (stride_x // 2)
        words += four_words(row_at, mask, "") + four_words(row_at + 4, mask, "")
        words += four_words(row_at + NEXT, mask, "") + four_words(row_at + NEXT + 4, mask, "")
    return words


@triton.jit
def load_number(ptr, at, mask):
    """A scale of a group as float32; a zero, int8, or an exponent, uint8, as int32."""
    number = tl.load(ptr + at, mask=mask, other=0)
    if ptr.dtype.element_ty.is_int():
        return number.to(tl.int32)
    else:
        return number.to(tl.float32)


@triton.jit
def load_weights(
    weight_ptr, scale_ptr, zero_ptr, low, high, tile,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_WORDS: tl.constexpr,
):  # fmt: skip
    """Words of the thread's channels ``low`` and ``high``, then their scales and zeros of the tile's group, if any; of
    groups of 32 inputs, of the thread's."""
    quarter, mask = tl.arange(0, low.shape[0]) % 4, tile < IN_FEATURES // _TILE
    weights = LOAD_WORDS(weight_ptr, low, tile, quarter, mask, IN_FEATURES)
    weights += LOAD_WORDS(weight_ptr, high, tile, quarter, mask, IN_FEATURES)
    if scale_ptr is not None:
        GROUPS: tl.constexpr = (IN_FEATURES + GROUP_SIZE - 1) // GROUP_SIZE
        group = tile * _TILE // GROUP_SIZE
        if GROUP_SIZE < _TILE:
            tl.static_assert(GROUP_SIZE == 32 and zero_ptr is None, "a thread has 32 neighbouring inputs of a channel")
            group += quarter
        weights += (load_number(scale_ptr, low * GROUPS + group, mask),)
        weights += (load_number(scale_ptr, high * GROUPS + group, mask),)
        if zero_ptr is not None:
            weights += (load_number(zero_ptr, low * GROUPS + group, mask),)
            weights += (load_number(zero_ptr, high * GROUPS + group, mask),)
    return weights


@triton.jit
def add_tile(
    sums, weights, x,
    HAS_SCALES: tl.constexpr, NUMBER: tl.constexpr, UNPACK_WORD: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """``sums`` of eight rows plus the products of a tile with ``x``, 16 words (and any after them). ``HAS_SCALES``: the
    tile has one of each channel. ``NUMBER``: where in ``weights`` that is which ``UNPACK_WORD`` takes; 0: nothing."""
    PAIRS: tl.constexpr = 16 // WORDS
    none = tl.zeros(sums[0].shape, tl.float32)
    total = (none, none, none, none) if HAS_SCALES else sums
    for word in tl.static_range(WORDS):
        if NUMBER > 0:
            low = UNPACK_WORD(weights[word], weights[NUMBER])
            high = UNPACK_WORD(weights[WORDS + word], weights[NUMBER + 1])
        else:
            low, high = UNPACK_WORD(weights[word], None), UNPACK_WORD(weights[WORDS + word], None)
        for pair in tl.static_range(0, PAIRS, 2):
            a = (low[pair], high[pair], low[pair + 1], high[pair + 1])
            total = multiply_add(a, (x[word * PAIRS + pair], x[word * PAIRS + pair + 1]), total)
    if HAS_SCALES:
        low, high = weights[2 * WORDS], weights[2 * WORDS + 1]
        return sums[0] + total[0] * low, sums[1] + total[1] * low, sums[2] + total[2] * high, sums[3] + total[3] * high
    else:
        return total


@triton.jit
def channels_of_threads(rows, real, WARPS: tl.constexpr):
    """Weight rows ``[16]`` -> of channel ``g`` and channel ``g + 8`` of each thread; row 0 for what does not exist."""
    low, high = tl.split(tl.permute(tl.reshape(tl.where(real, rows, 0), [2, 8]), [1, 0]))
    low = tl.reshape(tl.broadcast_to(low[None, :, None], [WARPS, 8, 4]), [32 * WARPS])
    return low, tl.reshape(tl.broadcast_to(high[None, :, None], [WARPS, 8, 4]), [32 * WARPS])


@triton.jit
def first_tiles(
    weight_ptr, scale_ptr, zero_ptr, rows, real,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_WORDS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The two of each warp that are multiplied first: what may be read before the kernel waits for its input."""
    low, high = channels_of_threads(rows, real, WARPS)
    tile = tl.arange(0, 32 * WARPS) // 32
    first = load_weights(weight_ptr, scale_ptr, zero_ptr, low, high, tile, IN_FEATURES, GROUP_SIZE, LOAD_WORDS)
    tile += WARPS
    return first, load_weights(weight_ptr, scale_ptr, zero_ptr, low, high, tile, IN_FEATURES, GROUP_SIZE, LOAD_WORDS)


@triton.jit
def fragments_product(
    first, second, x_ptr, weight_ptr, scale_ptr, zero_ptr, rows, real, num_rows, stride_x,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_WORDS: tl.constexpr, UNPACK_WORD: tl.constexpr,
    WORDS: tl.constexpr, BLOCK_M: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """``x @ W[rows].T``, transposed: float32 ``[CHANNELS, BLOCK_M]``; ``x``: bfloat16.

    Two tiles of weights are on their way while one is multiplied, and one of the input. ``WORDS``: of a channel's tile
    a thread. ``first``, ``second``: what :func:`first_tiles` loaded.
    """
    TILES: tl.constexpr = IN_FEATURES // _TILE
    HAS_SCALES: tl.constexpr = scale_ptr is not None and GROUP_SIZE >= _TILE
    NUMBER: tl.constexpr = 0 if scale_ptr is None or (HAS_SCALES and zero_ptr is None) else 2 * WORDS + 2 * HAS_SCALES
    low, high = channels_of_threads(rows, real, WARPS)
    warp = tl.arange(0, 32 * WARPS) // 32
    none = tl.zeros([32 * WARPS], tl.float32)
    sums = (none, none, none, none)
    sums_of_others = sums  # rows 8 .. 15
    x = load_inputs(x_ptr, warp, num_rows, stride_x, TILES, WORDS, BLOCK_M)
    # After three rounds registers have their names again: nothing is copied, which would wait for what was loaded.
    for start in tl.range(0, TILES, WARPS, loop_unroll_factor=3):
        tile = warp + start
        third = load_weights(
            weight_ptr, scale_ptr, zero_ptr, low, high, tile + 2 * WARPS, IN_FEATURES, GROUP_SIZE, LOAD_WORDS
        )
        next_x = load_inputs(x_ptr, tile + WARPS, num_rows, stride_x, TILES, WORDS, BLOCK_M)
        loads_before()
        sums = add_tile(sums, first, x, HAS_SCALES, NUMBER, UNPACK_WORD, WORDS)
        if BLOCK_M == 16:
            sums_of_others = add_tile(sums_of_others, first, x[16:], HAS_SCALES, NUMBER, UNPACK_WORD, WORDS)
        first, second, x = second, third, next_x
    y = _gathered(sums, WARPS)
    if BLOCK_M == 16:
        y = tl.reshape(tl.permute(tl.join(y, _gathered(sums_of_others, WARPS)), [0, 2, 1]), [16, 16])
    return y


@triton.jit
def _gathered(sums, WARPS: tl.constexpr):
    """What threads hold, added over warps: ``[16, 8]``."""
    low = tl.join(_over_warps(sums[0], WARPS), _over_warps(sums[1], WARPS))
    high = tl.join(_over_warps(sums[2], WARPS), _over_warps(sums[3], WARPS))
    return tl.reshape(tl.permute(tl.reshape(tl.join(low, high), [8, 8, 2]), [2, 0, 1]), [16, 8])


@triton.jit
def _over_warps(value, WARPS: tl.constexpr):
    return tl.reshape(tl.sum(tl.reshape(value, [WARPS, 32]), 0), [8, 4])
