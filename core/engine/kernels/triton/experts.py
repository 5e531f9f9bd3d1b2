"""Mixtures of experts: the kernels of ``skinny.py`` on the rows of a weight that belong to one expert.

All experts of a layer are one weight, ``[num_experts * out, in]``, read by the tile loader of its format: an expert is
a range of rows. Few pairs of a token and an expert are computed one by one; many are sorted by expert first, in tiles
of pairs of one expert. Where ranks share out the experts, a pair whose expert is another rank's has the id -1: nothing
is read or computed for it, and it adds nothing to its token's sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.product import first_weights, folding, normed_product, scaled_sums, unpacked
from engine.kernels.triton.tile_ops import below, gated, paired_rows, split_pairs, start_dependents, wait_for_input


@triton.jit
def expert_gate(
    x_ptr, norm_ptr, first_ptr, count_ptr, expert_ptr,
    weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, out_ptr,
    stride_x, rows_per_x, eps,
    IN_FEATURES: tl.constexpr, SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    OFFSET: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``gated(gate, up)`` of pairs of a token and an expert, ``[num_pairs, SIZE]``. Program ``(tile, columns)``.

    Tile ``t`` has the pairs from ``first[t]`` on, ``count[t]`` of them, of expert ``expert[t]``, negative for none.
    Pair ``p`` reads row ``p // rows_per_x`` of ``x``, with ``norm_ptr`` its RMSNorm. Without ``first_ptr`` a tile is
    one pair, its own number.
    """
    start_dependents(PDL)
    wait_for_input(PDL)
    PAIRS: tl.constexpr = BLOCK_N // 2
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert >= 0:
        first, count = tile, 1
        if first_ptr is not None:
            first, count = tl.load(first_ptr + tile), tl.load(count_ptr + tile)
        pair, which = paired_rows(tl.program_id(1), PAIRS)
        weight_row = expert.to(tl.int64) * (2 * SIZE) + pair + which * SIZE
        real = below(pair, SIZE, PAIRS)
        weights = first_weights(
            weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, weight_row, real,
            IN_FEATURES, GROUP_SIZE, LOAD_TILE, 0, x_ptr.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        y = normed_product(
            weights, x_ptr + (first // rows_per_x).to(tl.int64) * stride_x, norm_ptr,
            weight_ptr, scale_ptr, zero_ptr, weight_row, real, count, stride_x, eps,
            IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, 0, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        gate, up = split_pairs(y, PAIRS, BLOCK_M)
        column, row = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, BLOCK_M)
        at = (first + row).to(tl.int64)[None, :] * SIZE + column[:, None]
        mask = below(column, SIZE, PAIRS)[:, None] & (row < count)[None, :]
        made = gated(gate, up, ACT, LIMIT, ALPHA, OFFSET)
        tl.store(out_ptr + at, made.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def expert_down(
    x_ptr, order_ptr, first_ptr, count_ptr, expert_ptr,
    weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, out_ptr,
    IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products of sorted pairs, float32 ``[num_pairs, OUT_FEATURES]``, each at its own number, which ``order`` has;
    tiles as in :func:`expert_gate`."""
    start_dependents(PDL)
    wait_for_input(PDL)
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert >= 0:
        first, count = tl.load(first_ptr + tile), tl.load(count_ptr + tile)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        weight_row, real = expert.to(tl.int64) * OUT_FEATURES + column, below(column, OUT_FEATURES, BLOCK_N)
        weights = first_weights(
            weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, weight_row, real,
            IN_FEATURES, GROUP_SIZE, LOAD_TILE, 0, x_ptr.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        y = normed_product(
            weights, x_ptr + first.to(tl.int64) * IN_FEATURES, None,
            weight_ptr, scale_ptr, zero_ptr, weight_row, real, count, IN_FEATURES, 0.0,
            IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, 0, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        row = tl.arange(0, BLOCK_M)
        pair = tl.load(order_ptr + first + row, mask=row < count, other=0)
        at = pair.to(tl.int64)[None, :] * OUT_FEATURES + column[:, None]
        tl.store(out_ptr + at, y, mask=real[:, None] & (row < count)[None, :])


@triton.jit
def mix_rows(
    made_ptr, id_ptr, share_ptr, residual_ptr, out_ptr,
    TOP_K: tl.constexpr, OUT_FEATURES: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``(residual +) sum over a token's experts of share * product``: ``made [num_tokens * TOP_K, OUT_FEATURES]``, the
    rest as in :func:`expert_mix`. Program ``(token, block of columns)``. ``id_ptr``: int64 ``[num_tokens, TOP_K]``, of
    whose pairs those with negative ids are left out; ``None``: there are none."""
    start_dependents(PDL)
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = below(column, OUT_FEATURES, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(TOP_K):
        pair, real = token * TOP_K + place, mask
        if id_ptr is not None:
            real = mask & (tl.load(id_ptr + pair) + tl.zeros([BLOCK], tl.int64) >= 0)
        product = tl.load(share_ptr + pair) * tl.load(made_ptr + pair * OUT_FEATURES + column, mask=real, other=0.0)
        if id_ptr is not None:
            product = tl.where(real, product, 0.0)
        total += product
    add_and_store(total, residual_ptr, out_ptr, token * OUT_FEATURES + column, mask)


@triton.jit
def add_and_store(total, residual_ptr, out_ptr, at, mask):
    """As in torch, a mixture is rounded before it is added."""
    total = total.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        kept = tl.load(residual_ptr + at, mask=mask, other=0.0)
        total = (kept.to(tl.float32) + total.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, mask=mask)


@triton.jit
def expert_ids(id_ptr, pair, num_pairs, BLOCK_E: tl.constexpr):
    """Experts of pairs, int32: ``BLOCK_E``, after all others, of another rank's and of a pair that does not exist."""
    ids = tl.load(id_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    return tl.where(ids < 0, BLOCK_E, ids)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_pairs(
    id_ptr, order_ptr, token_ptr, first_ptr, count_ptr, expert_ptr, num_pairs, num_tiles,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Pairs in the order of their experts, each with its token, and tiles of at most ``TILE`` of them: first pair,
    count and expert (-1: none), all int64. Pairs of other ranks' experts come last and are in no tile. Program 0 makes
    the tiles; program ``1 + i`` finds the places of the pairs from ``i * BLOCK`` on, by comparing them with all
    others."""
    start_dependents(PDL)
    wait_for_input(PDL)
    program, lane = tl.program_id(0), tl.arange(0, BLOCK)
    if program == 0:
        expert = tl.arange(0, BLOCK_E)
        counts = tl.zeros([BLOCK_E], tl.int32)
        for start in range(0, num_pairs, BLOCK):
            ids = expert_ids(id_ptr, start + lane, num_pairs, BLOCK_E)
            counts += tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), 0)
        tiles = (counts + TILE - 1) // TILE
        begins, tile_ends = tl.cumsum(counts, 0) - counts, tl.cumsum(tiles, 0)
        for start in range(0, num_tiles, BLOCK):
            tile = start + lane
            here = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), 1)
            mine = expert[None, :] == here[:, None]
            after = tl.sum(tl.where(mine, (tiles - tile_ends)[None, :], 0), 1) + tile
            count = tl.minimum(tl.sum(tl.where(mine, counts[None, :], 0), 1) - after * TILE, TILE)
            first = tl.sum(tl.where(mine, begins[None, :], 0), 1) + after * TILE
            real = here < NUM_EXPERTS
            tl.store(first_ptr + tile, tl.where(real, first, 0).to(tl.int64), mask=tile < num_tiles)
            tl.store(count_ptr + tile, tl.where(real, count, 0).to(tl.int64), mask=tile < num_tiles)
            tl.store(expert_ptr + tile, tl.where(real, here, -1).to(tl.int64), mask=tile < num_tiles)
    else:
        pair = (program - 1) * BLOCK + lane
        mine = expert_ids(id_ptr, pair, num_pairs, BLOCK_E)
        place = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_pairs, BLOCK):
            other = start + lane
            ids = expert_ids(id_ptr, other, num_pairs, BLOCK_E)[None, :]
            earlier = (ids < mine[:, None]) | ((ids == mine[:, None]) & (other[None, :] < pair[:, None]))
            place += tl.sum(earlier.to(tl.int32), 1)
        tl.store(order_ptr + place, pair.to(tl.int64), mask=pair < num_pairs)
        tl.store(token_ptr + place, (pair // TOP_K).to(tl.int64), mask=pair < num_pairs)


@triton.jit
def pair_products(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, pair, rows, real,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``sum(x[pair] * weight[rows])``, float32 ``[BLOCK]``: each row has an input of its own, a row of ``x``.
    Two tiles of weights are on their way while one is multiplied."""
    LAST: tl.constexpr = (IN_FEATURES - 1) // BLOCK_K * BLOCK_K
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK_K)[None, :]
    x_ptr += pair.to(tl.int64)[:, None] * IN_FEATURES + column
    tile = LOAD_TILE(weight_ptr, scale_ptr, zero_ptr, rows, real, 0, IN_FEATURES, GROUP_SIZE, BLOCK_K, DTYPE)
    second = tile
    if LAST > 0:
        second = LOAD_TILE(
            weight_ptr, scale_ptr, zero_ptr, rows, real, BLOCK_K, IN_FEATURES, GROUP_SIZE, BLOCK_K, DTYPE
        )
    FOLD: tl.constexpr = folding(GROUP_SIZE, TILE_SCALE)
    acc = tl.zeros([rows.shape[0], BLOCK_K // FOLD], tl.float32)
    for start in range(0, LAST - BLOCK_K, BLOCK_K):
        third = LOAD_TILE(
            weight_ptr, scale_ptr, zero_ptr, rows, real, start + 2 * BLOCK_K, IN_FEATURES, GROUP_SIZE, BLOCK_K, DTYPE
        )
        x = tl.load(x_ptr + start, mask=real[:, None], other=0.0).to(tl.float32)
        acc += scaled_sums(tile, unpacked(tile, UNPACK_TILE, tl.float32) * x, TILE_SCALE, FOLD)
        tile, second = second, third
    if LAST > 0:
        x = tl.load(x_ptr + (LAST - BLOCK_K), mask=real[:, None], other=0.0).to(tl.float32)
        acc += scaled_sums(tile, unpacked(tile, UNPACK_TILE, tl.float32) * x, TILE_SCALE, FOLD)
    mask = real[:, None] & below(LAST + column, IN_FEATURES, BLOCK_K)
    x = tl.load(x_ptr + LAST, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(acc + scaled_sums(second, unpacked(second, UNPACK_TILE, tl.float32) * x, TILE_SCALE, FOLD), 1)


@triton.jit
def expert_mix(
    x_ptr, expert_ptr, share_ptr, weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, residual_ptr, out_ptr,
    TOP_K: tl.constexpr, IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr,
    LOAD_TILE: tl.constexpr, UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, SOME: tl.constexpr,
    PDL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``(residual +) sum over a token's experts of share * product``. Program ``(token, block of columns)``: a tile of
    weights has its columns of all the token's experts, so that none is waited for after another.

    ``x_ptr``: ``[num_tokens * TOP_K, IN_FEATURES]``; ``expert_ptr``, ``share_ptr``: ``[num_tokens, TOP_K]``;
    ``residual_ptr`` (or ``None``) and ``out_ptr``: ``[num_tokens, OUT_FEATURES]``, contiguous, perhaps the same.
    ``SOME``: only some pairs are this rank's, the others have negative ids. ``BLOCK_P``: at least ``TOP_K``.
    """
    start_dependents(PDL)
    wait_for_input(PDL)
    token, lane = tl.program_id(0), tl.arange(0, BLOCK_P * BLOCK_N)
    place, column = lane // BLOCK_N, tl.program_id(1) * BLOCK_N + lane % BLOCK_N
    pair, real = token * TOP_K + place, below(place, TOP_K, BLOCK_P) & below(column, OUT_FEATURES, BLOCK_N)
    expert = tl.load(expert_ptr + pair, mask=real, other=0).to(tl.int64)
    if SOME:
        real &= expert >= 0
    rows = expert * OUT_FEATURES + column
    y = pair_products(
        x_ptr, weight_ptr, scale_ptr, zero_ptr, pair, rows, real,
        IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, BLOCK_K,
    )  # fmt: skip
    if channel_scale_ptr is not None:
        y *= tl.load(channel_scale_ptr + rows, mask=real, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=real, other=0.0).to(tl.float32)
    y *= tl.load(share_ptr + pair, mask=real, other=0.0)
    if SOME:
        y = tl.where(real, y, 0.0)
    total = tl.sum(tl.reshape(y, [BLOCK_P, BLOCK_N]), 0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at, mask = token.to(tl.int64) * OUT_FEATURES + column, below(column, OUT_FEATURES, BLOCK_N)
    add_and_store(total, residual_ptr, out_ptr, at, mask)
