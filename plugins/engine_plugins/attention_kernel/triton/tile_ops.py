"""Device functions that the attention kernels share: find the work, load a tile of the cache, fold it in.

Vocabulary. A *row* is a sequence of the batch with its ``q_len`` new tokens. All ``q_len * GROUP`` (token, head)
pairs of a row that read the same kv head are *packed* one after another, token-major, so that grouped-query
attention fills the rows of a matrix multiplication; a *query tile* is ``BLOCK_M`` of them, a *key tile* is
``BLOCK_N`` consecutive tokens of the cache. Everything softmax is in base 2: scores carry ``log2(e)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.narrow_types import INTERPRETED
from engine.kernels.triton.tile_ops import LOG2E, dot, tanh


@triton.jit
def tile_of(tiles_ptr, tile):
    """``(row, first packed query)`` of a work item."""
    return tl.load(tiles_ptr + tile * 2), tl.load(tiles_ptr + tile * 2 + 1)


@triton.jit
def lengths_of(row, q_starts_ptr, kv_lens_ptr):
    """``(first token of the row, q_len, kv_len)``."""
    first_token = tl.load(q_starts_ptr + row)
    return first_token, tl.load(q_starts_ptr + row + 1) - first_token, tl.load(kv_lens_ptr + row)


@triton.jit
def first_key(position, reach, REACH: tl.constexpr):
    """The first key that a query at a position sees. ``REACH``: ``full``, or what ``reach`` tokens are: a ``window`` or
    a ``chunk``."""
    if REACH == "chunk":
        return position - position % reach
    elif REACH == "window":
        return tl.maximum(position - reach + 1, 0)
    else:
        return position * 0


@triton.jit
def key_range(
    ends_ptr, start, first_token, q_len, kv_len, reach,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Keys ``[low, high)`` that some query of the tile sees, and the position of the tile's first token: of the last
    key that it sees. ``ends_ptr``: as in :func:`positions_of`."""
    first = start // GROUP
    if ends_ptr is None:
        last = tl.minimum((start + BLOCK_M - 1) // GROUP, q_len - 1)
        first_position = kv_len - q_len + first
        high = tl.maximum(kv_len - q_len + last + 1, 0)
        return first_key(first_position, reach, REACH), high, first_position
    else:  # they do not fall along a row
        tl.static_assert(REACH == "full", "keys that ranks share out are seen from the first one on")
        last = (tl.minimum(start + BLOCK_M, q_len * GROUP) - 1) // GROUP
        real = start < q_len * GROUP
        high = tl.load(ends_ptr + first_token + last, mask=real, other=0)
        return start * 0, high, tl.load(ends_ptr + first_token + first, mask=real, other=0) - 1


@triton.jit
def positions_of(ends_ptr, packed, first_token, q_len, kv_len, GROUP: tl.constexpr):
    """The last key that each packed query sees; -1: none. ``ends_ptr``: int32 ``[num_tokens]``, the one after it, of
    each token, where ranks share out the keys; ``None``: the last query of a row sees its last key."""
    if ends_ptr is None:
        return kv_len - q_len + packed // GROUP
    else:
        return tl.load(ends_ptr + first_token + packed // GROUP, mask=packed < q_len * GROUP, other=0) - 1


@triton.jit
def log_sum_exp(row_max, row_sum):
    """In base 2; ``-inf`` where there is no key."""
    return tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum)))


