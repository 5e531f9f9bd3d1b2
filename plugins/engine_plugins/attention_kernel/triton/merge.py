"""Merge the parts of a query tile whose keys were dealt out to several programs."""

from __future__ import annotations

import triton
import triton.language as tl

from engine_plugins.attention_kernel.triton.tile_ops import dim_mask, query_offsets, store_sums


@triton.jit
def merge_parts(
    out_ptr, sums_ptr, part_ptr, lse_ptr, program, live, num_splits,
    start, num_packed, first_token, kv_head, stride_ot, stride_oh,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, LANES: tl.constexpr, MERGE_M: tl.constexpr,
):  # fmt: skip
    """Write the output of packed queries ``start .. min(start + BLOCK_M, num_packed)`` from ``live`` parts.

    Always reduces ``LANES`` parts, those that do not exist being weightless, so the order of additions depends on
    the index of a part alone. ``MERGE_M`` queries at a time: as many as keep all their parts' loads in flight at
    once. Parts lie along the first axis, which Triton gives to one thread: no exchange between threads.
    """
    lane = tl.arange(0, LANES)
    dims = tl.arange(0, BLOCK_D)
    for begin in range(0, tl.minimum(num_packed - start, BLOCK_M), MERGE_M):
        query = begin + tl.arange(0, MERGE_M)
        wanted = (lane < live)[:, None] & (start + query < num_packed)[None, :]
        # Within a tile's scratch 32 bits reach far; the tile itself may lie past 2**31 elements.
        row = lane[:, None] * BLOCK_M + query[None, :]
        base = (program * num_splits).to(tl.int64) * BLOCK_M
        lse = tl.load(lse_ptr + base + row, mask=wanted, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            part_ptr + base * BLOCK_D + (row[:, :, None] * BLOCK_D + dims[None, None, :]),
            mask=wanted[:, :, None] & dim_mask(BLOCK_D, VALUE_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        top = tl.max(lse, 0)
        weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top)[None, :])
        total = tl.sum(weight, 0)
        merged = tl.sum(values * weight[:, :, None], 0) / tl.where(total == 0.0, 1.0, total)[:, None]
        packed = start + query
        at = query_offsets(first_token, kv_head, packed, stride_ot, stride_oh, GROUP, BLOCK_D)
        real = (packed < num_packed)[:, None] & dim_mask(BLOCK_D, VALUE_DIM)[None, :]
        tl.store(out_ptr + at, merged.to(out_ptr.dtype.element_ty), mask=real)
        if sums_ptr is not None:
            sums = top + tl.log2(tl.where(total == 0.0, 1.0, total))  # without a key top is -inf
            store_sums(sums_ptr, sums, first_token, kv_head, packed, num_packed, GROUP, NUM_KV_HEADS)
