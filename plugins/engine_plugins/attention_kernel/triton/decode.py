"""Split-KV attention: decode rows, verification of drafts, and chunks too small to fill the device.

With few queries there are few query tiles, and one tile's keys are far too much work for one multiprocessor. So the
keys of a query tile are dealt out to ``num_splits`` programs (Flash-Decoding), and ``reduce.py`` merges their
results. The grid depends on the batch's shape only, all lengths are read on the device: a captured launch stays
right while the sequences grow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine_plugins.attention_kernel.triton.tile_ops import (
    dim_mask,
    fold_tile,
    key_range,
    query_offsets,
    query_tile,
)


@triton.jit(
    do_not_specialize=["num_splits", "stride_table", "window"],
    do_not_specialize_on_alignment=["tiles_ptr", "table_ptr", "q_starts_ptr", "kv_lens_ptr"],
)
def split_attention(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, part_ptr, lse_ptr,
    tiles_ptr, table_ptr, q_starts_ptr, kv_lens_ptr,
    num_splits, stride_table, window,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_block, stride_slot, stride_head,
    scale, soft_cap,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, SPLIT: tl.constexpr,
    SCALE: tl.constexpr, LOAD_TILE: tl.constexpr,
):  # fmt: skip
    """Program ``(tile * NUM_KV_HEADS + kv_head, split)``.

    ``SPLIT``: writes the normalised part ``[BLOCK_M, BLOCK_D]`` float32 and its base-2 log-sum-exp ``[BLOCK_M]``
    (-inf when no key of this split is seen); else writes the output itself.
    """
    program, split = tl.program_id(0), tl.program_id(1)
    kv_head = program % NUM_KV_HEADS
    row, start, first_token, q_len, kv_len = query_tile(tiles_ptr, q_starts_ptr, kv_lens_ptr, program // NUM_KV_HEADS)
    if start >= q_len * GROUP:  # this row has fewer queries than the launch was made for
        return
    packed = start + tl.arange(0, BLOCK_M)
    real = (packed < q_len * GROUP)[:, None] & dim_mask(BLOCK_D, HEAD_DIM)[None, :]
    at = query_offsets(first_token, kv_head, packed, stride_qt, stride_qh, GROUP, BLOCK_D)
    q = tl.load(q_ptr + at, mask=real, other=0.0)
    positions = kv_len - q_len + packed // GROUP

    low, high, _ = key_range(start, q_len, kv_len, window, GROUP, BLOCK_M, HAS_WINDOW)
    first_tile, end_tile = low // BLOCK_N, tl.cdiv(high, BLOCK_N)
    if SPLIT:
        share = tl.cdiv(end_tile - first_tile, num_splits)
        first_tile = first_tile + split * share
        end_tile = tl.minimum(first_tile + share, end_tile)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_table = table_ptr + row.to(tl.int64) * stride_table
    for tile in range(first_tile, end_tile):
        acc, row_max, row_sum = fold_tile(
            acc, row_max, row_sum, q, positions,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, row_table, kv_head, tile * BLOCK_N, high,
            stride_block, stride_slot, stride_head, scale, soft_cap, window,
            True, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, BLOCK_D, HAS_WINDOW, HAS_CAP, SCALE, LOAD_TILE,
        )  # fmt: skip

    empty = row_sum == 0.0
    result = acc / tl.where(empty, 1.0, row_sum)[:, None]
    if SPLIT:
        part = (program * num_splits + split).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(part_ptr + part[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], result)
        lse = tl.where(empty, float("-inf"), row_max + tl.log2(tl.where(empty, 1.0, row_sum)))
        tl.store(lse_ptr + part, lse)
    else:
        at = query_offsets(first_token, kv_head, packed, stride_ot, stride_oh, GROUP, BLOCK_D)
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=real)
