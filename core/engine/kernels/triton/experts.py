"""Mixtures of experts: the kernels of ``skinny.py`` on the rows of a weight that belong to one expert.

All experts of a layer are one weight, ``[num_experts * out, in]``, read by the tile loader of its format: an expert is
a range of rows. Few pairs of a token and an expert are computed one by one; many are sorted by expert first, in tiles
of up to 16 pairs of one expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.product import normed_product
from engine.kernels.triton.tile_ops import activated, below, paired_rows, split_pairs, wait_for_input


@triton.jit
def expert_gate(
    x_ptr, first_ptr, count_ptr, expert_ptr,
    weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, out_ptr,
    stride_x, rows_per_x,
    IN_FEATURES: tl.constexpr, SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``act(gate) * up`` of pairs of a token and an expert, ``[num_pairs, SIZE]``. Program ``(tile, columns)``.

    Tile ``t`` has the pairs from ``first[t]`` on, ``count[t]`` of them, of expert ``expert[t]``, negative for none.
    Pair ``p`` reads row ``p // rows_per_x`` of ``x``. Without ``first_ptr`` a tile is one pair, its own number.
    """
    wait_for_input(PDL)
    PAIRS: tl.constexpr = BLOCK_N // 2
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert >= 0:
        first, count = tile, 1
        if first_ptr is not None:
            first, count = tl.load(first_ptr + tile), tl.load(count_ptr + tile)
        pair, which = paired_rows(tl.program_id(1), PAIRS)
        y = normed_product(
            x_ptr + (first // rows_per_x).to(tl.int64) * stride_x, None,
            weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr,
            expert.to(tl.int64) * (2 * SIZE) + pair + which * SIZE, below(pair, SIZE, PAIRS), count, stride_x, 0.0,
            IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, PDL, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        gate, up = split_pairs(y, PAIRS, BLOCK_M)
        column, row = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, BLOCK_M)
        at = (first + row).to(tl.int64)[None, :] * SIZE + column[:, None]
        mask = below(column, SIZE, PAIRS)[:, None] & (row < count)[None, :]
        tl.store(out_ptr + at, (activated(gate, ACT) * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def expert_down(
    x_ptr, first_ptr, count_ptr, expert_ptr,
    weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, out_ptr,
    IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products of sorted pairs, float32 ``[num_pairs, OUT_FEATURES]``; tiles as in :func:`expert_gate`."""
    wait_for_input(PDL)
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert >= 0:
        first, count = tl.load(first_ptr + tile), tl.load(count_ptr + tile)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        real = below(column, OUT_FEATURES, BLOCK_N)
        y = normed_product(
            x_ptr + first.to(tl.int64) * IN_FEATURES, None,
            weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr,
            expert.to(tl.int64) * OUT_FEATURES + column, real, count, IN_FEATURES, 0.0,
            IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, PDL, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        row = tl.arange(0, BLOCK_M)
        at = (first + row).to(tl.int64)[None, :] * OUT_FEATURES + column[:, None]
        tl.store(out_ptr + at, y, mask=real[:, None] & (row < count)[None, :])


@triton.jit
def expert_mix(
    x_ptr, expert_ptr, share_ptr, weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, residual_ptr, out_ptr,
    TOP_K: tl.constexpr, IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr,
    LOAD_TILE: tl.constexpr, UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``(residual +) sum over a token's experts of share * product``. Program ``(token, block of columns)``.

    ``x_ptr``: ``[num_tokens * TOP_K, IN_FEATURES]``; ``expert_ptr``, ``share_ptr``: ``[num_tokens, TOP_K]``;
    ``residual_ptr`` (or ``None``) and ``out_ptr``: ``[num_tokens, OUT_FEATURES]``, contiguous, perhaps the same.
    """
    wait_for_input(PDL)
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = below(column, OUT_FEATURES, BLOCK_N)
    total = tl.zeros([BLOCK_N, 1], tl.float32)
    for place in range(TOP_K):
        pair = token * TOP_K + place
        expert, share = tl.load(expert_ptr + pair), tl.load(share_ptr + pair)
        total += share * normed_product(
            x_ptr + pair.to(tl.int64) * IN_FEATURES, None,
            weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr,
            expert.to(tl.int64) * OUT_FEATURES + column, real, 1, IN_FEATURES, 0.0,
            IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, PDL, 1, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    at = token.to(tl.int64) * OUT_FEATURES + column[:, None]
    total = total.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        kept = tl.load(residual_ptr + at, mask=real[:, None], other=0.0)
        total = (kept.to(tl.float32) + total.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, mask=real[:, None])