@triton.jit
def store_sums(
    sums_ptr, log_sums, first_token, kv_head, packed, num_packed, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr
):
    """Natural log-sum-exp of packed queries, of those in base 2, to float32 ``[num_tokens, num_heads]``."""
    at = (first_token + packed // GROUP).to(tl.int64) * (GROUP * NUM_KV_HEADS) + kv_head * GROUP + packed % GROUP
    tl.store(sums_ptr + at, log_sums / LOG2E, mask=packed < num_packed)


@triton.jit
def dim_mask(BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """True for the real ones of ``BLOCK_D`` dimensions; a constant when there is no padding."""
    if BLOCK_D == HEAD_DIM:
        return tl.full([BLOCK_D], 1, tl.int1)
    else:
        return tl.arange(0, BLOCK_D) < HEAD_DIM


@triton.jit
def query_offsets(
    first_token, kv_head, packed, stride_token, stride_head,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """int64 offsets ``[BLOCK_M, BLOCK_D]`` of packed queries into ``[num_tokens, num_heads, head_dim]``."""
    token = (first_token + packed // GROUP).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    return (token * stride_token + head * stride_head)[:, None] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def cache_slots(table_ptr, start, high, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block id (int64) and offset within the block of keys ``start .. start + BLOCK_N``; ids past ``high`` are 0."""
    keys = start + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        # Key tiles start at multiples of BLOCK_N, so this one lies inside one block: a single scalar load.
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64) + tl.zeros([BLOCK_N], tl.int64)
    else:
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < high, other=0).to(tl.int64)
    return block, keys % BLOCK_SIZE


@triton.jit
def tile_lines(
    table_ptr, kv_head, start, low, high, stride_block, stride_slot, stride_head,
    VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ITEM_BITS: tl.constexpr,
):  # fmt: skip
    """Where lines of 128 bytes begin that hold the tile's keys, or values, of ``ITEM_BITS`` a number: int64 offsets
    ``[BLOCK_N, lines]``, 0 for keys outside of ``low .. high``, which may be outside of the cache."""
    PER_LINE: tl.constexpr = 1024 // ITEM_BITS
    LINES: tl.constexpr = (BLOCK_D + PER_LINE - 1) // PER_LINE
    block, offset = cache_slots(table_ptr, start, high, BLOCK_SIZE, BLOCK_N)
    keys, column = start + tl.arange(0, BLOCK_N), tl.arange(0, LINES) * PER_LINE
    at = block * stride_block + offset * stride_slot + kv_head * stride_head
    within = ((keys >= low) & (keys < high))[:, None] & (column < VALUE_DIM)[None, :]
    return tl.where(within, at[:, None] + column[None, :], 0)


@triton.jit
def fetch_tile(
    k_ptr, v_ptr, table_ptr, kv_head, start, low, high, is_wanted, stride_block, stride_slot, stride_head,
    VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Have keys ``start .. start + BLOCK_N`` and their values brought into the L2 cache. Nothing is read, so a key that
    the kernel before this one is still writing may be among them."""
    if is_wanted:
        at = tile_lines(
            table_ptr, kv_head, start, low, high, stride_block, stride_slot, stride_head,
            VALUE_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, k_ptr.dtype.element_ty.primitive_bitwidth,
        )  # fmt: skip
        fetch_lines(k_ptr + at)
        if v_ptr is not None:
            fetch_lines(v_ptr + at)


@triton.jit
def fetch_lines(pointers):
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def converted_by_loader(x):
    """``x`` of 16 bits, converted by the thread that loaded it. Left alone, the compiler converts where tensor cores
    take their operands: numbers of 8 bits are then read from shared memory one by one, and in prompts by every warp."""
    if x.dtype.primitive_bitwidth == 16 and not INTERPRETED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)
    else:
        return x


@triton.jit
def load_cache(
    cache_ptr, block, offset, kv_head, mask, stride_block, stride_slot, stride_head,
    BLOCK_D: tl.constexpr, LOAD_TILE: tl.constexpr, DTYPE: tl.constexpr, BY_LOADER: tl.constexpr,
):  # fmt: skip
    """A key or value tile ``[BLOCK_N, BLOCK_D]`` in ``DTYPE`` as it is stored, unscaled; 0 where masked.
    ``BY_LOADER``: see :func:`converted_by_loader`."""
    # block is int64: block * stride_block passes 2**31 elements in caches of a few GB.
    at = block * stride_block + offset * stride_slot + kv_head * stride_head
    offsets = at[:, None] + tl.arange(0, BLOCK_D)[None, :]
    if LOAD_TILE is None:
        return tl.load(cache_ptr + offsets, mask=mask, other=0.0).to(DTYPE)
    elif BY_LOADER:
        return converted_by_loader(LOAD_TILE(cache_ptr, offsets, mask, DTYPE))
    else:
        return LOAD_TILE(cache_ptr, offsets, mask, DTYPE)


@triton.jit
def token_scales(
    scale_ptr, block, offset, kv_head, within, MASKED: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Scales ``[1, BLOCK_N]`` of a tile's tokens, to multiply its columns of scores or probabilities with; 1 where they
    are not ``within`` what some query sees: there none may have been written."""
    at = (block * BLOCK_SIZE + offset) * NUM_KV_HEADS + kv_head
    if MASKED:
        return tl.load(scale_ptr + at, mask=within, other=1.0)[None, :]
    else:
        return tl.load(scale_ptr + at)[None, :]


@triton.jit
def head_scale(scale_ptr, kv_head, SCALE: tl.constexpr):
    """The scale of a layer's head; 1 in formats without such scales."""
    if SCALE == "per_layer_head":
        return tl.load(scale_ptr + kv_head)
    else:
        return 1.0


@triton.jit
def capped(scores, scale, soft_cap, HAS_CAP: tl.constexpr):
    """Scaled, optionally soft-capped scores in base 2."""
    if HAS_CAP:
        return tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2E)
    else:
        return scores * (scale * LOG2E)


@triton.jit
def start_state(
    sinks_ptr, kv_head, packed, counted, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """``(acc, row_max, row_sum)`` of packed queries before any key. A sink is a score of no value: it is there from the
    start, where it is ``counted``; of programs that share a tile's keys one counts it."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + kv_head * GROUP + packed % GROUP) * LOG2E
        row_max = tl.where(counted, sinks, row_max)
        row_sum = tl.where(counted, 1.0, row_sum)
    return acc, row_max, row_sum


@triton.jit
def load_queries(
    q_ptr, first_token, kv_head, packed, num_packed, stride_token, stride_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_M, BLOCK_D]``: dimensions ``0 .. VALUE_DIM``, and ``[BLOCK_M, BLOCK_R]``: those after them; without any
    (``BLOCK_R`` 0) the first twice."""
    known = (packed < num_packed)[:, None]
    at = query_offsets(first_token, kv_head, packed, stride_token, stride_head, GROUP, BLOCK_D)
    q = tl.load(q_ptr + at, mask=known & dim_mask(BLOCK_D, VALUE_DIM)[None, :], other=0.0)
    if BLOCK_R == 0:
        return q, q
    else:
        at = query_offsets(first_token, kv_head, packed, stride_token, stride_head, GROUP, BLOCK_R)
        real = known & dim_mask(BLOCK_R, HEAD_DIM - VALUE_DIM)[None, :]
        return q, tl.load(q_ptr + VALUE_DIM + at, mask=real, other=0.0)


@triton.jit
def fold_tile(
    acc, row_max, row_sum, q, q_rest, positions,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, kv_head, start, low, high,
    stride_block, stride_slot, stride_head, scale, soft_cap, reach,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, REACH: tl.constexpr, HAS_CAP: tl.constexpr, SCALE: tl.constexpr,
    LOAD_TILE: tl.constexpr,
):  # fmt: skip
    """One step of online softmax (arXiv 2205.14135): fold keys ``start .. start + BLOCK_N`` into the running state.

    ``MASKED=False`` promises that every query sees every key of the tile. Scales per token multiply columns of scores
    and of probabilities, a number per query and key instead of one per dimension too; those of a whole head
    (:func:`head_scale`) are the caller's, in ``scale`` and in the result. Without ``v_ptr`` a key's first ``VALUE_DIM``
    numbers are its value: it is loaded once.
    """
    block, offset = cache_slots(table_ptr, start, high, BLOCK_SIZE, BLOCK_N)
    keys = start + tl.arange(0, BLOCK_N)
    # What lies past `high` may be memory never written, and what lies before `low`, which a window or a chunk has
    # passed, another request's; 0 * NaN is NaN: neither may even be loaded.
    within = keys < high
    if REACH != "full":
        within = within & (keys >= low)
    if not MASKED:
        within = tl.full([BLOCK_N], 1, tl.int1)
    mask = within[:, None] & dim_mask(BLOCK_D, VALUE_DIM)[None, :]
    # The sums of more queries of latent attention leave no registers for it.
    BY_LOADER: tl.constexpr = v_ptr is not None or q.shape[0] <= 16
    k = load_cache(
        k_ptr, block, offset, kv_head, mask,
        stride_block, stride_slot, stride_head, BLOCK_D, LOAD_TILE, q.dtype, BY_LOADER,
    )  # fmt: skip
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
    if BLOCK_R > 0:
        rest = within[:, None] & dim_mask(BLOCK_R, HEAD_DIM - VALUE_DIM)[None, :]
        k_rest = load_cache(
            k_ptr + VALUE_DIM, block, offset, kv_head, rest,
            stride_block, stride_slot, stride_head, BLOCK_R, LOAD_TILE, q.dtype, BY_LOADER,
        )  # fmt: skip
        scores = dot(q_rest, tl.trans(k_rest), scores)
    if SCALE == "per_token_head":
        scores *= token_scales(k_scale_ptr, block, offset, kv_head, within, MASKED, NUM_KV_HEADS, BLOCK_SIZE)
    scores = capped(scores, scale, soft_cap, HAS_CAP)
    if MASKED:
        visible = (keys[None, :] <= positions[:, None]) & (keys < high)[None, :]
        if REACH != "full":
            visible = visible & (keys[None, :] >= first_key(positions, reach, REACH)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A query that has seen no key yet has a maximum of -inf; -inf - -inf would be NaN.
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - pivot[:, None])
    shrink = tl.exp2(row_max - pivot)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    if SCALE == "per_token_head":
        weights *= token_scales(v_scale_ptr, block, offset, kv_head, within, MASKED, NUM_KV_HEADS, BLOCK_SIZE)
    if v_ptr is None:
        v = k
    else:
        v = load_cache(
            v_ptr, block, offset, kv_head, mask,
            stride_block, stride_slot, stride_head, BLOCK_D, LOAD_TILE, q.dtype, BY_LOADER,
        )  # fmt: skip
    return dot(weights.to(q.dtype), v, acc * shrink[:, None]), new_max, row_sum
