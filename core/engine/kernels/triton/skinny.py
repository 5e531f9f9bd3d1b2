"""The skinny kernels: :func:`~engine.kernels.triton.product.normed_product` and what follows it in the op.

Each starts its successor, loads the first weights, waits for its predecessor, loads what it needs after the product, so
that this is there by then, and multiplies. All take the arguments of the product first. ``num_rows`` is not specialised
on, nor is where a step's slots lie in memory: the same compilation serves every number of rows of a tile's class, and
nothing compiles while serving.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.heads import layer_scales, pair_columns, rotated_pairs, rotations, store_heads
from engine.kernels.triton.product import first_weights, normed_product
from engine.kernels.triton.tile_ops import (
    activated,
    below,
    best_of,
    paired_rows,
    split_pairs,
    start_dependents,
    wait_for_input,
)


@triton.jit(do_not_specialize=["num_rows"])
def linear_store(
    x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, out_ptr,
    num_rows, stride_x, stride_out, eps,
    IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, WORDS: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out = norm(x) @ W.T + bias``, or ``out += ...`` (``ADD``) with one rounding. Program ``block of columns``."""
    start_dependents(PDL)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row, real = column.to(tl.int64), below(column, OUT_FEATURES, BLOCK_N)
    early = first_weights(
        weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, weight_row, real,
        IN_FEATURES, GROUP_SIZE, LOAD_TILE, WORDS, x_ptr.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    wait_for_input(PDL)
    row = tl.arange(0, BLOCK_M)
    at = row.to(tl.int64)[None, :] * stride_out + column[:, None]
    mask = real[:, None] & (row < num_rows)[None, :]
    residual = tl.zeros(mask.shape, tl.float32)
    # Kept beside the tiles of several rows it would spill.
    if ADD and BLOCK_M == 1:
        residual = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = normed_product(
        early, x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, weight_row, real,
        num_rows, stride_x, eps, IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, WORDS,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if ADD and BLOCK_M > 1:
        residual = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y += residual
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def linear_gate(
    x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, out_ptr,
    num_rows, stride_x, stride_out, eps,
    IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, WORDS: tl.constexpr,
    ACT: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``act(gate) * up`` ``[num_rows, OUT_FEATURES / 2]`` of a weight with all gates first.

    A program computes the same ``BLOCK_N / 2`` columns of gate and up.
    """
    PAIRS: tl.constexpr = BLOCK_N // 2
    SIZE: tl.constexpr = OUT_FEATURES // 2
    start_dependents(PDL)
    pair, which = paired_rows(tl.program_id(0), PAIRS)
    weight_row, real = pair.to(tl.int64) + which * SIZE, below(pair, SIZE, PAIRS)
    early = first_weights(
        weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, weight_row, real,
        IN_FEATURES, GROUP_SIZE, LOAD_TILE, WORDS, x_ptr.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    wait_for_input(PDL)
    y = normed_product(
        early, x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, weight_row, real,
        num_rows, stride_x, eps, IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, WORDS,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gate, up = split_pairs(y, PAIRS, BLOCK_M)
    column, row = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, BLOCK_M)
    at = row.to(tl.int64)[None, :] * stride_out + column[:, None]
    mask = below(column, SIZE, PAIRS)[:, None] & (row < num_rows)[None, :]
    tl.store(out_ptr + at, (activated(gate, ACT) * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def linear_rope_write(
    x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr,
    cos_ptr, sin_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    num_rows, stride_x, eps,
    IN_FEATURES: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, WORDS: tl.constexpr, STORE_TILE: tl.constexpr,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Projection to all heads, rotation, queries to ``q_ptr`` and keys and values into the cache.

    A program owns ``BLOCK_N / 2`` pairs (see ``heads.py``). ``slots_ptr``: int64 ``[num_rows]``. ``k_scale_ptr``:
    float32 ``[NUM_KV_HEADS]`` or ``None``; scales per token need whole heads and take ``norm_rope_write``.
    """
    PAIRS: tl.constexpr = BLOCK_N // 2
    HEAD_PAIRS: tl.constexpr = HEAD_DIM // 2
    ALL_PAIRS: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_PAIRS
    start_dependents(PDL)
    pair, which = paired_rows(tl.program_id(0), PAIRS)
    first_at, second_at = pair_columns(pair % HEAD_PAIRS, HEAD_DIM, ROTARY_DIM)
    weight_row = (pair // HEAD_PAIRS * HEAD_DIM + tl.where(which == 0, first_at, second_at)).to(tl.int64)
    real = below(pair, ALL_PAIRS, PAIRS)
    early = first_weights(
        weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, weight_row, real,
        IN_FEATURES, GROUP_SIZE, LOAD_TILE, WORDS, x_ptr.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    wait_for_input(PDL)
    pair, token = (tl.program_id(0) * PAIRS + tl.arange(0, PAIRS))[:, None], tl.arange(0, BLOCK_M)[None, :]
    mask = below(pair, ALL_PAIRS, PAIRS) & (token < num_rows)
    head, pair = pair // HEAD_PAIRS, pair % HEAD_PAIRS
    cos, sin = rotations(cos_ptr, sin_ptr, token, pair, mask & (head < NUM_HEADS + NUM_KV_HEADS), ROTARY_DIM)
    slot = tl.load(slots_ptr + token, mask=token < num_rows, other=-1)
    y = normed_product(
        early, x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, weight_row, real,
        num_rows, stride_x, eps, IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, WORDS,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    first, second = split_pairs(y, PAIRS, BLOCK_M)
    first, second = rotated_pairs(first, second, cos, sin, ROTARY_DIM)
    k_scale = layer_scales(k_scale_ptr, head - NUM_HEADS, NUM_KV_HEADS)
    v_scale = layer_scales(v_scale_ptr, head - NUM_HEADS - NUM_KV_HEADS, NUM_KV_HEADS)
    first_at, second_at = pair_columns(pair, HEAD_DIM, ROTARY_DIM)
    store_heads(
        first, token, slot, head, first_at, mask, q_ptr, k_ptr, v_ptr, k_scale, v_scale,
        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, STORE_TILE,
    )  # fmt: skip
    store_heads(
        second, token, slot, head, second_at, mask, q_ptr, k_ptr, v_ptr, k_scale, v_scale,
        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, STORE_TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def linear_logits(
    x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, out_ptr, best_ptr, index_ptr,
    num_rows, stride_x, eps,
    IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 logits ``[num_rows, OUT_FEATURES]``; with ``best_ptr``, each program's largest logit of every row and
    its column, ``[num_rows, programs]`` float32 and int32."""
    start_dependents(PDL)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row, real = column.to(tl.int64), below(column, OUT_FEATURES, BLOCK_N)
    early = first_weights(
        weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, weight_row, real,
        IN_FEATURES, GROUP_SIZE, LOAD_TILE, WORDS, x_ptr.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    wait_for_input(PDL)
    y = normed_product(
        early, x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, weight_row, real,
        num_rows, stride_x, eps, IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, WORDS,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    in_batch = row < num_rows
    at = row.to(tl.int64)[None, :] * OUT_FEATURES + column[:, None]
    tl.store(out_ptr + at, y, mask=real[:, None] & in_batch[None, :])
    if best_ptr is not None:
        # A column that does not exist ties at worst, and then has the higher index.
        best, index = best_of(tl.where(real[:, None], y, float("-inf")), column[:, None])
        at = row * tl.num_programs(0) + tl.program_id(0)
        tl.store(best_ptr + at, best, mask=in_batch)
        tl.store(index_ptr + at, index, mask=in_batch)
