"""How the columns of a product are dealt out to programs. Plain arithmetic from shapes and the device.

Programs never share a column: no partial sums, no atomics, one order of additions. So a device is filled by small
tiles alone; the smallest still gives each program whole 16-byte loads along the input axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

MAX_ROWS = 16
"""Rows the skinny kernels serve: one tensor-core tile. Beyond, torch multiplies."""
GROUPED_ROWS = 64
"""Rows of an expert that share one reading of its weights, where every expert has many."""
PROGRAMS_PER_SM = 1.9
"""Programs wanted per multiprocessor for one row. A little under two: 256 programs on 132 multiprocessors are enough.
More rows have tiles of at least 16 columns, of 64 where they are normed, whatever that makes (see ``__init__.py``)."""


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """Compile-time sizes of a launch: ``block_n`` columns of the output, ``block_k`` of the input at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def programs(self, out_features: int) -> int:
        """Programs that compute ``out_features`` columns."""
        return -(-out_features // self.block_n)


@cache
def skinny_tile(
    rows: int, out_features: int, in_features: int, num_sms: int, bits: int, is_normed: bool = False
) -> SkinnyTile:
    """The tile for ``rows`` <= 16 rows of ``[rows, in_features] -> [rows, out_features]``; ``bits`` of a weight;
    ``is_normed``: the kernel norms its input.

    Depends on ``rows`` by its class only (1, 2 to 8, 9 to 16), so that three compilations serve every batch.
    """
    assert 1 <= rows <= MAX_ROWS, f"{rows} rows"
    if rows == 1:
        return _one_row(out_features, in_features, num_sms, bits)
    if is_normed and bits == 16:
        # Every program norms the rows for itself: 64 columns share that, which is worth more than a full device.
        return SkinnyTile(16, 64, _at_most(in_features, 64), 4, 5)
    # Nine rows and more read as many bytes of activations as of weights with 16 columns: share them among 32.
    wide = rows > 8 and -(-out_features // 32) >= num_sms
    block_k = _at_most(in_features, 128)
    # The two 8-wide halves of 16 rows are all the parallelism a tile of 16 columns has: more than two warps would
    # repeat each other's work.
    return SkinnyTile(16, 32, block_k, 4, 4) if wide else SkinnyTile(16, 16, block_k, 2, 5)


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


def _one_row(out_features: int, in_features: int, num_sms: int, bits: int) -> SkinnyTile:
    """Products summed in registers: a tile of 4096 weights is 32 per thread, of narrow weights twice as many."""
    block_n = 16 if -(-out_features // 16) >= PROGRAMS_PER_SM * num_sms else 8
    weights, num_warps = (4096, 4) if bits >= 16 else (8192, 8)
    block_k = _at_most(in_features, weights // block_n)
    return SkinnyTile(1, block_n, block_k, _fed(num_warps, block_n * block_k), 1)


def _fed(num_warps: int, weights: int) -> int:
    """At most as many warps as have eight weights for each thread: four-bit codes are unpacked eight at a time, and a
    thread with fewer would unpack what is not there."""
    return max(1, min(num_warps, weights // (8 * 32)))


def _at_most(in_features: int, block_k: int) -> int:
    """``block_k``, or for short inputs the power of two that holds them (32 at least: a dot of 8-bit values)."""
    return min(block_k, max(32, 1 << (in_features - 1).bit_length()))
