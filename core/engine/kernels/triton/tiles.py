"""How the columns of a product are dealt out to programs. Plain arithmetic from shapes and the device.

Programs never share a column: no partial sums, no atomics, one order of additions. Each has whole 16-byte loads along
the input axis. Which tile is fastest was measured on an H100 in chains of a model's products
(``tools/gpu_check --only tiles``, ``docs/measured.md``); the rules below are the simplest that have most of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from engine.kernels.triton.fragments import CHANNELS, TILE

MAX_ROWS = 16
"""Rows the fused kernels serve: one tensor-core tile. Beyond, torch multiplies plain weights."""
MOST_ROWS = 64
"""Rows that packed weights are multiplied by while they are read once, without a norm."""
GROUPED_ROWS = 64
"""Rows of an expert that share one reading of its weights, where every expert has many."""
PROGRAMS_PER_SM = 1.9
"""Programs wanted per multiprocessor for one row. A little under two: 256 programs on 132 multiprocessors are enough.
More rows have tiles of their own, whatever that makes (see ``__init__.py``)."""
MANY_PROGRAMS_PER_SM = 8
"""From so many on wider tiles of packed weights lose no parallelism."""
LONG, LONGER = 4096, 8192
"""Input features from which a row's programs have twice the threads, and from which several rows' tiles are longer."""


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """Compile-time sizes of a launch: ``block_n`` columns of the output, ``block_k`` of the input at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    in_words: bool = False
    """Tensor cores multiply words as they were loaded (``fragments.py``)."""

    def programs(self, out_features: int) -> int:
        """Programs that compute ``out_features`` columns."""
        return -(-out_features // self.block_n)


@cache
def skinny_tile(
    rows: int,
    out_features: int,
    in_features: int,
    num_sms: int,
    bits: int,
    is_normed: bool = False,
    has_words: bool = False,
) -> SkinnyTile:
    """The tile for ``rows`` of ``[rows, in_features] -> [rows, out_features]``, at most 16, of packed weights and
    without a norm at most 64; ``bits`` of a weight; ``is_normed``: the kernel norms its input; ``has_words``: tensor
    cores could multiply words, which then they do up to 16 rows.

    Depends on ``rows`` by its class only (1, to 16, to 32, to 64; of words to 8, to 16), so that few compilations serve
    every batch.
    """
    assert 1 <= rows <= (MAX_ROWS if is_normed else MOST_ROWS), f"{rows} rows"
    many = out_features >= MANY_PROGRAMS_PER_SM * num_sms * 64
    if has_words and rows <= MAX_ROWS:
        num_warps = 4 if out_features >= MANY_PROGRAMS_PER_SM * num_sms * CHANNELS else 8
        return SkinnyTile(8 if rows <= 8 else MAX_ROWS, CHANNELS, TILE * num_warps, num_warps, 1, in_words=True)
    if rows == 1:
        block_n, block_k, num_warps, num_stages = _one_row(out_features, in_features, num_sms, bits)
        block_m = 1
    elif rows > MAX_ROWS:
        block_m = 2 * MAX_ROWS if rows <= 2 * MAX_ROWS else MOST_ROWS
        block_n, block_k, num_warps, num_stages = 64, 64, 4, 4
    else:
        block_m = MAX_ROWS
        block_n, block_k, num_warps, num_stages = _few_rows(in_features, bits, is_normed, many)
    block_k = _at_most(in_features, block_k)
    return SkinnyTile(block_m, block_n, block_k, _fed(num_warps, block_n * block_k), num_stages)


def _few_rows(in_features: int, bits: int, is_normed: bool, many: bool) -> tuple[int, int, int, int]:
    """Columns, inputs, warps and stages for 2 to 16 rows.

    Every program norms the rows for itself: 64 columns share that, which is worth more than a full device. With 4 bits
    wide tiles are the faster ones of large products, too.
    """
    narrow, wide = (16, 128, 2, 5), (64, 128, 4, 4)
    if bits == 16 and is_normed:
        return 64, 256, 4, 2
    if bits == 16:
        return (16, 256, 2, 4) if in_features >= LONGER else wide
    if bits == 4:
        return wide if is_normed or in_features >= LONGER else narrow
    return wide if bits == 8 and many else narrow


def mix_tile(top_k: int, in_features: int, bits: int) -> SkinnyTile:
    """The tile for 8 columns of ``top_k`` experts with an input of their own each (its rows are the experts)."""
    weights, num_warps = (4096, 4) if bits >= 16 else (8192, 8)
    block_p = 1 << (top_k - 1).bit_length()
    block_k = _at_most(in_features, max(32, weights // (8 * block_p)))
    return SkinnyTile(block_p, 8, block_k, _fed(num_warps, block_p * 8 * block_k), 1)


def grouped_tile(in_features: int) -> SkinnyTile:
    """The tile for ``GROUPED_ROWS`` rows in 16 bits, bound by tensor cores and by what the L2 cache delivers. No spills
    on compute capability 8.0, 8.9 and 9.0; at most 96 KB of shared memory."""
    return SkinnyTile(GROUPED_ROWS, 128, _at_most(in_features, 64), 8, 3)


def _one_row(out_features: int, in_features: int, num_sms: int, bits: int) -> tuple[int, int, int, int]:
    """Columns, inputs, warps and stages for one row. Products are summed in registers: a thread has 32 weights of a
    tile, or 16 of a long input with many columns; 64 of 4 bits."""
    programs = -(-out_features // 16)
    if bits == 4:
        return (16, 512, 4, 1) if programs >= MANY_PROGRAMS_PER_SM * num_sms else (8, 1024, 4, 1)
    block_n = 16 if programs >= PROGRAMS_PER_SM * num_sms else 8
    if bits == 8:
        return block_n, 8192 // block_n, 8, 1
    if in_features >= LONG:
        return (16, 256, 8, 1) if block_n == 16 else (8, 1024, 8, 1)
    return block_n, 4096 // block_n, 4, 1


def _fed(num_warps: int, weights: int) -> int:
    """At most as many warps as have eight weights for each thread: four-bit codes are unpacked eight at a time, and a
    thread with fewer would unpack what is not there."""
    return max(1, min(num_warps, weights // (8 * 32)))


def _at_most(in_features: int, block_k: int) -> int:
    """``block_k``, or for short inputs the power of two that holds them (32 at least: a dot of 8-bit values)."""
    return min(block_k, max(32, 1 << (in_features - 1).bit_length()))
