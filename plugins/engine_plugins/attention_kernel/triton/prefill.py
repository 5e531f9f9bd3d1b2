"""Attention of long prefill chunks: one program per query tile and kv head walks over all keys the tile sees.

Large query tiles make this compute-bound, so the loop is in two parts: key tiles that every query sees need no mask;
the diagonal (and, with a window or chunks, every tile) does. Key tiles that no query sees are never visited.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.tile_ops import start_dependents, wait_for_input
from engine_plugins.attention_kernel.triton.tile_ops import (
    dim_mask,
    fold_tile,
    head_scale,
    key_range,
    lengths_of,
    load_queries,
    log_sum_exp,
    positions_of,
    query_offsets,
    start_state,
    store_sums,
    tile_of,
)


@triton.jit(
    do_not_specialize=["stride_table", "reach"],
    do_not_specialize_on_alignment=[
        "sinks_ptr",
        "tiles_ptr",
        "table_ptr",
        "q_starts_ptr",
        "kv_lens_ptr",
        "ends_ptr",
    ],
)
def chunk_attention(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, out_ptr, sums_ptr,
    tiles_ptr, table_ptr, q_starts_ptr, kv_lens_ptr, ends_ptr,
    stride_table, reach,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_block, stride_slot, stride_head,
    scale, soft_cap,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, REACH: tl.constexpr, HAS_CAP: tl.constexpr,
    SCALE: tl.constexpr, LOAD_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program ``(kv_head, tile)``: kv heads vary fastest, so that the heaviest tiles, listed first, start first.
    ``sums_ptr``, ``ends_ptr``: as of :func:`~engine_plugins.attention_kernel.triton.decode.split_attention`."""
    start_dependents(PDL)
    kv_head = tl.program_id(0)
    row, start = tile_of(tiles_ptr, tl.program_id(1))
    first_token, q_len, kv_len = lengths_of(row, q_starts_ptr, kv_lens_ptr)
    wait_for_input(PDL)
    if start >= q_len * GROUP:
        return
    packed = start + tl.arange(0, BLOCK_M)
    q, q_rest = load_queries(
        q_ptr, first_token, kv_head, packed, q_len * GROUP, stride_qt, stride_qh,
        GROUP, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_R,
    )  # fmt: skip
    positions = positions_of(ends_ptr, packed, first_token, q_len, kv_len, GROUP)
    scale *= head_scale(k_scale_ptr, kv_head, SCALE)

    low, high, first_position = key_range(ends_ptr, start, first_token, q_len, kv_len, reach, GROUP, BLOCK_M, REACH)
    first_tile, end_tile = low // BLOCK_N, tl.cdiv(high, BLOCK_N)
    masked_from = first_tile
    if REACH == "full":
        masked_from = (first_position + 1) // BLOCK_N

    acc, row_max, row_sum = start_state(sinks_ptr, kv_head, packed, True, GROUP, BLOCK_M, BLOCK_D)
    row_table = table_ptr + row.to(tl.int64) * stride_table
    if REACH == "full":
        for tile in range(first_tile, masked_from):
            acc, row_max, row_sum = fold_tile(
                acc, row_max, row_sum, q, q_rest, positions,
                k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, row_table, kv_head, tile * BLOCK_N, low, high,
                stride_block, stride_slot, stride_head, scale, soft_cap, reach,
                False, HEAD_DIM, VALUE_DIM, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_R,
                REACH, HAS_CAP, SCALE, LOAD_TILE,
            )  # fmt: skip
    for tile in range(masked_from, end_tile):
        acc, row_max, row_sum = fold_tile(
            acc, row_max, row_sum, q, q_rest, positions,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, row_table, kv_head, tile * BLOCK_N, low, high,
            stride_block, stride_slot, stride_head, scale, soft_cap, reach,
            True, HEAD_DIM, VALUE_DIM, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_R,
            REACH, HAS_CAP, SCALE, LOAD_TILE,
        )  # fmt: skip

    # Read once more: kept for so long, they would not leave the loops registers enough on 8.0 and 8.9.
    first_token, q_len, _ = lengths_of(row, q_starts_ptr, kv_lens_ptr)
    packed = start + tl.arange(0, BLOCK_M)
    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None] * head_scale(v_scale_ptr, kv_head, SCALE)
    real = (packed < q_len * GROUP)[:, None] & dim_mask(BLOCK_D, VALUE_DIM)[None, :]
    at = query_offsets(first_token, kv_head, packed, stride_ot, stride_oh, GROUP, BLOCK_D)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=real)
    if sums_ptr is not None:
        sums = log_sum_exp(row_max, row_sum)
        store_sums(sums_ptr, sums, first_token, kv_head, packed, q_len * GROUP, GROUP, NUM_KV_HEADS)
