"""Query, key and value heads: rotation, and where each goes.

A head is handled as ``head_dim / 2`` *pairs*: the two dimensions that one rotation mixes, ``(i, i + rotary_dim/2)``
(half-split rotary embedding); dimensions beyond ``rotary_dim``, and those of values, are paired likewise and pass. So a
program that computes any set of pairs can rotate and store them, without the rest of the head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.tile_ops import below, start_dependents, wait_for_input


@triton.jit
def pair_columns(pair, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """The two dimensions of pair ``0 <= pair < HEAD_DIM / 2`` of a head."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    rotated = pair < HALF
    first = tl.where(rotated, pair, HALF + pair)
    return first, first + tl.where(rotated, HALF, (HEAD_DIM - ROTARY_DIM) // 2)


@triton.jit
def rotations(cos_ptr, sin_ptr, token, pair, is_rotated, ROTARY_DIM: tl.constexpr):
    """Cosines and sines of pairs, in the shape that ``token``, ``pair`` and ``is_rotated`` broadcast to; 1 and 0 of
    those that pass.

    ``cos_ptr``, ``sin_ptr``: float32 ``[num_tokens, ROTARY_DIM / 2]``, not read where ``ROTARY_DIM`` is 0.
    """
    if ROTARY_DIM == 0:
        return 1.0, 0.0
    else:
        HALF: tl.constexpr = ROTARY_DIM // 2
        mask = is_rotated & (pair < HALF)
        at = token * HALF + pair
        return tl.load(cos_ptr + at, mask=mask, other=1.0), tl.load(sin_ptr + at, mask=mask, other=0.0)


@triton.jit
def rotated_pairs(first, second, cos, sin, ROTARY_DIM: tl.constexpr):
    """Float32 pairs, rotated by what :func:`rotations` has for them."""
    if ROTARY_DIM == 0:
        return first, second
    else:
        return first * cos - second * sin, second * cos + first * sin


@triton.jit
def store_cache(cache_ptr, at, x, mask, scale, STORE_TILE: tl.constexpr):
    """Through the format's function, or as it is."""
    if STORE_TILE is None:
        tl.store(cache_ptr + at, x.to(cache_ptr.dtype.element_ty), mask=mask)
    else:
        STORE_TILE(cache_ptr, at, x, mask, scale)


@triton.jit
def store_heads(
    x, token, slot, head, column, mask, q_ptr, k_ptr, v_ptr, k_scale, v_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STORE_TILE: tl.constexpr,
):  # fmt: skip
    """Store float32 ``x``: heads are numbered queries first, then keys, then values.

    All index arguments broadcast to the shape of ``x``. Queries go to ``[num_tokens, NUM_HEADS, HEAD_DIM]``, keys and
    values to ``slot`` (int64; none if negative) of the cache. ``k_scale``, ``v_scale``: as ``STORE_TILE`` expects.
    """
    x = x.to(q_ptr.dtype.element_ty)
    q_at = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + column
    tl.store(q_ptr + q_at, x, mask=mask & (head < NUM_HEADS))
    stored = mask & (slot >= 0)
    key_head = head - NUM_HEADS
    k_at = (slot * NUM_KV_HEADS + key_head) * HEAD_DIM + column
    store_cache(k_ptr, k_at, x, stored & (key_head >= 0) & (key_head < NUM_KV_HEADS), k_scale, STORE_TILE)
    value_head = key_head - NUM_KV_HEADS
    v_at = (slot * NUM_KV_HEADS + value_head) * HEAD_DIM + column
    store_cache(v_ptr, v_at, x, stored & (value_head >= 0), v_scale, STORE_TILE)


@triton.jit
def layer_scales(scale_ptr, head, NUM_KV_HEADS: tl.constexpr):
    """Scales ``[NUM_KV_HEADS]`` of a layer by head, 1 for heads out of range and where there are no scales."""
    if scale_ptr is None:
        return tl.full([1, 1], 1.0, tl.float32)
    else:
        return tl.load(scale_ptr + head, mask=(head >= 0) & (head < NUM_KV_HEADS), other=1.0)


@triton.jit
def norm_heads(first, second, head, columns, second_columns, mask, norm_ptr, eps, LOW: tl.constexpr,
                HIGH: tl.constexpr, HEAD_DIM: tl.constexpr):  # fmt: skip
    """RMSNorm of heads ``LOW <= head < HIGH``: both halves of the pairs, normed there and unchanged elsewhere.

    ``first``, ``second``: float32 ``[BLOCK_H, BLOCK_P]``, 0 beyond the head; ``head``: ``[BLOCK_H, 1]``; ``columns``,
    ``second_columns``: their dimensions, and ``mask``: which of them exist, ``[1, BLOCK_P]``; ``norm_ptr``:
    ``[HEAD_DIM]``.
    """
    chosen = (head >= LOW) & (head < HIGH)
    total = tl.sum(first * first + second * second, 1)[:, None]
    scale = tl.rsqrt(total / HEAD_DIM + eps)
    first_weight = tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    second_weight = tl.load(norm_ptr + second_columns, mask=mask, other=0.0).to(tl.float32)
    return (
        tl.where(chosen, first * scale * first_weight, first),
        tl.where(chosen, second * scale * second_weight, second),
    )


@triton.jit
def store_token_scale(first, second, scale_ptr, slot, head, LARGEST: tl.constexpr, NUM_KV_HEADS: tl.constexpr):
    """Scale of each head, float32 ``[BLOCK_H, 1]``, that brings its largest element to ``LARGEST``.

    Also stored at ``slot`` (int64, none if negative) of ``scale_ptr``, float32 ``[slots, NUM_KV_HEADS]``, for heads
    ``0 <= head < NUM_KV_HEADS``. ``first``, ``second``: float32 ``[BLOCK_H, BLOCK_P]``.
    """
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))[:, None]
    scale = tl.maximum(largest / LARGEST, 1e-12)
    mask = (head >= 0) & (head < NUM_KV_HEADS) & (slot >= 0)
    tl.store(scale_ptr + slot * NUM_KV_HEADS + head, scale, mask=mask)
    return scale


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def norm_rope_write(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    stride_token, q_eps, k_eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    SCALE: tl.constexpr, LARGEST: tl.constexpr, STORE_TILE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program ``(token, block of heads)``: norm of each query and key head, rotation, cache write.

    ``qkv_ptr``: ``[num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]``, rows ``stride_token`` apart.
    ``q_norm_ptr``, ``k_norm_ptr``: ``[HEAD_DIM]`` or ``None``. ``SCALE`` as in ``KVFormat.scale``;
    ``LARGEST``: the storage dtype's largest number.
    """
    start_dependents(PDL)
    wait_for_input(PDL)
    PAIRS: tl.constexpr = HEAD_DIM // 2
    KV_START: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    token = tl.program_id(0)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    first_at, second_at = pair_columns(pair, HEAD_DIM, ROTARY_DIM)
    in_head = below(pair, PAIRS, BLOCK_P)
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & in_head
    source = qkv_ptr + token.to(tl.int64) * stride_token + head * HEAD_DIM
    first = tl.load(source + first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + second_at, mask=mask, other=0.0).to(tl.float32)
    if q_norm_ptr is not None:
        first, second = norm_heads(
            first, second, head, first_at, second_at, in_head, q_norm_ptr, q_eps, 0, NUM_HEADS, HEAD_DIM
        )
    if k_norm_ptr is not None:
        first, second = norm_heads(
            first, second, head, first_at, second_at, in_head, k_norm_ptr, k_eps, NUM_HEADS, KV_START, HEAD_DIM
        )
    cos, sin = rotations(cos_ptr, sin_ptr, token, pair, mask & (head < KV_START), ROTARY_DIM)
    first, second = rotated_pairs(first, second, cos, sin, ROTARY_DIM)
    # What a scale is taken of is what is stored: the values as rounded to the compute dtype.
    first, second = first.to(q_ptr.dtype.element_ty), second.to(q_ptr.dtype.element_ty)
    slot = tl.load(slots_ptr + token + tl.zeros([1, 1], tl.int32))
    if SCALE == "per_token_head":
        wide, wide_second = first.to(tl.float32), second.to(tl.float32)
        k_scale = store_token_scale(wide, wide_second, k_scale_ptr, slot, head - NUM_HEADS, LARGEST, NUM_KV_HEADS)
        v_scale = store_token_scale(wide, wide_second, v_scale_ptr, slot, head - KV_START, LARGEST, NUM_KV_HEADS)
    else:
        k_scale = layer_scales(k_scale_ptr, head - NUM_HEADS, NUM_KV_HEADS)
        v_scale = layer_scales(v_scale_ptr, head - KV_START, NUM_KV_HEADS)
    store_heads(
        first, token, slot, head, first_at, mask, q_ptr, k_ptr, v_ptr, k_scale, v_scale,
        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, STORE_TILE,
    )  # fmt: skip
    store_heads(
        second, token, slot, head, second_at, mask, q_ptr, k_ptr, v_ptr, k_scale, v_scale,
        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, STORE_TILE,
    )  # fmt: skip
