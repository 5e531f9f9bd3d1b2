"""Split-KV attention: decode rows, verification of drafts, and chunks too small to fill the device.

With few queries there are few query tiles, and one tile's keys are far too much work for one multiprocessor. So the
keys of a query tile are dealt out to ``num_splits`` programs (Flash-Decoding). The last of them to finish merges the
results of all, so attention is one launch. The grid depends on the batch's shape only, all lengths are read on the
device: a captured launch stays right while the sequences grow.

With dependent launch a program knows its keys before the kernel in front of it has ended, and has the first ones
brought into the L2 cache meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.arrival import arrive
from engine.kernels.triton.tile_ops import start_dependents, wait_for_input
from engine_plugins.attention_kernel.triton.merge import merge_parts
from engine_plugins.attention_kernel.triton.tile_ops import (
    dim_mask,
    fetch_tile,
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
    do_not_specialize=["num_splits", "stride_table", "reach"],
    do_not_specialize_on_alignment=[
        "sinks_ptr",
        "tiles_ptr",
        "table_ptr",
        "q_starts_ptr",
        "kv_lens_ptr",
        "ends_ptr",
    ],
)
def split_attention(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, out_ptr, sums_ptr, part_ptr, lse_ptr, arrived_ptr,
    tiles_ptr, table_ptr, q_starts_ptr, kv_lens_ptr, ends_ptr,
    num_splits, stride_table, reach,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_block, stride_slot, stride_head,
    scale, soft_cap,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, REACH: tl.constexpr, HAS_CAP: tl.constexpr, SPLIT: tl.constexpr,
    LANES: tl.constexpr, MERGE_M: tl.constexpr, SCALE: tl.constexpr, LOAD_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program ``(tile * NUM_KV_HEADS + kv_head, split)``; writes its tile's output, or helps to.

    ``SPLIT``: ``num_splits`` (at most ``LANES``) programs share a tile's keys. Those that find a key tile to do, the
    *live* ones, are counted alike by all from the lengths on the device; the others just end. A single live program
    writes the output; several leave normalised parts, float32 ``[BLOCK_M, BLOCK_D]``, and their base-2 log-sum-exp
    (-inf for queries that see none of the part's keys), and the last to arrive merges them. ``arrived_ptr``: int32,
    one per program of the first axis, 0 before and after. ``sums_ptr``: see :func:`store_sums`, or ``None``;
    ``ends_ptr``: see :func:`positions_of`.
    """
    start_dependents(PDL)
    program, split = tl.program_id(0), tl.program_id(1)
    kv_head = program % NUM_KV_HEADS
    row, start = tile_of(tiles_ptr, program // NUM_KV_HEADS)
    first_token, q_len, kv_len = lengths_of(row, q_starts_ptr, kv_lens_ptr)
    low, high, _ = key_range(ends_ptr, start, first_token, q_len, kv_len, reach, GROUP, BLOCK_M, REACH)
    first_tile, end_tile = low // BLOCK_N, tl.cdiv(high, BLOCK_N)
    live = 1
    if SPLIT:
        share = tl.maximum(tl.cdiv(end_tile - first_tile, num_splits), 1)
        live = tl.maximum(tl.cdiv(end_tile - first_tile, share), 1)
        first_tile = first_tile + split * share
        end_tile = tl.minimum(first_tile + share, end_tile)
    row_table = table_ptr + row.to(tl.int64) * stride_table
    # Fewer queries than the launch was made for, or no keys left for this split.
    is_idle = (start >= q_len * GROUP) | (split >= live)
    if PDL:
        fetch_tile(
            k_ptr, v_ptr, row_table, kv_head, first_tile * BLOCK_N, low, high, (first_tile < end_tile) & (not is_idle),
            stride_block, stride_slot, stride_head, VALUE_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    wait_for_input(PDL)
    if is_idle:
        return
    packed = start + tl.arange(0, BLOCK_M)
    q, q_rest = load_queries(
        q_ptr, first_token, kv_head, packed, q_len * GROUP, stride_qt, stride_qh,
        GROUP, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_R,
    )  # fmt: skip
    positions = positions_of(ends_ptr, packed, first_token, q_len, kv_len, GROUP)
    scale *= head_scale(k_scale_ptr, kv_head, SCALE)

    acc, row_max, row_sum = start_state(sinks_ptr, kv_head, packed, split == 0, GROUP, BLOCK_M, BLOCK_D)
    for tile in range(first_tile, end_tile):
        acc, row_max, row_sum = fold_tile(
            acc, row_max, row_sum, q, q_rest, positions,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, row_table, kv_head, tile * BLOCK_N, low, high,
            stride_block, stride_slot, stride_head, scale, soft_cap, reach,
            True, HEAD_DIM, VALUE_DIM, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_R,
            REACH, HAS_CAP, SCALE, LOAD_TILE,
        )  # fmt: skip

    real = (packed < q_len * GROUP)[:, None] & dim_mask(BLOCK_D, VALUE_DIM)[None, :]
    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None] * head_scale(v_scale_ptr, kv_head, SCALE)
    if live == 1:
        at = query_offsets(first_token, kv_head, packed, stride_ot, stride_oh, GROUP, BLOCK_D)
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=real)
        if sums_ptr is not None:
            sums = log_sum_exp(row_max, row_sum)
            store_sums(sums_ptr, sums, first_token, kv_head, packed, q_len * GROUP, GROUP, NUM_KV_HEADS)
    if live > 1:
        part = (program * num_splits + split).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(part_ptr + part[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], result, mask=real)
        tl.store(lse_ptr + part, log_sum_exp(row_max, row_sum), mask=packed < q_len * GROUP)
        if arrive(arrived_ptr + program) == live - 1:
            merge_parts(
                out_ptr, sums_ptr, part_ptr, lse_ptr, program, live, num_splits,
                start, q_len * GROUP, first_token, kv_head, stride_ot, stride_oh,
                GROUP, NUM_KV_HEADS, VALUE_DIM, BLOCK_M, BLOCK_D, LANES, MERGE_M,
            )  # fmt: skip
            tl.store(arrived_ptr + program, 0)
