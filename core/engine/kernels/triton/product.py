"""The core of all skinny kernels: RMSNorm and product for up to 16 rows, for the columns of one program.

The norm costs no launch and no pass of its own: ``rms`` is one number per row and commutes with the product, so the
sum of squares is gathered in the loop that multiplies, and the row is scaled once at the end. Not so where tensor cores
multiply words (``WORDS`` of a tile for each thread, else 0; ``fragments.py``): their rows were normed before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton import fragments
from engine.kernels.triton.fragments import first_tiles, fragments_product
from engine.kernels.triton.tile_ops import below, dot

TILE_INPUTS = tl.constexpr(fragments.TILE)


@triton.jit
def load_row(x_ptr, norm_ptr, start, IN_FEATURES: tl.constexpr, BLOCK_K: tl.constexpr):
    """``x`` and ``x * norm_weight``, float32 ``[BLOCK_K]``, 0 beyond the input."""
    columns = start + tl.arange(0, BLOCK_K)
    mask = below(columns, IN_FEATURES, BLOCK_K)
    x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if norm_ptr is None:
        return x, x
    else:
        return x, x * tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_rows(
    x_ptr, norm_ptr, start, num_rows, stride_x, IN_FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The same for ``[BLOCK_M, BLOCK_K]``, 0 in rows from ``num_rows`` on."""
    columns, row = start + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    inside = below(columns, IN_FEATURES, BLOCK_K)
    mask = (row < num_rows)[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * stride_x + columns[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if norm_ptr is None:
        return x, x
    else:
        wide = x.to(tl.float32)
        return wide, wide * tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def unpacked(loaded, UNPACK_TILE: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of weights in ``DTYPE`` of what ``LOAD_TILE`` returned."""
    if UNPACK_TILE is None:
        return loaded.to(DTYPE)
    else:
        return UNPACK_TILE(loaded, DTYPE)


@triton.jit
def tile_scaled(loaded, tile, TILE_SCALE: tl.constexpr):
    """``tile [BLOCK_N, inputs]``, or sums of neighbouring inputs of it, times the factors of its groups, if any."""
    if TILE_SCALE is None:
        return tile
    else:
        scale = TILE_SCALE(loaded)
        if scale.shape[1] == 1:
            return tile * scale
        else:
            groups = tl.reshape(tile, [tile.shape[0], scale.shape[1], tile.shape[1] // scale.shape[1]])
            return tl.reshape(groups * scale[:, :, None], tile.shape)


@triton.constexpr_function
def folding(group_size: int, tile_scale: object) -> int:
    """How many neighbouring products are summed before they are multiplied by their group's factor."""
    if tile_scale is None:
        return 1
    return group_size if 0 < group_size < 8 else 8


@triton.jit
def scaled_sums(loaded, products, TILE_SCALE: tl.constexpr, FOLD: tl.constexpr):
    """``products [BLOCK_N, BLOCK_K]`` with a tile's weights -> ``[BLOCK_N, BLOCK_K / FOLD]``, times its factors."""
    if FOLD > 1:
        parts = tl.reshape(products, [products.shape[0], products.shape[1] // FOLD, FOLD])
        return tile_scaled(loaded, tl.sum(parts, 2), TILE_SCALE)
    else:
        return tile_scaled(loaded, products, TILE_SCALE)


@triton.jit
def add_product(acc, loaded, x, UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """``acc + weights @ x`` on tensor cores. A factor that all of a channel's tile has multiplies its sums, not its
    weights."""
    if TILE_SCALE is None:
        return dot(unpacked(loaded, UNPACK_TILE, DTYPE), x, acc)
    else:
        scale = TILE_SCALE(loaded)
        if scale.shape[1] == 1:
            return acc + dot(unpacked(loaded, UNPACK_TILE, DTYPE), x, tl.zeros_like(acc)) * scale
        else:
            return dot(tile_scaled(loaded, unpacked(loaded, UNPACK_TILE, tl.float32), TILE_SCALE).to(DTYPE), x, acc)


@triton.jit
def first_weights(
    weight_ptr, scale_ptr, zero_ptr, channel_scale_ptr, bias_ptr, rows, real,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr, WORDS: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """All that a product reads before its kernel waits for the one before it (``wait_for_input``): the first tiles of
    weights, two for one row, and each channel's scale and bias, float32 ``[BLOCK_N]``."""
    channel_scale = tl.full([BLOCK_N], 1.0, tl.float32)
    if channel_scale_ptr is not None:
        channel_scale = tl.load(channel_scale_ptr + rows, mask=real, other=0.0)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, mask=real, other=0.0).to(tl.float32)
    if WORDS > 0:
        first, second = first_tiles(
            weight_ptr, scale_ptr, zero_ptr, rows, real, IN_FEATURES, GROUP_SIZE, LOAD_TILE, BLOCK_K // TILE_INPUTS
        )
        return first, second, channel_scale, bias
    else:
        tile = LOAD_TILE(weight_ptr, scale_ptr, zero_ptr, rows, real, 0, IN_FEATURES, GROUP_SIZE, BLOCK_K, DTYPE)
        if BLOCK_M == 1 and IN_FEATURES > BLOCK_K:
            second = LOAD_TILE(
                weight_ptr, scale_ptr, zero_ptr, rows, real, BLOCK_K, IN_FEATURES, GROUP_SIZE, BLOCK_K, DTYPE
            )
            return tile, second, channel_scale, bias
        else:
            return tile, tile, channel_scale, bias


@triton.jit
def one_row_product(
    tile, second, x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, rows, real,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums ``[BLOCK_N, 1]`` and the row's sum of squares ``[1]``, without tensor cores.

    Products are added where they arise, in registers, and summed across threads once at the end. Two tiles of weights
    are on their way while one is multiplied, and one piece of the input.
    """
    LAST: tl.constexpr = (IN_FEATURES - 1) // BLOCK_K * BLOCK_K
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    FOLD: tl.constexpr = folding(GROUP_SIZE, TILE_SCALE)
    acc = tl.zeros([BLOCK_N, BLOCK_K // FOLD], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    x, y = load_row(x_ptr, norm_ptr, 0, IN_FEATURES, BLOCK_K)
    if LAST > 0:
        for start in tl.range(0, LAST - BLOCK_K, BLOCK_K, loop_unroll_factor=1 if UNPACK_TILE is None else 2):
            third = LOAD_TILE(
                weight_ptr, scale_ptr, zero_ptr, rows, real, start + 2 * BLOCK_K,
                IN_FEATURES, GROUP_SIZE, BLOCK_K, DTYPE,
            )  # fmt: skip
            next_x, next_y = load_row(x_ptr, norm_ptr, start + BLOCK_K, IN_FEATURES, BLOCK_K)
            acc += scaled_sums(tile, unpacked(tile, UNPACK_TILE, tl.float32) * y[None, :], TILE_SCALE, FOLD)
            squares += x * x
            tile, second = second, third
            x, y = next_x, next_y
        next_x, next_y = load_row(x_ptr, norm_ptr, LAST, IN_FEATURES, BLOCK_K)
        acc += scaled_sums(tile, unpacked(tile, UNPACK_TILE, tl.float32) * y[None, :], TILE_SCALE, FOLD)
        squares += x * x
        tile, x, y = second, next_x, next_y
    acc += scaled_sums(tile, unpacked(tile, UNPACK_TILE, tl.float32) * y[None, :], TILE_SCALE, FOLD)
    squares += x * x
    return tl.sum(acc, 1)[:, None], tl.sum(squares, 0) + tl.zeros([1], tl.float32)


@triton.jit
def sum_of_squares(x_ptr, num_rows, stride_x, IN_FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of each row, ``[BLOCK_M]`` float32."""
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        x, _ = load_rows(x_ptr, None, start, num_rows, stride_x, IN_FEATURES, BLOCK_M, BLOCK_K)
        squares += x.to(tl.float32) * x.to(tl.float32)
    return tl.sum(squares, 1)


@triton.jit
def few_rows_product(
    tile, x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, rows, real, num_rows, stride_x, eps,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products ``[BLOCK_N, BLOCK_M]`` and reciprocal rms still to be applied ``[BLOCK_M]``, on tensor cores.

    The weights are the first operand: their rows fill the tensor core's 16 whatever the number of tokens.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # x * norm_weight may pass 65504, float16's largest: there the rows are scaled before they are rounded.
    EARLY: tl.constexpr = norm_ptr is not None and tl.float16 == DTYPE
    early = tl.full([BLOCK_M], 1.0, tl.float32)
    if EARLY:
        total = sum_of_squares(x_ptr, num_rows, stride_x, IN_FEATURES, BLOCK_M, BLOCK_K)
        early = tl.rsqrt(total / IN_FEATURES + eps)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    x, y = load_rows(x_ptr, norm_ptr, 0, num_rows, stride_x, IN_FEATURES, BLOCK_M, BLOCK_K)
    if EARLY:
        y = y * early[:, None]
    acc = add_product(acc, tile, tl.trans(y.to(DTYPE)), UNPACK_TILE, TILE_SCALE, DTYPE)
    if norm_ptr is not None and not EARLY:
        squares += x * x
    for start in range(BLOCK_K, IN_FEATURES, BLOCK_K):
        tile = LOAD_TILE(weight_ptr, scale_ptr, zero_ptr, rows, real, start, IN_FEATURES, GROUP_SIZE, BLOCK_K, DTYPE)
        x, y = load_rows(x_ptr, norm_ptr, start, num_rows, stride_x, IN_FEATURES, BLOCK_M, BLOCK_K)
        if EARLY:
            y = y * early[:, None]
        acc = add_product(acc, tile, tl.trans(y.to(DTYPE)), UNPACK_TILE, TILE_SCALE, DTYPE)
        if norm_ptr is not None and not EARLY:
            squares += x * x
    if norm_ptr is None or EARLY:
        return acc, tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        return acc, tl.rsqrt(tl.sum(squares, 1) / IN_FEATURES + eps)


@triton.jit
def normed_product(
    first, x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, rows, real, num_rows, stride_x, eps,
    IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, LOAD_TILE: tl.constexpr,
    UNPACK_TILE: tl.constexpr, TILE_SCALE: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``norm(x) @ W[rows].T * channel_scale + bias``, transposed: float32 ``[BLOCK_N, BLOCK_M]``.

    ``first``: what :func:`first_weights` loaded. ``rows``: int64 ``[BLOCK_N]``, weight rows, any order; ``real``: bool,
    False for rows that do not exist (their results are 0 or a bias read by nobody). ``norm_ptr`` is ``None`` for inputs
    that are not normed.
    """
    tile, second, channel_scale, bias = first
    if WORDS > 0:
        tl.static_assert(norm_ptr is None, "rows are normed before")
        acc = fragments_product(
            tile, second, x_ptr, weight_ptr, scale_ptr, zero_ptr, rows, real, num_rows, stride_x,
            IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, WORDS, BLOCK_M, BLOCK_K // TILE_INPUTS,
        )  # fmt: skip
        scale = tl.full([BLOCK_M], 1.0, tl.float32)
    elif BLOCK_M == 1:
        acc, squares = one_row_product(
            tile, second, x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, rows, real,
            IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        scale = tl.full([1], 1.0, tl.float32)
        if norm_ptr is not None:
            scale = tl.rsqrt(squares / IN_FEATURES + eps)
    else:
        acc, scale = few_rows_product(
            tile, x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, rows, real, num_rows, stride_x, eps,
            IN_FEATURES, GROUP_SIZE, LOAD_TILE, UNPACK_TILE, TILE_SCALE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return acc * scale[None, :] * channel_scale[:, None] + bias[:, None]
