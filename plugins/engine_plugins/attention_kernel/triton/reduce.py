"""Merge the parts that split-KV programs left behind, in a fixed order and without atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from engine_plugins.attention_kernel.triton.tile_ops import dim_mask, query_tile


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["tiles_ptr", "q_starts_ptr", "kv_lens_ptr"],
)
def merge_splits(
    out_ptr, part_ptr, lse_ptr, tiles_ptr, q_starts_ptr, kv_lens_ptr,
    num_splits, stride_ot, stride_oh,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program ``(tile * NUM_KV_HEADS + kv_head, packed query of the tile)``.

    Always reduces ``MAX_SPLITS`` lanes, unused ones being weightless, so that one compiled kernel serves any
    number of splits and the order of additions depends on the lane alone.
    """
    program, query = tl.program_id(0), tl.program_id(1)
    kv_head = program % NUM_KV_HEADS
    _, start, first_token, q_len, _ = query_tile(tiles_ptr, q_starts_ptr, kv_lens_ptr, program // NUM_KV_HEADS)
    packed = start + query
    if packed >= q_len * GROUP:
        return
    split = tl.arange(0, MAX_SPLITS)
    part = (program * num_splits + split).to(tl.int64) * BLOCK_M + query
    lse = tl.load(lse_ptr + part, mask=split < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    dims = tl.arange(0, BLOCK_D)
    values = tl.load(part_ptr + part[:, None] * BLOCK_D + dims[None, :], mask=(weight > 0.0)[:, None], other=0.0)
    total = tl.sum(weight, 0)
    merged = tl.sum(values * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    token = (first_token + packed // GROUP).to(tl.int64)
    at = token * stride_ot + (kv_head * GROUP + packed % GROUP) * stride_oh + dims
    tl.store(out_ptr + at, merged.to(out_ptr.dtype.element_ty), mask=dim_mask(BLOCK_D, HEAD_DIM))
